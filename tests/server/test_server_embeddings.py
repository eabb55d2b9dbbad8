"""`POST /v1/embeddings`: the official client as its users type it, every field, every refusal, and clients leaving."""

from __future__ import annotations

import base64
import struct
import threading

import openai
import pytest
from scripted_engine import ScriptedEngine, Until, Wait, always, failed, finished, stop, vector
from server_harness import CARD, LIMITS, running

from penstock.contract.embedding import EmbeddingSpec, Pooling
from penstock.contract.errors import EngineDead, Overloaded, PromptTooLong
from penstock.contract.events import ChoiceFinished, FinishReason, RequestFinished, Usage
from penstock.contract.request import TextPrompt, TokenPrompt
from penstock.server.http.access import Access

MODEL = "acme/tiny-1"
UNIT = struct.unpack("<2f", struct.pack("<2f", 0.6, -0.8))  # what float32 makes of the scripted vector


def embed(served, **fields):
    return served.http.post("/v1/embeddings", json={"input": "Hi"} | fields)


def numbered(request):
    """Each input's vector holds the input's place."""
    return vector(float(request.id.rpartition("-")[2]), 0.5), stop(), finished(prompt=3, completion=0, cached=1)


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_official_client_reads_its_default_which_is_base64(client, served):
    answer = client.embeddings.create(model=MODEL, input=["one", "two", "three"])
    assert [list(item.embedding) for item in answer.data] == [list(UNIT)] * 3
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert {item.object for item in answer.data} == {"embedding"}
    assert (answer.object, answer.model) == ("list", MODEL)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (15, 15)
    assert [request.prompt.text for request in served.engine.requests] == ["one", "two", "three"]


def test_the_official_client_reads_floats_and_they_are_the_same_bits(client):
    floats = client.embeddings.create(model=MODEL, input="x", encoding_format="float")
    plain = client.embeddings.create(model=MODEL, input="x")
    assert list(floats.data[0].embedding) == list(plain.data[0].embedding) == list(UNIT)


def test_base64_is_little_endian_float32_and_numbers_are_the_default(served):
    (item,) = embed(served, encoding_format="base64").json()["data"]
    assert base64.b64decode(item["embedding"]) == struct.pack("<2f", 0.6, -0.8)
    (item,) = embed(served).json()["data"]
    assert item["embedding"] == list(UNIT)


@pytest.mark.parametrize(
    ("value", "prompts"),
    [
        ("one", [TextPrompt("one")]),
        (["one", "two"], [TextPrompt("one"), TextPrompt("two")]),
        ([1, 2, 3], [TokenPrompt((1, 2, 3))]),
        ([[1, 2], [3]], [TokenPrompt((1, 2)), TokenPrompt((3,))]),
        ([5] * 64, [TokenPrompt((5,) * 64)]),
    ],
)
def test_the_four_spellings_of_the_input(served, value, prompts):
    assert len(embed(served, input=value).json()["data"]) == len(prompts)
    assert [request.prompt for request in served.engine.requests] == prompts


def test_answers_stand_in_the_order_of_the_inputs_however_they_come(served):
    gate = threading.Event()

    def reversed_order(request):
        if request.id.endswith("-0"):
            yield Until(gate)
        yield from numbered(request)
        if request.id.endswith("-4"):
            gate.set()

    served.engine.script = reversed_order
    answer = embed(served, input=list("abcde")).json()
    assert [(item["index"], item["embedding"][0]) for item in answer["data"]] == [(i, float(i)) for i in range(5)]
    assert answer["usage"] == {"prompt_tokens": 15, "total_tokens": 15}


def test_a_long_list_is_in_the_engine_a_part_at_a_time(served):
    most = 0

    def counting(request):
        nonlocal most
        most = max(most, len(served.engine.live))
        return numbered(request)

    served.engine.script = counting
    answer = embed(served, input=["x"] * 40).json()
    assert [item["embedding"][0] for item in answer["data"]] == [float(i) for i in range(40)]
    assert most == 12


@pytest.mark.parametrize(
    ("fields", "spec"),
    [
        ({}, EmbeddingSpec(Pooling.MEAN, True, 0)),
        ({"pooling": "last"}, EmbeddingSpec(Pooling.LAST, True, 0)),
        ({"normalize": False, "dimensions": 1}, EmbeddingSpec(Pooling.MEAN, False, 1)),
        ({"pooling": None, "normalize": None, "dimensions": None}, EmbeddingSpec()),
    ],
)
def test_how_vectors_are_made_travels_to_the_engine(served, fields, spec):
    assert embed(served, **fields).status_code == 200
    assert served.request.embedding == spec


def test_on_whose_behalf_travels_too(served):
    embed(served, user="al", cache_salt="pepper")
    assert (served.request.tenant, served.request.cache_salt) == ("al", "pepper")


@pytest.mark.parametrize(("given", "kept"), [(None, 0), (-1, 64), (7, 7)])
def test_what_is_too_long_is_cut_only_where_that_is_asked_for(served, given, kept):
    assert embed(served, truncate_prompt_tokens=given).status_code == 200
    assert served.request.most_prompt_tokens == kept
    status = embed(served, input=[3] * 65, truncate_prompt_tokens=given).status_code
    assert status == (200 if kept else 400)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": None}, "input", "missing_value"),
        ({"input": 7}, "input", "invalid_type"),
        ({"input": ""}, "input", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": ["a", ""]}, "input.1", "invalid_value"),
        ({"input": [[1], []]}, "input.1", "invalid_value"),
        ({"input": ["a", [1]]}, "input", "invalid_type"),
        ({"input": [1, "a"]}, "input.1", "invalid_value"),
        ({"input": [[1, 100]]}, "input.0.1", "invalid_value"),
        ({"input": [[1], [3] * 65]}, "input.1", "context_length_exceeded"),
        ({"input": ["a", "x" * 4097]}, "input.1", "context_length_exceeded"),
        ({"input": ["a"] * 41}, "input", "invalid_value"),
        ({"dimensions": 0}, "dimensions", "invalid_value"),
        ({"dimensions": 3}, "dimensions", "invalid_value"),
        ({"dimensions": True}, "dimensions", "invalid_type"),
        ({"encoding_format": "int8"}, "encoding_format", "invalid_type"),
        ({"pooling": "max"}, "pooling", "invalid_type"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
        ({"truncate_prompt_tokens": 65}, "truncate_prompt_tokens", "invalid_value"),
        ({"add_special_tokens": False}, "add_special_tokens", "unsupported_parameter"),
        ({"temperature": 0}, "temperature", "unknown_parameter"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(served, fields, param, code):
    answer = embed(served, **fields)
    assert answer.status_code == 400
    assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (param, code)
    assert served.engine.requests == []


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="text-embedding-3-small", input="x")


def test_a_refusal_of_the_engine_names_the_input_that_it_is_about(served):
    def second_is_long(request):
        return (
            (PromptTooLong(99, 64, param="prompt", generates=False),)
            if request.id.endswith("-1")
            else numbered(request)
        )

    served.engine.script = second_is_long
    answer = embed(served, input=["a", "b", "c"])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input.1")
    served.engine.script = always(PromptTooLong(99, 64, param="prompt", generates=False))
    assert embed(served).json()["error"]["param"] == "input"


def test_an_input_that_the_queue_has_no_room_for_waits_for_another(served):
    refused = set()

    def full_at_first(request):
        if len(served.engine.live) > 3:
            refused.add(request.id)
            return (Overloaded("Full."),)
        return Wait(0.01), *numbered(request)

    served.engine.script = full_at_first
    answer = embed(served, input=["x"] * 20).json()
    assert [item["embedding"][0] for item in answer["data"]] == [float(i) for i in range(20)]
    assert refused


def test_what_was_computed_is_not_lost_when_others_fill_the_queue(served, monkeypatch):
    """Twice, early and later, all remaining inputs are refused; still no input is embedded twice."""
    monkeypatch.setattr("penstock.server.delivery.turns.PAUSE_SECONDS", 0.01)
    done: list[str] = []
    refusals: list[str] = []

    def full_now_and_then(request):
        if len(done) in (2, 15) and len(refusals) < (30 if len(done) == 2 else 60):
            refusals.append(request.id)
            return (Overloaded("Full.", retry_after=9),)
        done.append(request.id)
        return numbered(request)

    served.engine.script = full_now_and_then
    answer = embed(served, input=["x"] * 30)
    assert answer.status_code == 200
    assert [item["embedding"][0] for item in answer.json()["data"]] == [float(i) for i in range(30)]
    assert len(refusals) == 60
    assert len(done) == len(set(done)) == 30


def test_after_a_full_queue_as_many_are_in_the_engine_as_before(served, monkeypatch):
    monkeypatch.setattr("penstock.server.delivery.turns.PAUSE_SECONDS", 0.01)
    most, refusals = 0, 0

    def full_for_a_while(request):
        nonlocal most, refusals
        if not request.id.endswith("-0") and refusals < 20:
            refusals += 1
            return (Overloaded("Full."),)
        most = max(most, len(served.engine.live))
        return Wait(0.02), *numbered(request)

    served.engine.script = full_for_a_while
    assert embed(served, input=["x"] * 40).status_code == 200
    assert most == LIMITS.max_sequences


def test_a_request_waits_for_room_no_longer_than_its_time(served):
    def full_after_one(request):
        return numbered(request) if request.id.endswith("-0") else (Overloaded("Full."),)

    with running(ScriptedEngine(script=full_after_one), access=Access(request_seconds=0.3)) as url:
        answer = served.http.post(url + "/v1/embeddings", json={"input": ["a", "b"]})
    assert answer.status_code == 504


def test_a_queue_that_has_no_room_for_any_input_is_a_429(served):
    served.engine.script = always(Overloaded("Full.", retry_after=3))
    answer = embed(served, input=["a"] * 20)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")


@pytest.mark.parametrize(("error", "status"), [(EngineDead("Dead."), 503), (failed("Broken."), 500)])
def test_one_failure_fails_the_answer_and_ends_the_others(served, error, status):
    served.engine.script = lambda request: (error,) if request.id.endswith("-1") else (Wait(),)
    assert embed(served, input=["a", "b", "c"]).status_code == status
    served.engine.wait_until(lambda: not served.engine.live)
    assert len(served.engine.left) == 2


def test_an_aborted_request_has_no_answer(served):
    served.engine.script = always(ChoiceFinished(0, FinishReason.ABORT), RequestFinished(Usage(5)))
    answer = embed(served)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "aborted")


def test_a_client_that_leaves_aborts_every_input(client, served):
    served.engine.script = always(Wait())
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).embeddings.create(model=MODEL, input=list("abcde") * 8)
    served.engine.wait_until(lambda: not served.engine.live)
    assert len(served.engine.left) == 12


def test_all_inputs_together_have_the_time_of_one_request():
    def slow(request):
        yield Wait(0.5)
        yield from numbered(request)

    with (
        running(ScriptedEngine(script=slow), card=CARD, access=Access(request_seconds=1.8)) as url,
        openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=20) as client,
    ):
        assert len(client.embeddings.create(model=MODEL, input=["x"] * 12).data) == 12
        with pytest.raises(openai.InternalServerError) as caught:
            client.embeddings.create(model=MODEL, input=["x"] * 40)
    assert caught.value.code == "request_timeout"


def test_its_answers_are_as_described(served):
    from test_server_openapi import check, schema_of

    document = served.http.get("/openapi.json").json()
    for encoding in ("float", "base64"):
        check_one = embed(served, encoding_format=encoding).json()
        if encoding == "base64":
            check_one["data"][0]["embedding"] = []  # the checker looks at the first form alone
        check(document, schema_of(document, "post", "/v1/embeddings", "200"), check_one, encoding)
    check(document, schema_of(document, "post", "/v1/embeddings", "400"), embed(served, dimensions=9).json())
