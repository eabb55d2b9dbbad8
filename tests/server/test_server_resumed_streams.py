"""A stream that is cut after any event goes on where it was: joined, the events are those of a stream that was not."""

from __future__ import annotations

import hashlib
import json
import random
import re
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import anthropic
import httpx
import openai
import pytest
from resuming import CHAT, COMPLETIONS, MESSAGES, RESPONSES, blocks, cut, id_of, nameless, resume, told
from scripted_engine import Script, ScriptedEngine, Until, Wait, always, delta, failed, finished, length, stop
from server_harness import CARD, LIMITS, running
from sse_reader import read_events
from test_server_stream import ECHOED, SPLIT, TOPPED
from test_server_tools import CALL_SCRIPTS, NOW, WEATHER

from penstock.contract.events import ChoiceDelta, Output, PromptTokens, TokenPiece
from penstock.contract.limits import ServerLimits
from penstock.engine.output_queue import merge
from penstock.journal import StreamJournal
from penstock.server import create_app
from penstock.server.http.access import Access, ApiKeys
from penstock.server.http.caller import Caller
from penstock.server.http.lifecycle import lifecycle_of

HI = [{"role": "user", "content": "Hi"}]
USAGE = {"stream_options": {"include_usage": True}}
RUNNING = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
TOOLS = {"tools": [WEATHER, NOW]}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def token(text: str, at: int = 0) -> tuple[TokenPiece, ...]:
    return (TokenPiece(7, text.encode(), -0.5, start=at),)


TWO = (delta("a", 0), delta("b", 1), delta("c", 1), delta("d", 0), stop(1), delta("e", 0), length(0), finished(5, 5))
HELD = (
    delta("The "),
    ChoiceDelta(0, "", token("en")),
    ChoiceDelta(0, "en", token("t")),
    ChoiceDelta(0, "ter", ()),
    stop(by="end"),
    finished(5, 4),
)
"""Text that may begin a stop string: it is held back, and comes without tokens."""
THOUGHT = (
    ChoiceDelta(0, "", token("<t>"), "", (), 1),
    ChoiceDelta(0, "", token("hm"), "hm", (), 1),
    ChoiceDelta(0, "", token("m"), "m", (), 1),
    ChoiceDelta(0, "", token("</t>"), "", (), 1),
    ChoiceDelta(0, "Hé", token("Hé")),
    ChoiceDelta(0, "", token("\xf0")),
    ChoiceDelta(0, "🦙", token("y")),
    ChoiceDelta(0, "", token("z")),
    length(),
    finished(5, 8),
)


def of_each_prompt(request) -> tuple[Output, ...]:
    mark = request.prompt.text
    return (PromptTokens(mark, token(mark)), delta(mark + "0", 0), delta(mark + "1", 1), stop(1), stop(0), finished())


CASES: dict[str, tuple[str, dict, Script]] = {
    "chat": (CHAT, {}, always(delta("Hel"), delta("lo"), delta(" you"), stop(), finished())),
    "nothing": (CHAT, USAGE, always(stop(), finished(5, 0))),
    "n=2 with usage": (CHAT, {"n": 2, **USAGE}, always(*TWO)),
    "running usage": (
        CHAT,
        RUNNING,
        always(PromptTokens("Hi", token("Hi")), *TWO[:1], delta("x"), length(), finished()),
    ),
    "chat logprobs": (CHAT, {"logprobs": True}, always(*SPLIT)),
    "chat top logprobs": (CHAT, {"logprobs": True, "top_logprobs": 2}, always(*TOPPED)),
    "stop strings": (CHAT, {"stop": ["end"]}, always(*HELD)),
    "thinking": (CHAT, {"logprobs": True, **USAGE}, always(*THOUGHT)),
    **{f"chat: {name}": (CHAT, TOOLS | USAGE, script) for name, script in CALL_SCRIPTS.items()},
    "chat logprobs beside calls": (CHAT, TOOLS | {"logprobs": True}, CALL_SCRIPTS["all"]),
    "completion": (COMPLETIONS, {"n": 2}, always(*TWO)),
    "completion logprobs": (COMPLETIONS, {"logprobs": 0}, always(*SPLIT)),
    "echo": (COMPLETIONS, {"n": 2, "echo": True, "logprobs": 1}, always(*ECHOED)),
    "prompts": (COMPLETIONS, {"prompt": ["a", "b", "c"], "n": 2, "echo": True, **USAGE}, of_each_prompt),
    "messages": (MESSAGES, {"max_tokens": 9}, always(*THOUGHT)),
    **{f"messages: {name}": (MESSAGES, {"max_tokens": 9}, script) for name, script in CALL_SCRIPTS.items()},
    "responses": (RESPONSES, {}, always(*THOUGHT)),
    "responses logprobs": (RESPONSES, LOGPROBS, always(*THOUGHT)),
    **{f"responses: {name}": (RESPONSES, {}, script) for name, script in CALL_SCRIPTS.items()},
    "responses logprobs beside calls": (RESPONSES, LOGPROBS, CALL_SCRIPTS["all"]),
}
OPENINGS = {
    CHAT: {"messages": HI},
    COMPLETIONS: {"prompt": "Hi"},
    RESPONSES: {"input": "Hi"},
    MESSAGES: {"messages": HI},
}


def asked(path: str, fields: dict) -> dict:
    return OPENINGS[path] | {"stream": True} | fields | ({"model": "acme/tiny-1"} if path == MESSAGES else {})


TYPICAL = {
    "n=2 with usage",
    "stop strings",
    "chat logprobs beside calls",
    "prompts",
    "messages: all",
    "responses logprobs beside calls",
}


def variants(cases: Iterable[str]) -> list[object]:
    """The cases; those much like a typical one run only in deep tests."""
    return [case if case in TYPICAL else pytest.param(case, marks=pytest.mark.deep) for case in cases]


@pytest.mark.parametrize("case", variants(CASES))
def test_joined_events_are_those_of_a_stream_that_was_not_cut_to_the_byte(served, case):
    path, fields, served.engine.script = CASES[case]
    body = asked(path, fields)
    whole = served.http.post(path, json=body)
    assert whole.status_code == 200, whole.text
    served.engine.requests.clear()
    events = blocks(whole.content)
    assert len({id_of(event) for event in events}) == len(events)
    for count in range(1, len(events)):
        begun = cut(served.http, path, body, count)
        rest = resume(served.http, path, body, id_of(blocks(begun)[-1]))
        assert rest.status_code == 200, (count, rest.text)
        assert nameless(begun + rest.content) == nameless(whole.content), count
        assert set(re.findall(rb"[0-9a-f]{32}", rest.content)) == set(re.findall(rb"[0-9a-f]{32}", begun))
        half = len(served.engine.requests) // 2
        assert served.engine.requests[:half] == served.engine.requests[half:] != []
        served.engine.requests.clear()
    done = resume(served.http, path, body, id_of(events[-1]))
    assert (done.status_code, done.content) == (204, b"")


def joined(script: Script, seed: int) -> Script:
    """The same outputs, as a reader that lags behind now and then gets them."""

    def lagging(request) -> Iterable[Output]:
        draw = random.Random(f"{seed}{request.id[-2:]}")
        waiting: list[Output] = []
        for output in script(request):
            merge(waiting, [output])
            if draw.random() < 0.5:
                yield from waiting
                waiting = []
        yield from waiting

    return lagging


@pytest.mark.parametrize("case", variants(CASES))
def test_nothing_is_missed_or_repeated_though_the_outputs_are_joined_in_other_places(served, case):
    path, fields, script = CASES[case]
    body = asked(path, fields)
    served.engine.script = script
    whole = told(path, served.http.post(path, json=body).content)
    for seed in range(6):
        served.engine.script = joined(script, seed)
        count = len(blocks(served.http.post(path, json=body).content))
        begun = cut(served.http, path, body, 1 + seed * (count - 1) // 6)
        served.engine.script = joined(script, seed + 100)
        again = resume(served.http, path, body, id_of(blocks(begun)[-1]))
        assert told(path, begun + again.content) == whole


def test_a_stream_may_be_cut_again_and_again(served):
    path, fields, served.engine.script = CASES["responses: all"]
    body = asked(path, fields)
    whole = served.http.post(path, json=body).content
    (first, *_), got = blocks(cut(served.http, path, body, 1)), b""
    got += first
    while True:
        rest = resume(served.http, path, body, id_of(blocks(got)[-1]))
        if rest.status_code == 204:
            break
        got += blocks(rest.content)[0]
    assert nameless(got) == nameless(whole)


def test_the_seed_of_a_request_that_names_none_follows_from_the_answer_and_differs_between_answers(served):
    served.engine.script = always(delta("a"), delta("b"), stop(), finished())
    body = {"prompt": ["x", "y"], "stream": True}
    begun = cut(served.http, COMPLETIONS, body, 1)
    resume(served.http, COMPLETIONS, body, id_of(begun))
    served.http.post(COMPLETIONS, json=body)
    seeds = [request.drawn_seed for request in served.engine.requests]
    assert seeds[:2] == seeds[2:4]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**62 for seed in seeds)


def test_what_cannot_be_resumed_is_refused_by_name(served):
    body = asked(CHAT, {})
    last = id_of(cut(served.http, CHAT, body, 1))
    stem, _, position = last.partition(":")
    refusals = {
        "stream_not_found": [
            resume(served.http, CHAT, body, "chatcmpl-" + "0" * 32 + ":0.0"),
            resume(served.http, CHAT, body, ""),
            resume(served.http, COMPLETIONS, asked(COMPLETIONS, {}), last),
            resume(served.http, "/generate", {"prompt": "Hi", "stream": True}, last),
        ],
        "stream_body_differs": [resume(served.http, CHAT, body | {"max_tokens": 3}, last)],
        "unknown_event": [
            resume(served.http, CHAT, body, f"{stem}:{wrong}")
            for wrong in ("x", position + "-0.0", "-", "1.2.3", "1.2ee", "0.0/1.1", "9" * 13 + ".0")
        ],
        "invalid_value": [resume(served.http, CHAT, OPENINGS[CHAT], last)],
        "stream_differs": [resume(served.http, CHAT, body, f"{stem}:0.99")],
    }
    for code, answers in refusals.items():
        for answer in answers:
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == (code, "Last-Event-ID")
            assert error["message"].startswith("Last-Event-ID")
            assert answer.headers["x-should-retry"] == "false"
    statuses = {code: {answer.status_code for answer in answers} for code, answers in refusals.items()}
    assert statuses == {
        "stream_not_found": {404},
        "stream_body_differs": {409},
        "unknown_event": {400},
        "invalid_value": {400},
        "stream_differs": {409},
    }


def test_the_body_may_be_written_in_another_way(served):
    body = asked(CHAT, {"seed": 3})
    last = id_of(cut(served.http, CHAT, body, 1))
    headers = {"Last-Event-ID": last, "Content-Type": "application/json"}
    other = json.dumps(dict(reversed(body.items())), indent=3)
    assert served.http.post(CHAT, content=other, headers=headers).status_code == 200


def test_only_the_key_that_began_a_stream_may_have_its_rest(served):
    keys = {name: {"Authorization": f"Bearer {name * 20}"} for name in "ab"}
    callers = tuple(Caller(hashlib.sha256((name * 20).encode()).digest(), admin=False) for name in "ab")
    body = asked(COMPLETIONS, {})
    with running(served.engine, access=Access(keys=ApiKeys(callers))) as url, httpx.Client(base_url=url) as http:
        whole = http.post(COMPLETIONS, json=body, headers=keys["a"])
        first = id_of(blocks(whole.content)[0])
        assert resume(http, COMPLETIONS, body, first, **keys["a"]).content == b"".join(blocks(whole.content)[1:])
        foreign = resume(http, COMPLETIONS, body, first, **keys["b"])
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (404, "stream_not_found")


def test_the_oldest_streams_of_whoever_has_most_are_forgotten(served):
    access = Access(limits=ServerLimits(max_resumable_streams=3))
    body = asked(COMPLETIONS, {})
    with running(served.engine, access=access) as url, httpx.Client(base_url=url) as http:
        firsts = [id_of(blocks(http.post(COMPLETIONS, json=body).content)[0]) for _ in range(5)]
        assert [resume(http, COMPLETIONS, body, first).status_code for first in firsts] == [404, 404, 200, 200, 200]


def test_with_a_journal_a_stream_is_resumed_by_another_server(served, tmp_path):
    served.engine.script = always(delta("a"), delta("b"), stop(), finished())
    body = asked(COMPLETIONS, {})

    @contextmanager
    def server(model: bytes) -> Iterator[httpx.Client]:
        with closing(StreamJournal(tmp_path)) as journal:
            journal.model = model
            with running(served.engine, journal=journal) as url, httpx.Client(base_url=url) as http:
                yield http

    with server(b"m") as http:
        events = blocks(http.post(COMPLETIONS, json=body).content)
    with server(b"m") as http:
        assert resume(http, COMPLETIONS, body, id_of(events[0])).content == b"".join(events[1:])
        other = resume(http, COMPLETIONS, body | {"n": 2}, id_of(events[0]))
        assert other.json()["error"]["code"] == "stream_body_differs"
        assert resume(http, CHAT, asked(CHAT, {}), id_of(events[0])).status_code == 404
    assert len({request.drawn_seed for request in served.engine.requests}) == 1
    with server(b"n") as http:
        other = resume(http, COMPLETIONS, body, id_of(events[0]))
        assert (other.status_code, other.json()["error"]["code"]) == (409, "stream_model_differs")
    with running(served.engine) as url, httpx.Client(base_url=url) as http:
        assert resume(http, COMPLETIONS, body, id_of(events[0])).status_code == 404


def test_who_comes_back_ends_the_connection_that_the_server_still_holds(served):
    served.engine.script = always(delta("a"), delta("b"), Wait())
    body = asked(COMPLETIONS, {})
    with served.http.stream("POST", COMPLETIONS, json=body) as old:
        pieces = old.iter_raw()
        first = blocks(next(pieces))[0]
        served.engine.wait_until(lambda: len(served.engine.live) == 1)
        served.engine.script = always(delta("a"), delta("b"), stop(), finished())
        rest = resume(served.http, COMPLETIONS, body, id_of(first))
        assert '"text":"b"' in rest.text
        assert served.engine.left == [served.engine.requests[0].id]
        farewell = b"".join(pieces)
    assert b"goes on elsewhere" in farewell
    assert farewell.endswith(b"\n\n")


def test_many_who_come_back_at_once_get_one_answer_and_hold_nothing(served):
    served.engine.script = always(delta("a"), delta("b"), Wait(0.05), stop(), finished())
    body = asked(COMPLETIONS, {})
    first = id_of(cut(served.http, COMPLETIONS, body, 1))

    def again(_: int) -> str:
        return resume(served.http, COMPLETIONS, body, first).text

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(again, range(8)))
    whole = [text for text in texts if "[DONE]" in text and "error" not in text]
    assert whole
    assert all('"text":"b"' in text for text in whole)
    assert all("goes on elsewhere" in text for text in texts if text not in whole)
    served.engine.wait_until(lambda: not served.engine.live)


def test_after_a_failure_the_answer_goes_on_behind_the_last_event_before_it(served):
    most = {"max_tokens": 9}
    for path, fields, error in ((CHAT, USAGE, "error"), (RESPONSES, {}, "response.failed"), (MESSAGES, most, "error")):
        body = asked(path, fields)
        served.engine.script = always(delta("a"), failed())
        broken = blocks(served.http.post(path, json=body).content)
        assert error in broken[-1 if path != CHAT else -2].decode()
        served.engine.script = always(delta("a"), delta("b"), stop(), finished())
        whole = told(path, served.http.post(path, json=body).content)
        good = [block for block in broken if id_of(block) != id_of(broken[-1])]
        good.append(next(block for block in broken if id_of(block) == id_of(broken[-1])))
        rest = resume(served.http, path, body, id_of(broken[-1]))
        assert told(path, b"".join(good) + rest.content) == whole


def test_a_stored_response_stays_as_it_is_while_its_stream_is_generated_again(served):
    served.engine.script = always(delta("a"), delta("b"), stop(), finished())
    body = asked(RESPONSES, {})
    events = blocks(served.http.post(RESPONSES, json=body).content)
    answer = json.loads(read_events(events[-1])[0].data)["response"]
    assert resume(served.http, RESPONSES, body, id_of(events[2])).status_code == 200
    assert served.http.get(f"{RESPONSES}/{answer['id']}").json() == answer
    left = cut(served.http, RESPONSES, body, 2)
    stored = json.loads(read_events(blocks(left)[0])[0].data)["response"]["id"]
    resume(served.http, RESPONSES, body, id_of(blocks(left)[-1]))
    assert served.http.get(f"{RESPONSES}/{stored}").json()["status"] == "completed"


@pytest.mark.parametrize("case", variants(case for case in CASES if case.startswith("responses")))
def test_starting_after_an_events_number_goes_on_exactly_behind_it(served, case):
    path, fields, script = CASES[case]
    body = asked(path, fields)
    served.engine.script = joined(script, 1)
    whole = served.http.post(path, json=body).content
    events = blocks(whole)
    url = f"{RESPONSES}/{json.loads(read_events(events[0])[0].data)['response']['id']}"
    for number in range(len(events)):
        served.engine.script = joined(script, number + 2)
        rest = served.http.get(url, params={"stream": "true", "starting_after": number})
        assert rest.status_code == 200
        assert told(path, b"".join(events[: number + 1]) + rest.content) == told(path, whole)
        served.engine.script = joined(script, 1)
        again = resume(served.http, path, body, id_of(events[0]))  # numbers are those of this stream again
        assert events[0] + again.content == whole


def test_a_response_whose_client_left_is_streamed_on_by_number_and_then_complete(served):
    go = threading.Event()
    served.engine.script = always(delta("a"), delta("b"), Until(go), delta("c"), stop(), finished())
    body = asked(RESPONSES, {})
    begun = blocks(cut(served.http, RESPONSES, body, 6))
    data = json.loads(read_events(begun[5])[0].data)
    assert (data["type"], data["delta"], data["sequence_number"]) == ("response.output_text.delta", "b", 5)
    url = f"{RESPONSES}/{json.loads(read_events(begun[0])[0].data)['response']['id']}"
    served.engine.wait_until(lambda: served.http.get(url).json()["status"] == "cancelled")
    go.set()
    rest = served.http.get(url, params={"stream": "true", "starting_after": 5})
    assert '"delta":"c"' in blocks(rest.content)[0].decode()
    assert served.http.get(url).json()["output"][0]["content"][0]["text"] == "abc"
    foreign = served.http.get(url, params={"stream": "true", "starting_after": 99})
    assert (foreign.status_code, foreign.content) == (200, b"")


async def test_a_server_that_stops_generates_nothing_again():
    engine = ScriptedEngine()
    app = create_app(engine, CARD, LIMITS)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        events = blocks((await http.post(RESPONSES, json=asked(RESPONSES, {}))).content)
        url = f"{RESPONSES}/{json.loads(read_events(events[0])[0].data)['response']['id']}"
        asking = [http.get(url, params={"stream": "true", "starting_after": 3}) for _ in range(2)]
        assert '"delta":"Hel"' in (await asking[0]).text
        lifecycle_of(app).stopping.set()
        refused = await asking[1]
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert (await http.get(url)).json()["status"] == "completed"
    assert len(engine.requests) == 2


def test_official_clients_read_streams_with_ids(served):
    served.engine.script = always(delta("Hel"), delta("lo"), stop(), finished())
    client = openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
    chunks = client.chat.completions.create(model="acme/tiny-1", messages=HI, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello"
    texts = client.completions.create(model="acme/tiny-1", prompt="Hi", stream=True)
    assert "".join(chunk.choices[0].text for chunk in texts) == "Hello"
    with client.responses.stream(model="acme/tiny-1", input="Hi") as response:
        assert response.get_final_response().output_text == "Hello"
    other = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    with other.messages.stream(model="acme/tiny-1", messages=HI, max_tokens=9) as stream:
        assert "".join(stream.text_stream) == "Hello"


def test_an_official_client_resumes_with_a_header(served):
    served.engine.script = always(delta("Hel"), delta("lo"), stop(), finished())
    body = {"messages": HI, "model": "acme/tiny-1", "stream": True}
    last = id_of(blocks(cut(served.http, CHAT, body, 2))[-1])
    client = openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
    rest = client.chat.completions.create(**body, extra_headers={"Last-Event-ID": last})
    assert [chunk.choices[0].delta.content for chunk in rest] == ["lo", None]
