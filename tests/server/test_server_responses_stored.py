"""What a stored response gives besides itself: its input, its events again, its size; and a shorter conversation."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator

import httpx
import openai
import pytest
from scripted_engine import ScriptedEngine, Until, always, delta, finished, stop
from server_harness import CARD, running

from penstock.contract.events import ChoiceDelta, ChoiceFinished, FinishReason
from penstock.contract.tools import CallPiece
from penstock.server.http.access import Access

MODEL = CARD.name
NOW = {"type": "function", "name": "now", "parameters": {"type": "object"}}
CALLED = [
    {"role": "user", "content": "When?"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}], "id": "rs"},
    {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "noon"},
]


@pytest.fixture
def client(served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_items_that_a_response_answered_are_listed_the_latest_first(client):
    first = client.responses.create(model=MODEL, input=CALLED, instructions="Be brief.", tools=[NOW])
    second = client.responses.create(model=MODEL, input="And now?", previous_response_id=first.id)
    items = list(client.responses.input_items.list(second.id, limit=2))
    assert [item.type for item in items] == [
        "message",
        "message",
        "function_call_output",
        "function_call",
        "reasoning",
        "message",
    ]
    assert [items[0].content[0].text, items[1].content[0].text] == ["And now?", "Hello"]
    assert (items[0].role, items[1].role, items[2].output) == ("user", "assistant", "noon")
    ascending = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.id for item in ascending] == [item.id for item in items][::-1]
    assert len({item.id for item in items}) == len(items)


def test_items_can_be_sent_back(client, served):
    made = client.responses.create(model=MODEL, input=CALLED, tools=[NOW])
    before = served.request.prompt.messages
    items = [item.model_dump(exclude_none=True) for item in client.responses.input_items.list(made.id, order="asc")]
    client.responses.create(model=MODEL, input=items, tools=[NOW])
    assert served.request.prompt.messages == before


def test_an_input_is_counted_as_it_is_written_for_the_model(client, served):
    counted = client.responses.input_tokens.count(model=MODEL, input="Hi", instructions="Be brief.")
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", len("system>Be brief.;user>Hi;"))
    assert not served.engine.requests
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.input_tokens.count(model=MODEL, input="Hi", extra_body={"temperature": 0})
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.input_tokens.count(model=MODEL, input="ü")
    assert caught.value.param == "input"


def test_a_conversation_is_compacted_and_gone_on_from(client, served):
    served.engine.script = always(delta("They said hi."), stop(), finished())
    made = client.responses.compact(model=MODEL, input=[*CALLED, {"role": "user", "content": "Thanks"}])
    assert served.request.prompt.messages[-1].content.startswith("Summarize the conversation")
    assert (made.object, made.usage.output_tokens) == ("response.compaction", 2)
    assert [item.type for item in made.output] == ["message", "message", "compaction"]
    assert base64.b64decode(made.output[-1].encrypted_content) == b"They said hi."
    items = [item.model_dump(exclude_none=True, warnings=False) for item in made.output]
    client.responses.create(model=MODEL, input=[*items, {"role": "user", "content": "So?"}])
    texts = [message.content for message in served.request.prompt.messages]
    assert texts == ["When?", "Thanks", "Summary of the conversation before:\nThey said hi.", "So?"]


def test_a_compaction_from_elsewhere_is_refused(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input=[{"type": "compaction", "encrypted_content": "gAAA-secret"}])
    assert caught.value.param == "input.0.encrypted_content"


def calls(request):
    pieces = (CallPiece(0, "call_1", "now", ""), CallPiece(0, "", "", '{"zone": "UTC"}'))
    yield ChoiceDelta(0, "Let me see.", ())
    yield ChoiceDelta(0, "", (), calls=pieces)
    yield ChoiceFinished(0, FinishReason.TOOL_CALLS)
    yield finished()


def test_the_events_of_a_stored_response_come_again_and_build_it(client, served):
    served.engine.script = calls
    sent = list(client.responses.create(model=MODEL, input="Hi", tools=[NOW], stream=True))
    made = sent[-1].response
    again = list(client.responses.retrieve(made.id, stream=True))
    assert [event.type for event in again] == [event.type for event in sent]
    assert again[-1].response == made
    assert [event.sequence_number for event in again] == list(range(len(again)))
    assert again[0].response.output == []
    for event, before in zip(again, sent, strict=True):
        if event.type != "response.created":
            assert event.model_dump(exclude={"response"}) == before.model_dump(exclude={"response"})
    rest = list(client.responses.retrieve(made.id, stream=True, starting_after=again[-3].sequence_number))
    assert [event.type for event in rest] == [event.type for event in again[-2:]]


def test_the_events_of_a_response_in_the_background_come_when_it_has_ended(client, served):
    gate = Until(threading.Event())
    served.engine.script = always(delta("Hel"), gate, delta("lo"), stop(), finished())
    made = client.responses.create(model=MODEL, input="Hi", background=True)
    threading.Timer(0.05, gate.event.set).start()
    events = list(client.responses.retrieve(made.id, stream=True))
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "Hello"


@pytest.mark.parametrize("query", ["stream=maybe", "stream=true&starting_after=-3", "starting_after=x", "surprise=1"])
def test_a_wrong_query_is_refused_by_name(client, query):
    made = client.responses.create(model=MODEL, input="Hi")
    answer = httpx.get(f"{client.base_url}responses/{made.id}?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in query


def test_what_is_asked_of_no_response_is_404(client):
    for path in ("resp_x/input_items", "resp_x?stream=true"):
        assert httpx.get(f"{client.base_url}responses/{path}").status_code == 404


def test_a_head_request_begins_no_events(client, served):
    made = client.responses.create(model=MODEL, input="Hi")
    head = httpx.head(f"{client.base_url}responses/{made.id}?stream=true")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"].startswith("text/event-stream")


def test_with_compat_a_query_that_is_not_supported_is_left_out_and_listed():
    with running(ScriptedEngine(), access=Access(compat=True)) as url, httpx.Client(base_url=url) as http:
        made = http.post("/v1/responses", json={"input": "Hi"}).json()
        answer = http.get(f"/v1/responses/{made['id']}?surprise=1&stream=false")
    assert (answer.status_code, answer.headers["x-ignored-params"]) == (200, "surprise")


def test_with_compat_what_cannot_be_included_is_listed_beside_the_rest():
    with running(ScriptedEngine(), access=Access(compat=True)) as url, httpx.Client(base_url=url) as http:
        made = http.post("/v1/responses", json={"input": "Hi"}).json()
        for path in ("", "/input_items"):
            answer = http.get(f"/v1/responses/{made['id']}{path}?include[]=file_search_call.results&surprise=1")
            assert (answer.status_code, answer.headers["x-ignored-params"]) == (200, "surprise, include")
        both = http.post("/v1/responses", json={"input": "Hi", "stream": True, "background": True})
    assert (both.status_code, both.headers["x-ignored-params"]) == (200, "background")
    assert "response.completed" in both.text
