"""`timings: true`: the same numbers, from the engine's own account, in whole and streamed answers."""

from __future__ import annotations

import json

import openai
import pytest
from scripted_engine import always, delta, finished, length, stop
from sse_reader import read_events

from penstock.contract.events import RequestFinished, Usage
from penstock.contract.measurements import Timings

LIFE = Timings(
    arrived=100.0, admitted=100.25, first_token=100.75, last_token=102.75, ended=102.8, drafted=6, accepted=4
)
TIMED = always(delta("Hel"), delta("lo"), stop(), RequestFinished(Usage(13, 5, 8), LIFE))
EXPECTED = {
    "queue_ms": 250.0,
    "cache_n": 8,
    "prompt_n": 5,
    "prompt_ms": 500.0,
    "prompt_per_second": 10.0,
    "predicted_n": 5,
    "predicted_ms": 2000.0,
    "predicted_per_token_ms": 500.0,
    "predicted_per_second": 2.0,
    "draft_n": 6,
    "draft_n_accepted": 4,
    "total_ms": 2800.0,
    "parts_ms": None,
}


def events(response) -> list[dict]:
    *datas, last = [event.data for event in read_events(response.content)]
    assert last == "[DONE]"
    return [json.loads(data) for data in datas]


def test_a_whole_answer_ends_with_its_timings(served):
    served.engine.script = TIMED
    for call in (served.chat, served.complete, served.generate):
        assert call(timings=True).json()["timings"] == EXPECTED


def test_no_timings_come_unasked(served):
    served.engine.script = TIMED
    for call in (served.chat, served.complete, served.generate):
        for fields in ({}, {"timings": False}, {"timings": None}):
            assert "timings" not in call(**fields).json()
    assert all("timings" not in event for event in events(served.chat(stream=True)))


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_a_stream_ends_with_them_in_a_chunk_of_no_choice(served, endpoint):
    served.engine.script = TIMED
    *pieces, last = events(getattr(served, endpoint)(stream=True, timings=True))
    assert last["choices"] == []
    assert last["timings"] == EXPECTED
    assert "usage" not in last
    assert all("timings" not in piece for piece in pieces)


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_usage_and_timings_share_the_last_chunk(served, endpoint):
    served.engine.script = TIMED
    fields = {"stream": True, "timings": True, "stream_options": {"include_usage": True}}
    *pieces, last = events(getattr(served, endpoint)(**fields))
    assert last["timings"] == EXPECTED
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
    assert all(piece["usage"] is None for piece in pieces)


def test_prompts_of_one_request_are_timed_together(served):
    lives = iter((Timings(1.0, 2.0, 3.0, 4.0, 4.0), Timings(1.0, 1.5, 3.5, 6.5, 7.0)))
    usages = iter((Usage(4, 3, 0), Usage(6, 4, 1)))
    served.engine.script = lambda request: (delta("x"), length(), RequestFinished(next(usages), next(lives)))
    timings = served.complete(prompt=["a", "b"], timings=True).json()["timings"]
    assert (timings["queue_ms"], timings["prompt_ms"], timings["predicted_ms"]) == (500.0, 1500.0, 3500.0)
    assert (timings["prompt_n"], timings["predicted_n"], timings["total_ms"]) == (9, 7, 6000.0)
    assert timings["predicted_per_second"] == round(5 / 3.5, 3)


@pytest.mark.parametrize("value", [1, "true", {}])
def test_timings_must_be_a_boolean(served, value):
    answer = served.chat(timings=value)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "timings"


def test_a_stream_of_plain_text_has_no_place_for_timings(served):
    answer = served.generate(stream=True, timings=True)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "timings"


def test_the_official_client_reads_them(served):
    served.engine.script = TIMED
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "Hi"}]
    whole = client.chat.completions.create(model="acme/tiny-1", messages=messages, extra_body={"timings": True})
    assert whole.timings == EXPECTED
    stream = client.chat.completions.create(
        model="acme/tiny-1", messages=messages, stream=True, extra_body={"timings": True}
    )
    *_, last = stream
    assert last.timings == EXPECTED
    client.close()


def test_cached_tokens_are_told_without_asking(served):
    served.engine.script = always(delta("x"), stop(), finished(prompt=9, completion=1, cached=4))
    for call in (served.chat, served.complete, served.generate):
        assert call().json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
