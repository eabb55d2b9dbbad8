"""OpenAI's responses, through the official client and on the wire."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
from scripted_engine import Until, Wait, always, delta, failed, finished, length, stop
from server_harness import CARD, running

from penstock.contract.errors import EngineFault, Overloaded
from penstock.contract.events import ChoiceDelta, ChoiceFinished, FinishReason, TokenPiece
from penstock.contract.limits import RequestLimits, ServerLimits
from penstock.contract.request import Message
from penstock.contract.server_config import ServerConfig
from penstock.server import open_access
from penstock.server.http.access import Access
from penstock.server.http.failures import HttpRefusal
from penstock.server.openai.response_store import ResponseStore, StoredResponse
from penstock.server.openai.responses_request import parse_response

MODEL = "acme/tiny-1"


@pytest.fixture
def client(served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def turns(served) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in served.request.prompt.messages]


def test_a_response(client, served):
    served.engine.script = always(delta("Hel"), delta("lo"), stop(), finished(cached=3))
    response = client.responses.create(
        model=MODEL, input="Hi", instructions="Be brief.", max_output_tokens=9, temperature=0.5, metadata={"a": "b"}
    )
    assert response.output_text == "Hello"
    assert (response.status, response.object, response.model) == ("completed", "response", MODEL)
    assert (response.instructions, response.max_output_tokens, response.temperature) == ("Be brief.", 9, 0.5)
    assert (response.metadata, response.top_p, response.error) == ({"a": "b"}, 1.0, None)
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (5, 2, 7)
    assert turns(served) == [("system", "Be brief."), ("user", "Hi")]
    assert (served.request.stop.max_tokens, served.request.id) == (9, response.id)
    assert abs(response.created_at - time.time()) < 60


def test_a_response_can_be_asked_for_again_and_deleted(client):
    made = client.responses.create(model=MODEL, input="Hi")
    assert client.responses.retrieve(made.id).model_dump() == made.model_dump()
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError) as caught:
            call(made.id)
        assert (caught.value.code, caught.value.param) == ("response_not_found", "response_id")


def test_what_is_not_to_be_stored_is_not(client):
    made = client.responses.create(model=MODEL, input="Hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_the_events_come_in_openais_order_and_are_numbered(client, served):
    served.engine.script = always(delta("Hel"), delta("", raw=b"\xf0"), delta("lo"), stop(), finished())
    events = list(client.responses.create(model=MODEL, input="Hi", stream=True))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(10))
    assert (events[0].response.status, events[0].response.output) == ("in_progress", [])
    assert events[6].text == events[7].part.text == events[8].item.content[0].text == "Hello"
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1
    assert events[-1].response.output_text == "Hello"
    assert client.responses.retrieve(events[-1].response.id).model_dump() == events[-1].response.model_dump()


def test_the_stream_helper_makes_the_whole_response_of_the_events(client):
    whole = client.responses.create(model=MODEL, input="Hi")
    with client.responses.stream(model=MODEL, input="Hi") as stream:
        final = stream.get_final_response()
    same = {"status", "usage", "model", "instructions", "metadata"}
    assert final.model_dump(include=same) == whole.model_dump(include=same)
    assert final.output_text == whole.output_text == "Hello"


def scored(token: int, text: str, logprob: float) -> TokenPiece:
    others = tuple(TokenPiece(id_, f"t{id_}".encode(), -float(id_)) for id_ in (1, 2))
    return TokenPiece(token, text.encode(), logprob, others)


THOUGHT_AND_SAID = (
    ChoiceDelta(0, "", (scored(3, "<th", -0.1),)),
    ChoiceDelta(0, "", (scored(4, "ink>", -0.2), scored(5, "hm", -0.3)), "hm", (), 3),
    ChoiceDelta(0, "Hel", (scored(6, "</think>", -0.4), scored(7, "Hel", -0.5)), "", (), 1),
    ChoiceDelta(0, "lo", (scored(8, "lo", float("-inf")),)),
    ChoiceDelta(0, "", (scored(9, "<end>", -0.7),)),
)


@pytest.mark.parametrize("top", [0, 2])
def test_a_messages_logprobs_are_those_of_its_tokens_and_the_same_in_events(client, served, top):
    served.engine.script = always(*THOUGHT_AND_SAID, stop(), finished())
    asked = {"model": MODEL, "input": "Hi", "top_logprobs": top, "include": ["message.output_text.logprobs"]}
    whole = client.responses.create(**asked)
    assert served.request.sampling.get("logprobs", -1) == whole.top_logprobs == top
    _, message = whole.output
    told = message.content[0].logprobs
    assert [(each.token, each.logprob, bytes(each.bytes)) for each in told] == [
        ("Hel", -0.5, b"Hel"),
        ("lo", -9999.0, b"lo"),
        ("<end>", -0.7, b"<end>"),
    ]
    assert [(each.token, each.logprob, each.bytes) for each in told[0].top_logprobs] == [
        ("t1", -1.0, [116, 49]),
        ("t2", -2.0, [116, 50]),
    ]
    events = list(client.responses.create(**asked, stream=True))
    assert events[-1].response.output[1].content == message.content
    brief = [{**each.model_dump(exclude={"bytes"}), "top_logprobs": None} for each in told]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [(event.delta, len(event.logprobs)) for event in deltas] == [("Hel", 1), ("lo", 1), ("", 1)]
    [done] = [event for event in events if event.type == "response.output_text.done"]
    for several in ([one for event in deltas for one in event.logprobs], done.logprobs):
        assert [{**one.model_dump(), "top_logprobs": None} for one in several] == brief
        assert [[top.token for top in one.top_logprobs] for one in several] == [["t1", "t2"]] * 3
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output[1].content[0].logprobs == told
    back = [item.model_dump(exclude_none=True) for item in whole.output] + [{"role": "user", "content": "More"}]
    client.responses.create(model=MODEL, input=back)
    assert turns(served)[0] == ("assistant", "Hello")


def test_without_include_there_are_no_logprobs(client, served):
    served.engine.script = always(*THOUGHT_AND_SAID, stop(), finished())
    whole = client.responses.create(model=MODEL, input="Hi", include=[])
    assert whole.output[1].content[0].logprobs == []
    assert not served.request.sampling.has("logprobs")
    events = client.responses.create(model=MODEL, input="Hi", stream=True)
    assert [e.logprobs for e in events if e.type == "response.output_text.delta"] == [[], []]


def test_a_background_response_has_its_logprobs(client, served):
    served.engine.script = always(*THOUGHT_AND_SAID, stop(), finished())
    asked = {"model": MODEL, "input": "Hi", "include": ["message.output_text.logprobs"]}
    made = client.responses.create(**asked, background=True)
    served.engine.wait_until(lambda: client.responses.retrieve(made.id).status == "completed")
    kept = client.responses.retrieve(made.id)
    assert [each.token for each in kept.output[1].content[0].logprobs] == ["Hel", "lo", "<end>"]


def test_framing_has_names_and_no_done(served):
    answer = served.http.post("/v1/responses", json={"input": "Hi", "stream": True})
    blocks = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    assert all(len(lines) == 3 for lines in blocks)
    for name, data, event_id in blocks:
        assert event_id.startswith("id: resp_")
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")
    assert "[DONE]" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_is_cut_by_its_length_is_incomplete(client, served, stream):
    served.engine.script = always(delta("x"), length(), finished())
    made = client.responses.create(model=MODEL, input="Hi", stream=stream)
    if stream:
        last = list(made)[-1]
        assert last.type == "response.incomplete"
        made = last.response
    assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert made.output[0].status == "incomplete"


def test_a_conversation_goes_on_by_id_without_its_old_instructions(client, served):
    first = client.responses.create(model=MODEL, input="One", instructions="Old.")
    second = client.responses.create(model=MODEL, input="Two", previous_response_id=first.id)
    assert turns(served) == [("user", "One"), ("assistant", "Hello"), ("user", "Two")]
    assert second.previous_response_id == first.id
    client.responses.delete(first.id)
    client.responses.create(model=MODEL, input="Three", previous_response_id=second.id, instructions="New.")
    assert [content for _, content in turns(served)] == ["New.", "One", "Hello", "Two", "Hello", "Three"]
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model=MODEL, input="Four", previous_response_id=first.id)
    assert caught.value.param == "previous_response_id"


def test_items_of_every_spelling_and_a_responses_own_output_are_input(client, served):
    first = client.responses.create(model=MODEL, input="One")
    client.responses.create(
        model=MODEL,
        input=[
            {"role": "developer", "content": "D"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "A"}]},
            *[item.model_dump(exclude_none=True) for item in first.output],
            {"role": "user", "content": [{"type": "input_text", "text": "B"}, {"type": "input_text", "text": "C"}]},
        ],
    )
    assert turns(served) == [("system", "D"), ("user", "A"), ("assistant", "Hello"), ("user", "B\nC")]


WRONG = {
    "input": {},
    "input ": {"input": []},
    "input  ": {"input": 1},
    "input.0": {"input": ["x"]},
    "input.0.type": {"input": [{"type": "web_search_call", "id": "x"}]},
    "input.0.role": {"input": [{"role": "robot", "content": "x"}]},
    "input.0.content": {"input": [{"role": "user"}]},
    "input.0.content.0.type": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
    "input.0.content.0.text": {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
    "input.0.surprise": {"input": [{"role": "user", "content": "x", "surprise": 1}]},
    "max_output_tokens": {"max_output_tokens": 0},
    "temperature": {"temperature": -1},
    "truncation": {"truncation": "auto"},
    "tools.0.type": {"tools": [{"type": "web_search"}]},
    "text.format.type": {"text": {"format": {"type": "poem"}}},
    "include": {"include": ["message.output_text.logprobs", "web_search_call.action.sources"]},
    "include ": {"include": "message.output_text.logprobs"},
    "top_logprobs": {"top_logprobs": 2},
    "top_logprobs ": {"top_logprobs": 1000, "include": ["message.output_text.logprobs"]},
    "background": {"background": True, "stream": True},
    "background ": {"background": True, "store": False},
    "surprise": {"surprise": 1},
}


@pytest.mark.parametrize("param", WRONG)
def test_what_is_wrong_is_named(served, param):
    body = ({"input": "Hi"} if param != "input" else {}) | WRONG[param]
    answer = served.http.post("/v1/responses", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param.strip()


def test_query_parameters_are_not_ignored(client):
    made = client.responses.create(model=MODEL, input="Hi")
    for query in ({"include": ["file_search_call.results"]}, {"extra_query": {"surprise": 1}}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.retrieve(made.id, **query)
        assert caught.value.code == "unsupported_parameter"
    included = ["reasoning.encrypted_content", "message.output_text.logprobs"]
    assert client.responses.retrieve(made.id, include=included) == made


def test_a_background_response_is_polled_until_it_is_there(client, served):
    gate = Until(threading.Event())
    served.engine.script = always(delta("Hel"), gate, delta("lo"), stop(), finished())
    made = client.responses.create(model=MODEL, input="Hi", background=True)
    assert (made.status, made.output, made.background) == ("in_progress", [], True)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model=MODEL, input="More", previous_response_id=made.id)
    gate.event.set()
    served.engine.wait_until(lambda: client.responses.retrieve(made.id).status == "completed")
    assert client.responses.retrieve(made.id).output_text == "Hello"


def test_a_response_in_the_background_is_cancelled(client, served):
    def script(request):
        yield delta("Hel")
        while request.id not in served.engine.left:
            yield Wait(0.01)
        yield ChoiceFinished(0, FinishReason.ABORT)
        yield finished()

    served.engine.script = script
    made = client.responses.create(model=MODEL, input="Hi", background=True)
    served.engine.wait_until(lambda: served.engine.yielded == 1)
    assert client.responses.cancel(made.id).status == "cancelled"
    served.engine.wait_until(lambda: not served.engine.live)
    served.engine.wait_until(lambda: client.responses.retrieve(made.id).output_text == "Hel")
    assert client.responses.cancel(made.id).status == "cancelled"
    served.engine.script = always(delta("x"), stop(), finished())
    done = client.responses.create(model=MODEL, input="Hi")
    assert client.responses.cancel(done.id).status == "completed"


def test_a_background_response_that_fails_says_so(client, served):
    served.engine.script = always(delta("Hel"), failed("Broken."))
    made = client.responses.create(model=MODEL, input="Hi", background=True)
    served.engine.wait_until(lambda: client.responses.retrieve(made.id).status == "failed")
    assert client.responses.retrieve(made.id).error.message == "Broken."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "raised"), [(Overloaded("Full."), openai.RateLimitError), (EngineFault("X."), openai.InternalServerError)]
)
def test_an_error_before_the_first_output_has_its_status(client, served, stream, error, raised):
    served.engine.script = always(error)
    with pytest.raises(raised):
        client.responses.create(model=MODEL, input="Hi", stream=stream)
    stored = httpx.get(f"{served.url}/v1/responses/{served.request.id}").json()
    assert stored["status"] == "failed"


def test_a_failure_on_the_way_is_the_last_event(client, served):
    served.engine.script = always(delta("Hel"), failed("Broken."))
    last = list(client.responses.create(model=MODEL, input="Hi", stream=True))[-1]
    assert (last.type, last.response.status, last.response.error.message) == ("response.failed", "failed", "Broken.")
    assert client.responses.retrieve(last.response.id).status == "failed"


def test_a_client_that_leaves_leaves_no_response_in_progress(client, served):
    served.engine.script = always(delta("Hel"), Wait())
    with client.responses.create(model=MODEL, input="Hi", stream=True) as stream:
        made = next(iter(stream)).response
    served.engine.wait_until(lambda: len(served.engine.left) == 1)
    served.engine.wait_until(lambda: client.responses.retrieve(made.id).status == "cancelled")


def test_another_keys_response_is_not_there(served):
    keys = {"PENSTOCK_API_KEY": "sk-0123456789abcdef", "PENSTOCK_ADMIN_KEY": "sk-fedcba9876543210"}
    with running(served.engine, access=open_access(ServerConfig(), keys)) as url:
        one, other = (openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0) for key in keys.values())
        made = one.responses.create(model=MODEL, input="Hi")
        assert one.responses.retrieve(made.id).id == made.id
        for call in (other.responses.retrieve, other.responses.cancel, other.responses.delete):
            with pytest.raises(openai.NotFoundError):
                call(made.id)
        with pytest.raises(openai.NotFoundError):
            other.responses.create(model=MODEL, input="Hi", previous_response_id=made.id)
        one.close()
        other.close()


def stored(number: int, text: str = "", tenant: str = "") -> StoredResponse:
    return StoredResponse(tenant, {"id": str(number)}, (Message("user", text),))


def test_the_store_is_bounded_in_count_and_the_least_recently_used_goes_first():
    store = ResponseStore(max_count=3, max_bytes=10_000)
    for number in range(3):
        store.put(stored(number))
    store.get("0", "")
    store.put(stored(3))
    assert len(store) == 3
    with pytest.raises(HttpRefusal):
        store.get("1", "")
    assert store.get("0", "").id == "0"


def test_the_store_is_bounded_in_bytes_and_counts_them_right():
    store = ResponseStore(max_count=100, max_bytes=1000)
    for number in range(50):
        store.put(stored(number % 7, "é" * 100))
        assert store.bytes <= 1000
    assert store.bytes == sum(store.get(str(n), "").size() for n in range(7) if str(n) in store._entries)
    store.put(stored(99, "x" * 2000))
    assert (len(store), store.bytes) == (0, 0)


def test_what_was_deleted_while_it_was_made_stays_deleted():
    store = ResponseStore(10, 1000)
    store.put(stored(1))
    store.delete("1", "")
    store.update(stored(1))
    assert len(store) == 0


def test_the_servers_limits_bound_the_store(served):
    limits = ServerLimits(max_stored_responses=2)
    with running(served.engine, access=Access(limits=limits)) as url:
        ids = [httpx.post(url + "/v1/responses", json={"input": "Hi"}).json()["id"] for _ in range(3)]
        assert [httpx.get(f"{url}/v1/responses/{each}").status_code for each in ids] == [404, 200, 200]


def test_a_conversation_is_bounded_whatever_it_goes_on_from():
    limits = RequestLimits(max_messages=3)
    past = (Message("user", "a"), Message("assistant", "b"))
    body = {"input": [{"role": "user", "content": "x"}] * 2, "previous_response_id": "x"}
    with pytest.raises(Exception, match="at most 3 messages"):
        parse_response(body, "id", CARD, limits, lambda _: past)
    assert len(parse_response(body | {"input": "x"}, "id", CARD, limits, lambda _: past).history) == 3
