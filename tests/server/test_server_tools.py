"""Tools and reasoning over HTTP: what a request becomes, and what the official client makes of the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from scripted_engine import always, delta, finished, length, stop
from sse_reader import read_events

from penstock.api_fields.tools import enforced_schema, read_tools, schema_beside_calls
from penstock.contract.errors import InvalidParameter
from penstock.contract.events import ChoiceDelta, ChoiceFinished, FinishReason, RequestFinished, TokenPiece, Usage
from penstock.contract.grammar import Grammar, GrammarKind
from penstock.contract.limits import DEFAULT_LIMITS
from penstock.contract.model import ModelCard
from penstock.contract.request import ChatPrompt, Message
from penstock.contract.tools import CallPiece, ReasoningUse, ReplyRules, ToolCall, ToolUse
from penstock.server.openai.chat import parse_chat

MODEL = "acme/tiny-1"
HI = [{"role": "user", "content": "Hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now"}}


def called(choice: int = 0) -> ChoiceFinished:
    return ChoiceFinished(choice, FinishReason.TOOL_CALLS)


def calls(*pieces: CallPiece, choice: int = 0, text: str = "", reasoning: str = "") -> ChoiceDelta:
    return ChoiceDelta(choice, text, (TokenPiece(7, b"x", -0.5),), reasoning, pieces)


TWO_CALLS = always(
    calls(reasoning="hm"),
    calls(text="I look."),
    calls(
        CallPiece(0, "call_a", "weather", "", 7, 3), CallPiece(0, "", "", '{"city": '), CallPiece(0, "", "", '"Rome"}')
    ),
    calls(CallPiece(1, "call_b", "now", "", 7, 4), CallPiece(1, "", "", "{}")),
    called(),
    RequestFinished(Usage(5, 9, 0, 3)),
)

CALL_SCRIPTS = {
    "all": TWO_CALLS,
    "calls alone": always(calls(CallPiece(0, "a", "now", ""), CallPiece(0, "", "", "{}")), called(), finished()),
    "nothing": always(stop(), finished(completion=0)),
    "thinking cut off": always(calls(reasoning="h"), calls(reasoning="m"), length(), finished()),
    "a call between texts": always(
        calls(text="So."), calls(CallPiece(0, "a", "now", "{}", 3)), calls(text="Then."),
        calls(CallPiece(1, "b", "now", "{}", 8)), calls(text="Done."), called(), finished()
    ),
    "a call cut off": always(
        calls(CallPiece(0, "a", "weather", "")), calls(CallPiece(0, "", "", '{"city": "R')), length(), finished()
    ),
}  # fmt: skip
"""Answers with calls of WEATHER and NOW, for every API."""


@pytest.fixture
def client(served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


# --- answers


def test_the_client_reads_a_whole_answer_with_calls(client, served):
    served.engine.script = TWO_CALLS
    answer = client.chat.completions.create(model=MODEL, messages=HI, tools=[WEATHER, NOW])
    message = answer.choices[0].message
    assert [(c.id, c.type, c.function.name, c.function.arguments) for c in message.tool_calls] == [
        ("call_a", "function", "weather", '{"city": "Rome"}'),
        ("call_b", "function", "now", "{}"),
    ]
    assert (message.content, message.reasoning_content) == ("I look.", "hm")
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage.completion_tokens_details.reasoning_tokens == 3


def test_the_stream_helper_accumulates_the_same_message(client, served):
    served.engine.script = TWO_CALLS
    whole = client.chat.completions.create(model=MODEL, messages=HI, tools=[WEATHER, NOW]).choices[0]
    with client.chat.completions.stream(model=MODEL, messages=HI, tools=[WEATHER, NOW]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert final.message.content == whole.message.content
    assert final.message.reasoning_content == whole.message.reasoning_content
    assert [(c.id, c.type, c.function.name, c.function.arguments) for c in final.message.tool_calls] == [
        (c.id, c.type, c.function.name, c.function.arguments) for c in whole.message.tool_calls
    ]
    assert final.finish_reason == whole.finish_reason == "tool_calls"


def test_a_streams_deltas_name_a_call_once_and_its_arguments_in_pieces(served):
    served.engine.script = TWO_CALLS
    events = read_events(served.chat(stream=True, tools=[WEATHER]).content)
    assert events[-1].data == "[DONE]"
    deltas = [json.loads(event.data)["choices"][0]["delta"] for event in events[:-1]]
    head = {"type": "function"}
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "I look."},
        {"tool_calls": [{"index": 0, "id": "call_a", **head, "function": {"name": "weather", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Rome"}'}}]},
        {"tool_calls": [{"index": 1, "id": "call_b", **head, "function": {"name": "now", "arguments": ""}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
        {},
    ]


def test_choices_that_call_at_once_are_told_apart(client, served):
    served.engine.script = always(
        calls(CallPiece(0, "b", "now", ""), choice=0),
        calls(CallPiece(0, "a", "now", ""), choice=1),
        calls(CallPiece(0, "", "", "{}"), choice=0),
        calls(CallPiece(0, "", "", "{ }"), choice=1),
        called(0),
        called(1),
        finished(),
    )
    with client.chat.completions.stream(model=MODEL, messages=HI, n=2, tools=[NOW]) as stream:
        final = stream.get_final_completion()
    assert [(c.message.tool_calls[0].id, c.message.tool_calls[0].function.arguments) for c in final.choices] == [
        ("b", "{}"),
        ("a", "{ }"),
    ]


def test_an_answer_that_only_calls_has_no_content(served):
    served.engine.script = always(calls(CallPiece(0, "a", "now", "{}")), called(), finished())
    message = served.chat(tools=[NOW]).json()["choices"][0]["message"]
    assert message["content"] is None
    assert "reasoning_content" not in message
    served.engine.script = always(delta("Hi"), stop(), finished())
    plain = served.chat(tools=[NOW]).json()["choices"][0]["message"]
    assert plain == {"role": "assistant", "content": "Hi", "refusal": None}


def test_logprobs_come_with_the_tokens_whatever_their_text_became(served):
    served.engine.script = TWO_CALLS
    whole = served.chat(tools=[WEATHER], logprobs=True).json()["choices"][0]["logprobs"]["content"]
    events = read_events(served.chat(tools=[WEATHER], logprobs=True, stream=True).content)
    chunks = [json.loads(event.data)["choices"][0] for event in events[:-1]]
    streamed = [token for chunk in chunks if chunk["logprobs"] for token in chunk["logprobs"]["content"]]
    assert streamed == whole
    assert len(whole) == 4


def test_the_answer_can_be_sent_back_as_it_came(client, served):
    """What every agent does: append the message, then the results."""
    served.engine.script = TWO_CALLS
    message = client.chat.completions.create(model=MODEL, messages=HI, tools=[WEATHER, NOW]).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in message.tool_calls]
    client.chat.completions.create(model=MODEL, messages=[*HI, message, *results], tools=[WEATHER, NOW])
    assert served.request.prompt.messages[1:] == (
        Message(
            "assistant",
            "I look.",
            tool_calls=(ToolCall("call_a", "weather", '{"city": "Rome"}'), ToolCall("call_b", "now", "{}")),
            reasoning="hm",
        ),
        Message("tool", "ok", tool_call_id="call_a", name="weather"),
        Message("tool", "ok", tool_call_id="call_b", name="now"),
    )


# --- requests


def test_a_request_with_tools_becomes_an_engine_request(served):
    assert served.chat(tools=[WEATHER, NOW], parallel_tool_calls=False).status_code == 200
    prompt = served.request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert [tool.name for tool in prompt.tools] == ["weather", "now"]
    assert json.loads(prompt.tools[0].definition) == WEATHER
    assert json.loads(prompt.tools[1].parameters) == {"type": "object", "properties": {}}
    assert served.request.reply == ReplyRules(ReasoningUse.SPLIT, ToolUse.AUTO, parallel_tool_calls=False)
    served.chat(include_reasoning=False)
    assert served.request.reply == ReplyRules(ReasoningUse.HIDDEN)
    served.complete()
    assert served.request.reply == ReplyRules()


def test_choosing_no_tool_shows_none(served):
    served.chat(tools=[WEATHER], tool_choice="none")
    assert (served.request.prompt.tools, served.request.reply.tool_use) == ((), ToolUse.NONE)
    served.chat(tool_choice="auto")
    assert served.request.reply.tool_use is ToolUse.NONE
    one = {"type": "function", "function": {"name": "now"}}
    served.chat(
        tools=[WEATHER, NOW],
        tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [one]}},
    )
    assert [tool.name for tool in served.request.prompt.tools] == ["now"]


def test_the_prompts_shape_can_be_chosen(served):
    served.chat(add_generation_prompt=False, chat_template_kwargs={"enable_thinking": False, "level": 3})
    assert not served.request.prompt.add_generation_prompt
    assert served.request.prompt.template_variables == (("enable_thinking", False), ("level", 3))
    served.chat(messages=[*HI, {"role": "assistant", "content": "It"}], continue_final_message=True)
    assert served.request.prompt.continue_final_message
    assert not served.request.prompt.add_generation_prompt
    served.chat()
    assert served.request.prompt.add_generation_prompt


def test_reasoning_has_two_names_on_the_way_in(served):
    for name in ("reasoning", "reasoning_content"):
        served.chat(messages=[*HI, {"role": "assistant", "content": "a", name: "hm"}, *HI])
        assert served.request.prompt.messages[1] == Message("assistant", "a", reasoning="hm")


def history(**changes) -> list[dict]:
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}} | changes.pop("call", {})
    assistant = {"role": "assistant", "tool_calls": [call]} | changes.pop("assistant", {})
    return [*HI, assistant, {"role": "tool", "tool_call_id": "c", "content": "ok"} | changes]


def function(**changes) -> dict:
    return {"type": "function", "function": {"name": "f"} | changes}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [1]}, "tools.0"),
        ({"tools": [{}]}, "tools.0.type"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [function(name="")]}, "tools.0.function.name"),
        ({"tools": [function(name="a b")]}, "tools.0.function.name"),
        ({"tools": [function(name="x" * 65)]}, "tools.0.function.name"),
        ({"tools": [function(), function()]}, "tools.1.function.name"),
        ({"tools": [function(parameters=[])]}, "tools.0.function.parameters"),
        ({"tools": [function(extra=1)]}, "tools.0.function.extra"),
        ({"tools": [function(strict="yes")]}, "tools.0.function.strict"),
        ({"tools": [function(name=f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": [function(description="d" * 5_000)]}, "messages"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": 1}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [WEATHER], "tool_choice": function()}, "tool_choice.function.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": []}}},
            "tool_choice.allowed_tools.mode",
        ),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"include_reasoning": 1}, "include_reasoning"),
        ({"chat_template_kwargs": {"a": None}}, "chat_template_kwargs.a"),
        ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs.a"),
        ({"chat_template_kwargs": {"a": "x" * 257}}, "chat_template_kwargs.a"),
        ({"chat_template_kwargs": {f"a{i}": 1 for i in range(33)}}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"messages": history(tool_call_id="d")}, "messages.2.tool_call_id"),
        ({"messages": history(tool_call_id=None)}, "messages.2.tool_call_id"),
        ({"messages": history(name="later")}, "messages.2.name"),
        ({"messages": history(content=None)}, "messages.2.content"),
        ({"messages": history(call={"type": "custom"})}, "messages.1.tool_calls.0.type"),
        ({"messages": history(call={"id": None})}, "messages.1.tool_calls.0.id"),
        ({"messages": history(call={"function": {"name": "f"}})}, "messages.1.tool_calls.0.function.arguments"),
        (
            {"messages": history(call={"function": {"name": "f", "arguments": "[]"}})},
            "messages.1.tool_calls.0.function.arguments",
        ),
        ({"messages": history(assistant={"tool_calls": {}})}, "messages.1.tool_calls"),
        ({"messages": history(assistant={"tool_calls": []})}, "messages.1.content"),
        ({"messages": [HI[0] | {"tool_calls": [{}]}]}, "messages.0.tool_calls"),
        ({"messages": [HI[0] | {"tool_call_id": "c"}]}, "messages.0.tool_call_id"),
        ({"messages": [HI[0] | {"reasoning_content": "hm"}]}, "messages.0.reasoning_content"),
        (
            {"messages": [{"role": "assistant", "content": "", "reasoning": "a", "reasoning_content": "b"}]},
            "messages.0.reasoning",
        ),
    ],
)
def test_a_wrong_field_is_named(served, fields, param):
    response = served.chat(**fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert not served.engine.requests


def test_the_history_that_those_mistakes_were_made_in_is_right(served):
    assert served.chat(messages=history()).status_code == 200
    assert served.chat(messages=history(call={"function": {"name": "now", "arguments": " "}})).status_code == 200
    assert served.request.prompt.messages[1].tool_calls == (ToolCall("c", "now", "{}"),)


# --- calls that must be made


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_must_be_made_is_held_to_its_grammar(choice):
    card = ModelCard("m", 0, 512, 1000, has_chat_template=True)
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [WEATHER], "tool_choice": choice}
    [request] = parse_chat(body, "chatcmpl-1", card, DEFAULT_LIMITS).requests
    assert request.grammar == Grammar(GrammarKind.JSON, json.dumps(enforced_schema(read_tools(body, DEFAULT_LIMITS))))
    free = parse_chat(body | {"tool_choice": "auto"}, "chatcmpl-1", card, DEFAULT_LIMITS).requests[0]
    assert free.grammar is None
    with pytest.raises(InvalidParameter, match="response_format"):
        parse_chat(body | {"response_format": {"type": "json_object"}}, "chatcmpl-1", card, DEFAULT_LIMITS)


# --- calls or a form


def test_an_answer_may_call_or_have_the_form(served):
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": PARAMETERS}}
    for response_format, schema in (({"type": "json_object"}, {"type": "object"}), (form, PARAMETERS)):
        assert served.chat(messages=HI, tools=[WEATHER, NOW], response_format=response_format).status_code == 200
        offer = read_tools({"tools": [WEATHER, NOW]}, DEFAULT_LIMITS)
        assert json.loads(served.request.grammar.source) == schema_beside_calls(schema, offer)
        assert json.loads(served.request.reply.form.source) == schema
        assert served.request.reply.tool_use is ToolUse.AUTO
    served.chat(messages=HI, tools=[WEATHER], tool_choice="none", response_format=form)
    assert json.loads(served.request.grammar.source) == PARAMETERS
    assert served.request.reply.form is None


@pytest.mark.parametrize("outputs", [{"regex": "a+"}, {"choice": ["a"]}])
def test_a_regex_or_a_choice_beside_tools_holds_the_whole_answer(served, outputs):
    served.chat(messages=HI, tools=[WEATHER], structured_outputs=outputs)
    assert served.request.grammar.kind in outputs
    assert served.request.reply.form is None
    assert served.request.reply.tool_use is ToolUse.AUTO


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"structured_outputs": {"json": {"type": "array"}}}, "tools", "'object'"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "JSON schema"),
    ],
)
def test_a_form_that_does_not_go_together_with_tools_is_refused(served, fields, param, word):
    answer = served.chat(messages=HI, tools=[WEATHER], **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert word in error["message"]
