"""Tools, reasoning and forms in OpenAI's responses: what a request becomes, and what the client makes of the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import openai
import pydantic
import pytest
from scripted_engine import ScriptedEngine, always, delta, finished, length, stop
from server_harness import CARD, LIMITS, running
from test_server_tools import CALL_SCRIPTS, TWO_CALLS, calls

from penstock.contract.errors import InvalidParameter
from penstock.contract.events import ChoiceFinished, FinishReason
from penstock.contract.grammar import JSON_OBJECT
from penstock.contract.limits import RequestLimits
from penstock.contract.request import Message
from penstock.contract.tools import CallPiece, ReasoningUse, ReplyRules, ToolCall, ToolUse
from penstock.server.openai.chat import parse_chat
from penstock.server.openai.response_store import StoredResponse
from penstock.server.openai.responses_request import parse_response

MODEL = "acme/tiny-1"
HI = [{"role": "user", "content": "Hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "description": "d", "parameters": PARAMETERS, "strict": True}
NOW = {"type": "function", "name": "now"}
THINKER = replace(CARD, thinks=True, template_variables=frozenset({"enable_thinking"}))
SAID = Message(
    "assistant",
    "I look.",
    (ToolCall("call_a", "weather", '{"city": "Rome"}'), ToolCall("call_b", "now", "{}")),
    reasoning="hm",
)


@pytest.fixture
def client(served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def parsed(card=CARD, **fields):
    [request] = parse_response({"input": "Hi"} | fields, "id", card, LIMITS, lambda _: ()).parsed.requests
    return request


def test_an_answer_that_may_call_has_the_form_where_it_does_not():
    request = parsed(text={"format": {"type": "json_object"}}, tools=[WEATHER])
    assert request.reply.form == JSON_OBJECT
    assert len(json.loads(request.grammar.source)["anyOf"]) == 3


# --- answers


def test_a_whole_response_thinks_then_says_then_calls(client, served):
    served.engine.script = TWO_CALLS
    response = client.responses.create(model=MODEL, input="Hi", tools=[WEATHER, NOW])
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, weather, now = response.output
    assert (reasoning.summary, reasoning.content[0].text) == ([], "hm")
    assert (message.content[0].text, response.output_text) == ("I look.", "I look.")
    assert (weather.call_id, weather.name, weather.arguments) == ("call_a", "weather", '{"city": "Rome"}')
    assert (now.call_id, now.name, now.arguments) == ("call_b", "now", "{}")
    assert {item.status for item in response.output} == {response.status} == {"completed"}
    assert response.usage.output_tokens_details.reasoning_tokens == 3
    assert len({item.id for item in response.output}) == 4


SCRIPTS = CALL_SCRIPTS | {
    "text after a call": always(
        calls(CallPiece(0, "a", "now", "{}")), delta("Now"), ChoiceFinished(0, FinishReason.TOOL_CALLS), finished()
    ),
    "a call, then cut off": always(calls(CallPiece(0, "a", "now", "{}")), delta("x"), length(), finished()),
    "text": always(delta("a"), delta("b"), stop(), finished()),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_streamed_and_whole_responses_are_equal(client, served, name):
    served.engine.script = SCRIPTS[name]
    whole = client.responses.create(model=MODEL, input="Hi", tools=[WEATHER, NOW])
    events = list(client.responses.create(model=MODEL, input="Hi", tools=[WEATHER, NOW], stream=True))
    last = events[-1].response
    stem = {each.id: each.id.removeprefix("resp_") for each in (whole, last)}
    same = {"output", "status", "usage", "tools", "incomplete_details"}
    assert last.model_dump_json(include=same).replace(stem[last.id], "") == whole.model_dump_json(include=same).replace(
        stem[whole.id], ""
    )
    assert [event.item for event in events if event.type == "response.output_item.done"] == last.output
    assert client.responses.retrieve(last.id) == last


def test_the_events_of_each_item_come_in_openais_order(client, served):
    served.engine.script = TWO_CALLS
    events = list(client.responses.create(model=MODEL, input="Hi", tools=[WEATHER, NOW], stream=True))
    added, part, done, item = "output_item.added", "content_part.added", "content_part.done", "output_item.done"
    arguments, arguments_done = "function_call_arguments.delta", "function_call_arguments.done"
    assert [event.type.removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *(added, part, "reasoning_text.delta", "reasoning_text.done", done, item),
        *(added, part, "output_text.delta", "output_text.done", done, item),
        *(added, arguments, arguments, arguments_done, item),
        *(added, arguments, arguments_done, item),
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.output_index for event in events if event.type == "response.output_item.added"] == [0, 1, 2, 3]
    first = next(event for event in events if getattr(getattr(event, "item", None), "type", "") == "function_call")
    assert (first.item.name, first.item.arguments, first.item.status) == ("weather", "", "in_progress")


def test_the_stream_helper_makes_the_whole_response_of_the_events(client, served):
    served.engine.script = TWO_CALLS
    with client.responses.stream(model=MODEL, input="Hi", tools=[WEATHER, NOW]) as stream:
        snapshots = [e.snapshot for e in stream if e.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert snapshots == ['{"city": ', '{"city": "Rome"}', "{}"]
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert final.output[2].parsed_arguments == {"city": "Rome"}


async def test_the_async_client(served):
    served.engine.script = TWO_CALLS
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none") as client:
        whole = await client.responses.create(model=MODEL, input="Hi", tools=[WEATHER, NOW])
        async with client.responses.stream(model=MODEL, input="Hi", tools=[WEATHER, NOW]) as stream:
            final = await stream.get_final_response()
    assert [item.type for item in final.output] == [item.type for item in whole.output]


# --- turns


def test_a_response_that_called_is_continued_by_id(client, served):
    served.engine.script = TWO_CALLS
    first = client.responses.create(model=MODEL, input="Hi", tools=[WEATHER, NOW], instructions="S")
    outputs = [{"type": "function_call_output", "call_id": "call_a", "output": "sunny"}]
    second = client.responses.create(model=MODEL, input=outputs, tools=[WEATHER], previous_response_id=first.id)
    history = (Message("user", "Hi"), SAID, Message("tool", "sunny", tool_call_id="call_a", name="weather"))
    assert served.request.prompt.messages == history
    more = [{"type": "function_call_output", "call_id": "call_b", "output": [{"type": "input_text", "text": "no"}]}]
    client.responses.create(model=MODEL, input=more, previous_response_id=second.id)
    result = Message("tool", "no", tool_call_id="call_b", name="now")
    assert served.request.prompt.messages == (*history, SAID, result)


@pytest.mark.parametrize("stream", [False, True])
def test_a_responses_own_output_is_input_again(client, served, stream):
    """What every agent that keeps its own history does."""
    served.engine.script = TWO_CALLS
    if stream:
        with client.responses.stream(model=MODEL, input="Hi", tools=[WEATHER, NOW]) as events:
            response = events.get_final_response()
    else:
        response = client.responses.create(model=MODEL, input="Hi", tools=[WEATHER, NOW])
    result = {"type": "function_call_output", "call_id": "call_a", "output": "sunny"}
    client.responses.create(model=MODEL, input=[*HI, *response.output, result, *HI], tools=[WEATHER, NOW])
    tool = Message("tool", "sunny", tool_call_id="call_a", name="weather")
    assert served.request.prompt.messages == (Message("user", "Hi"), SAID, tool, Message("user", "Hi"))


def items(*values):
    return parse_response({"input": list(values)}, "id", CARD, LIMITS, lambda _: ()).history


THOUGHT = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
SPOKEN = {"type": "message", "role": "assistant", "content": "a"}
CALL = {"type": "function_call", "call_id": "c", "name": "now", "arguments": ""}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "ok"}


def test_what_an_assistant_did_in_a_row_is_one_turn_and_what_it_did_again_another():
    call = ToolCall("c", "now", "{}")
    assert items(THOUGHT, SPOKEN, CALL, CALL) == (Message("assistant", "a", (call, call), reasoning="hm"),)
    assert items(SPOKEN, SPOKEN) == (Message("assistant", "a"), Message("assistant", "a"))
    assert items(CALL, THOUGHT, CALL) == (
        Message("assistant", "", (call,)),
        Message("assistant", "", (call,), reasoning="hm"),
    )
    assert items(SPOKEN, CALL, SPOKEN) == (Message("assistant", "aa", (call,)),)
    assert items(CALL, RESULT, SPOKEN) == (
        Message("assistant", "", (call,)),
        Message("tool", "ok", tool_call_id="c", name="now"),
        Message("assistant", "a"),
    )
    assert items(*HI, SPOKEN) == (Message("user", "Hi"), Message("assistant", "a"))


def test_the_store_counts_what_a_conversation_called_and_thought():
    plain = StoredResponse("", {"id": "1"}, (Message("user", "x"),))
    rich = StoredResponse("", {"id": "1"}, (Message("user", "x"), SAID))
    assert rich.size() - plain.size() >= len('I look.hm{"city": "Rome"}{}')


# --- requests


@pytest.mark.parametrize(
    ("choice", "chats"),
    [
        ("auto", "auto"),
        ("required", "required"),
        ("none", "none"),
        ({"type": "function", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "weather"}}],
                },
            },
        ),
    ],
)
@pytest.mark.parametrize("parallel", [True, False])
def test_tools_and_choices_are_chat_completions_in_a_flat_spelling(choice, chats, parallel):
    nested = [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in (NOW, WEATHER)
    ]
    given = {"tool_choice": choice, "parallel_tool_calls": parallel}
    request = parsed(tools=[NOW, WEATHER], **given)
    [chat] = parse_chat({"messages": HI, "tools": nested} | given | {"tool_choice": chats}, "id", CARD, LIMITS).requests
    assert (request.prompt, request.grammar, request.reply) == (chat.prompt, chat.grammar, chat.reply)


def test_the_response_repeats_what_was_asked(client):
    choice = {"type": "function", "name": "weather"}
    response = client.responses.create(
        model=MODEL, input="Hi", tools=[NOW, WEATHER], tool_choice=choice, parallel_tool_calls=False
    )
    bare = {"description": None, "parameters": {"type": "object", "properties": {}}, "strict": False}
    assert [tool.model_dump(exclude_unset=True) for tool in response.tools] == [NOW | bare, WEATHER]
    assert (response.tool_choice.name, response.parallel_tool_calls) == ("weather", False)
    plain = client.responses.create(model=MODEL, input="Hi")
    assert (plain.tools, plain.tool_choice, plain.parallel_tool_calls) == ([], "auto", True)
    assert (plain.text.format.type, plain.reasoning.effort) == ("text", None)


def test_reasoning_is_always_an_item_of_its_own():
    assert parsed().reply == ReplyRules(ReasoningUse.SPLIT, ToolUse.NONE)


def test_an_effort_is_honoured_and_repeated(served):
    engine = ScriptedEngine()
    with running(engine, card=THINKER) as url, openai.OpenAI(base_url=url + "/v1", api_key="none") as client:
        response = client.responses.create(model=MODEL, input="Hi", reasoning={"effort": "none"})
    assert response.reasoning.effort == "none"
    assert engine.requests[-1].prompt.template_variables == (("enable_thinking", False),)
    with pytest.raises(InvalidParameter) as caught:
        parsed(card=replace(CARD, thinks=True), reasoning={"effort": "high"})
    assert (caught.value.param, caught.value.code) == ("reasoning.effort", "unsupported_parameter")


class Person(pydantic.BaseModel):
    name: str


@pytest.mark.parametrize("stream", [False, True])
def test_a_form_is_followed_and_parsed_by_the_client(client, served, stream):
    served.engine.script = always(delta('{"name":'), delta('"Al"}'), stop(), finished())
    if stream:
        with client.responses.stream(model=MODEL, input="Hi", text_format=Person) as events:
            response = events.get_final_response()
    else:
        response = client.responses.parse(model=MODEL, input="Hi", text_format=Person)
    assert response.output_parsed == Person(name="Al")
    assert json.loads(served.request.grammar.source)["required"] == ["name"]
    assert response.text.format.type == "json_schema"


def test_the_other_forms():
    assert parsed(text={"format": {"type": "text"}}).grammar is None
    assert json.loads(parsed(text={"format": {"type": "json_object"}}).grammar.source) == {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [1]}, "tools.0"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.function"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools.0.type"),
        ({"tools": [NOW | {"name": "a b"}]}, "tools.0.name"),
        ({"tools": [NOW, NOW]}, "tools.1.name"),
        ({"tools": [NOW | {"defer_loading": True}]}, "tools.0.defer_loading"),
        ({"tools": [NOW] * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tools": [NOW], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "name": "now", "mode": "auto"}}, "tool_choice.type"),
        ({"tools": [NOW], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        (
            {"tools": [NOW], "tool_choice": {"type": "allowed_tools", "mode": "x", "tools": [NOW]}},
            "tool_choice.mode",
        ),
        ({"tools": [NOW], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
        (
            {"tools": [NOW], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
            "tool_choice.tools.0.type",
        ),
        (
            {
                "tools": [NOW],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [NOW | {"name": "x"}]},
            },
            "tool_choice.tools.0.name",
        ),
        ({"tools": [NOW], "tool_choice": "required", "text": {"format": {"type": "json_object"}}}, "tool_choice"),
        ({"reasoning": {"effort": "lots"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema"),
        ({"text": {"verbosity": "endless"}}, "text.verbosity"),
        ({"input": [RESULT]}, "input.0.call_id"),
        ({"input": [CALL, RESULT | {"output": [{"type": "input_image"}]}]}, "input.1.output.0.type"),
        ({"input": [CALL, {"type": "function_call_output", "call_id": "c"}]}, "input.1.output"),
        ({"input": [CALL | {"arguments": "[]"}]}, "input.0.arguments"),
        ({"input": [CALL | {"call_id": None}]}, "input.0.call_id"),
        ({"input": [CALL | {"namespace": "x"}]}, "input.0.namespace"),
        ({"input": [THOUGHT | {"content": "hm"}]}, "input.0.content"),
        ({"input": [THOUGHT | {"encrypted_content": "x"}]}, "input.0.encrypted_content"),
        ({"input": [THOUGHT | {"summary": [{"type": "summary_text", "text": "x"}]}]}, "input.0.summary"),
        ({"input": [THOUGHT | {"content": [{"type": "output_text", "text": "x"}]}]}, "input.0.content.0.type"),
        ({"input": [CALL] * 129}, "input"),
    ],
)
def test_a_wrong_field_is_named(served, fields, param):
    answer = served.http.post("/v1/responses", json={"input": "Hi"} | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert not served.engine.requests


def test_the_items_that_those_mistakes_were_made_in_are_right():
    limits = RequestLimits(max_messages=3)
    body = {"input": [THOUGHT, CALL, RESULT]}
    assert len(parse_response(body, "id", CARD, limits, lambda _: ()).history) == 2
    with pytest.raises(InvalidParameter, match="at most 3"):
        parse_response({"input": [*body["input"], CALL]}, "id", CARD, limits, lambda _: ())


def test_what_the_engine_refuses_of_a_tool_is_named_in_the_flat_spelling(served):
    engines = "tools.0.function.parameters"
    served.engine.script = always(InvalidParameter(engines, f"{engines}: a $ref leads nowhere."))
    one = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}
    answer = served.http.post("/v1/responses", json={"input": "Hi", "tools": [NOW, WEATHER], "tool_choice": one})
    error = answer.json()["error"]
    assert (error["param"], error["message"]) == ("tools.1.parameters", "tools.1.parameters: a $ref leads nowhere.")
