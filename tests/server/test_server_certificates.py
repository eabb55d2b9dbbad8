"""`certificate: true`: the engine's certificate at the end of an answer, and its digest in a header."""

from __future__ import annotations

import json

import pytest
from scripted_engine import always, delta, length, stop
from sse_reader import read_events

from penstock.contract.events import RequestFinished, Usage

CERTIFICATE = '{"answer":[],"digest":"d1ce","version":1}'
CERTIFIED = always(delta("Hel"), delta("lo"), stop(), RequestFinished(Usage(13, 5, 8), certificate=CERTIFICATE))
ABORTED = always(delta("Hel"), length(), RequestFinished(Usage(13, 5, 8)))


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_a_whole_answer_has_it_as_text_and_its_digest_in_a_header(served, endpoint):
    served.engine.script = CERTIFIED
    answer = getattr(served, endpoint)(certificate=True)
    assert answer.json()["certificate"] == CERTIFICATE
    assert answer.headers["x-penstock-certificate"] == "sha256:d1ce"
    assert served.engine.requests[-1].certified


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_none_comes_unasked_and_no_log_probabilities_are_shown(served, endpoint):
    for fields in ({}, {"certificate": False}, {"certificate": None}):
        answer = getattr(served, endpoint)(**fields)
        assert "certificate" not in answer.json()
        assert "x-penstock-certificate" not in answer.headers
        assert not served.engine.requests[-1].certified
    served.engine.script = CERTIFIED
    [choice] = getattr(served, endpoint)(certificate=True).json()["choices"]
    assert choice["logprobs"] is None


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_a_stream_ends_with_it_in_a_chunk_of_no_choice(served, endpoint):
    served.engine.script = CERTIFIED
    for options, usage in (({}, False), ({"stream_options": {"include_usage": True}}, True)):
        response = getattr(served, endpoint)(stream=True, certificate=True, **options)
        *pieces, last, done = [event.data for event in read_events(response.content)]
        assert done == "[DONE]"
        assert json.loads(last)["choices"] == []
        assert json.loads(last)["certificate"] == CERTIFICATE
        assert ("usage" in json.loads(last)) is usage
        assert all("certificate" not in json.loads(piece) for piece in pieces)


def test_an_answer_that_was_ended_has_none(served):
    served.engine.script = ABORTED
    answer = served.chat(certificate=True)
    assert answer.json()["certificate"] is None
    assert "x-penstock-certificate" not in answer.headers


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": ["a", "b"]}, "certificate is of one prompt, and this has 2"),
        ({"max_tokens": 0, "echo": True, "logprobs": 1}, "certificate is of generated tokens"),
        ({"certificate": "yes"}, "certificate"),
    ],
)
def test_what_cannot_be_certified_is_refused_by_name(served, fields, said):
    answer = served.complete(**{"certificate": True} | fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "certificate"
    assert said in answer.json()["error"]["message"]


def test_endpoints_without_certificates_refuse_the_field(served):
    assert served.generate(certificate=True).json()["error"]["param"] == "certificate"
