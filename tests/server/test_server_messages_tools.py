"""Tools and thinking in Anthropic's messages: what a request becomes, and what the client makes of the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import anthropic
import pytest
from scripted_engine import ScriptedEngine, always, delta, finished, stop
from server_harness import CARD, LIMITS, running
from test_server_tools import CALL_SCRIPTS, TWO_CALLS, calls

from penstock.contract.errors import InvalidParameter
from penstock.contract.events import ChoiceFinished, FinishReason
from penstock.contract.request import Message
from penstock.contract.tools import CallPiece, ReasoningUse, ReplyRules, ToolCall, ToolUse
from penstock.server.anthropic.messages_request import parse_count, parse_messages
from penstock.server.http.access import Access
from penstock.server.openai.chat import parse_chat

MODEL = "acme/tiny-1"
HI = [{"role": "user", "content": "Hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "d", "input_schema": PARAMETERS}
NOW = {"name": "now", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
THINKER = replace(CARD, thinks=True, template_variables=frozenset({"enable_thinking"}))
ALWAYS = replace(CARD, thinks=True)
SAME = {"content", "stop_reason", "stop_sequence", "usage", "role", "model", "type"}


@pytest.fixture
def client(served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def thinker() -> Iterator[tuple[anthropic.Anthropic, ScriptedEngine]]:
    engine = ScriptedEngine()
    with (
        running(engine, card=THINKER) as url,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        yield client, engine


def create(client, **fields):
    return client.messages.create(**{"model": MODEL, "max_tokens": 9, "messages": HI} | fields)


def streamed(client, **fields):
    """The message that the official helper makes of the events, and the events' types."""
    with client.messages.stream(**{"model": MODEL, "max_tokens": 9, "messages": HI} | fields) as stream:
        kinds = [event.type for event in stream]
        return stream.get_final_message(), kinds


def parsed(card=CARD, **fields):
    [request] = parse_messages({"messages": HI, "max_tokens": 9} | fields, "id", card, LIMITS).requests
    return request


# --- answers


def test_a_whole_answer_thinks_then_says_then_calls(thinker):
    client, engine = thinker
    engine.script = TWO_CALLS
    message = create(client, tools=[WEATHER, NOW], thinking={"type": "adaptive"})
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, weather, now = message.content
    assert (thinking.thinking, thinking.signature, text.text) == ("hm", "", "I look.")
    assert (weather.id, weather.name, weather.input) == ("call_a", "weather", {"city": "Rome"})
    assert (now.id, now.name, now.input) == ("call_b", "now", {})
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    assert engine.requests[-1].reply == ReplyRules(ReasoningUse.SPLIT, ToolUse.AUTO)


SCRIPTS = CALL_SCRIPTS | {
    "text after a call": always(
        calls(CallPiece(0, "a", "now", "{}")),
        delta("Now"),
        delta("."),
        ChoiceFinished(0, FinishReason.TOOL_CALLS),
        finished(),
    ),
    "text": always(delta("a"), delta("b"), stop(by="!"), finished()),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_stream_helper_accumulates_the_whole_answer(thinker, name):
    client, engine = thinker
    engine.script = SCRIPTS[name]
    fields = {"tools": [WEATHER, NOW], "thinking": {"type": "adaptive"}}
    whole = create(client, **fields)
    final, _ = streamed(client, **fields)
    assert final.model_dump(include=SAME) == whole.model_dump(include=SAME)


def test_the_helper_fires_its_events(thinker):
    client, engine = thinker
    engine.script = TWO_CALLS
    _, kinds = streamed(client, tools=[WEATHER, NOW], thinking={"type": "adaptive"})
    assert (kinds.count("input_json"), kinds.count("thinking"), kinds.count("text")) == (3, 1, 1)
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4


def test_the_events_open_fill_and_close_each_block_in_turn(served):
    served.engine.script = TWO_CALLS
    body = {"max_tokens": 9, "messages": HI, "stream": True, "tools": [WEATHER, NOW], "thinking": {"type": "adaptive"}}
    lines = served.http.post("/v1/messages", json=body).text.split("\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    said = [(e["type"].removeprefix("content_block_"), e["index"]) for e in events if "index" in e]
    deltas_of = {0: 1, 1: 1, 2: 2, 3: 1}  # the first call's arguments came in two pieces
    kinds = {index: ("start", *["delta"] * count, "stop") for index, count in deltas_of.items()}
    assert said == [(kind, index) for index in range(4) for kind in kinds[index]]
    starts = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert starts[2] == {"type": "tool_use", "id": "call_a", "name": "weather", "input": {}}
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert [each["type"] for each in deltas] == ["thinking_delta", "text_delta", *["input_json_delta"] * 3]
    assert [each["partial_json"] for each in deltas[2:]] == ['{"city": ', '"Rome"}', "{}"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("reason", "expected"), [("STOP", "tool_use"), ("TOOL_CALLS", "tool_use"), ("LENGTH", "max_tokens")]
)
def test_the_stop_reason_says_that_a_tool_is_wanted(client, served, reason, expected):
    """To the engine, a call that had to be made ends like any stop; Anthropic has one word for both."""
    ending = ChoiceFinished(0, FinishReason[reason])
    served.engine.script = always(calls(CallPiece(0, "a", "now", "{}")), ending, finished())
    assert create(client, tools=[NOW]).stop_reason == expected


def test_an_agents_round_trip(thinker):
    """The answer is sent back as it came, with the results, as every agent does."""
    client, engine = thinker
    engine.script = TWO_CALLS
    fields = {"tools": [WEATHER, NOW], "thinking": {"type": "adaptive"}}
    for answer in (create(client, **fields), streamed(client, **fields)[0]):
        results = [
            {"type": "tool_result", "tool_use_id": "call_a", "content": "sunny"},
            {
                "type": "tool_result",
                "tool_use_id": "call_b",
                "content": [{"type": "text", "text": "no"}],
                "is_error": True,
            },
            {"type": "text", "text": "Go"},
            {"type": "text", "text": "on."},
        ]
        turns = [*HI, {"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
        create(client, messages=turns, **fields)
        assert engine.requests[-1].prompt.messages[1:] == (
            Message(
                "assistant",
                "I look.",
                (ToolCall("call_a", "weather", '{"city": "Rome"}'), ToolCall("call_b", "now", "{}")),
                reasoning="hm",
            ),
            Message("tool", "sunny", tool_call_id="call_a", name="weather"),
            Message("tool", "Error: no", tool_call_id="call_b", name="now"),
            Message("user", "Go\non."),
        )


async def test_the_async_client_streams_calls(served):
    served.engine.script = TWO_CALLS
    async with (
        anthropic.AsyncAnthropic(base_url=served.url, api_key="none") as client,
        client.messages.stream(model=MODEL, max_tokens=9, messages=HI, tools=[WEATHER, NOW]) as stream,
    ):
        final = await stream.get_final_message()
    assert [block.input for block in final.content if block.type == "tool_use"] == [{"city": "Rome"}, {}]


# --- requests


def test_tools_become_what_chat_completions_would_make_of_them():
    request = parsed(tools=[WEATHER | {"strict": True}, NOW])
    functions = [
        {"name": "weather", "description": "d", "parameters": PARAMETERS, "strict": True},
        {"name": "now", "parameters": {"type": "object"}},
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    [chat] = parse_chat({"messages": HI, "tools": tools}, "id", CARD, LIMITS).requests
    assert request.prompt == chat.prompt
    assert request.reply.tool_use is ToolUse.AUTO


@pytest.mark.parametrize(
    ("choice", "openai"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
        ({"type": "none"}, "none"),
    ],
)
@pytest.mark.parametrize("parallel", [True, False])
def test_each_choice_is_openais_of_another_name(choice, openai, parallel):
    one = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}
    disabled = {} if choice["type"] == "none" else {"disable_parallel_tool_use": not parallel}
    request = parsed(tools=[WEATHER], tool_choice=choice | disabled)
    fields = {"messages": HI, "tools": [one], "tool_choice": openai, "parallel_tool_calls": parallel}
    [chat] = parse_chat(fields, "id", CARD, LIMITS).requests
    assert (request.prompt, request.grammar) == (chat.prompt, chat.grammar)
    assert replace(request.reply, reasoning=ReasoningUse.SPLIT) == chat.reply


def test_counting_reads_tools_and_thinking_as_generating_does():
    fields = {"messages": HI, "tools": [WEATHER], "thinking": {"type": "enabled", "budget_tokens": 2000}, "system": "S"}
    generated = parse_messages(fields | {"max_tokens": 9}, "id", THINKER, LIMITS).requests[0].prompt
    assert parse_count(fields, THINKER, LIMITS).prompt == generated
    assert generated.tools
    assert generated.template_variables == (("enable_thinking", True),)


def test_the_client_counts_with_tools(client):
    assert client.messages.count_tokens(model=MODEL, messages=HI, tools=[WEATHER]).input_tokens == len("user>Hi;")


@pytest.mark.parametrize(
    ("card", "thinking", "variables", "use"),
    [
        (THINKER, None, {"enable_thinking": False}, ReasoningUse.HIDDEN),
        (THINKER, {"type": "disabled"}, {"enable_thinking": False}, ReasoningUse.HIDDEN),
        (THINKER, {"type": "adaptive"}, {"enable_thinking": True}, ReasoningUse.SPLIT),
        (THINKER, {"type": "enabled"}, {"enable_thinking": True}, ReasoningUse.SPLIT),
        (THINKER, {"type": "enabled", "budget_tokens": 9}, {"enable_thinking": True}, ReasoningUse.SPLIT),
        (THINKER, {"type": "adaptive", "display": "omitted"}, {"enable_thinking": True}, ReasoningUse.HIDDEN),
        (CARD, None, {}, ReasoningUse.HIDDEN),
        (CARD, {"type": "adaptive"}, {}, ReasoningUse.SPLIT),
        (CARD, {"type": "disabled"}, {}, ReasoningUse.HIDDEN),
        (ALWAYS, None, {}, ReasoningUse.HIDDEN),
        (ALWAYS, {"type": "enabled"}, {}, ReasoningUse.SPLIT),
    ],
)
def test_a_model_thinks_when_it_is_asked_to(card, thinking, variables, use):
    request = parsed(card, thinking=thinking)
    assert (dict(request.prompt.template_variables), request.reply.reasoning) == (variables, use)


@pytest.mark.parametrize(
    ("card", "fields", "param"),
    [
        (CARD, {"thinking": {"type": "enabled"}}, "thinking"),
        (ALWAYS, {"thinking": {"type": "disabled"}}, "thinking"),
        (THINKER, {"thinking": {"type": "adaptive", "budget_tokens": 8}}, "thinking.budget_tokens"),
        (THINKER, {"thinking": {"type": "disabled", "budget_tokens": 8}}, "thinking.budget_tokens"),
        (THINKER, {"output_config": {"effort": "high"}}, "output_config.effort"),
    ],
)
def test_thinking_that_cannot_be_had_is_refused_so_that_compat_can_leave_it_out(card, fields, param):
    with pytest.raises(InvalidParameter) as caught:
        parsed(card, **fields)
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")


def test_an_effort_sets_the_level_whether_or_not_thinking_is_on():
    both = replace(THINKER, template_variables=frozenset({"enable_thinking", "reasoning_effort"}))
    variables = dict(parsed(both, output_config={"effort": "low"}).prompt.template_variables)
    assert variables == {"enable_thinking": False, "reasoning_effort": "low"}


def test_a_form_of_the_answer_is_a_grammar():
    request = parsed(output_config={"format": {"type": "json_schema", "schema": PARAMETERS}})
    assert json.loads(request.grammar.source) == PARAMETERS


def test_an_answer_that_may_call_has_the_form_where_it_does_not():
    request = parsed(output_config={"format": {"type": "json_schema", "schema": PARAMETERS}}, tools=[WEATHER])
    assert json.loads(request.reply.form.source) == PARAMETERS
    assert len(json.loads(request.grammar.source)["anyOf"]) == 3


def test_an_assistants_turn_at_the_end_is_continued():
    prompt = parsed(messages=[*HI, {"role": "assistant", "content": "It"}], system="S").prompt
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)
    assert parsed().prompt.add_generation_prompt


USE = {"type": "tool_use", "id": "c", "name": "now", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c"}


def turns(*blocks, use=USE) -> dict:
    return {"messages": [*HI, {"role": "assistant", "content": [use]}, {"role": "user", "content": list(blocks)}]}


def test_a_result_may_be_empty_and_text_may_come_first():
    assert parsed(**turns({"type": "text", "text": "a"}, RESULT)).prompt.messages[2:] == (
        Message("user", "a"),
        Message("tool", "", tool_call_id="c", name="now"),
    )
    assert parsed(**turns(RESULT | {"content": None, "is_error": True})).prompt.messages[2].content == "Error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [1]}, "tools.0"),
        ({"tools": [{"name": "x"}]}, "tools.0.input_schema"),
        ({"tools": [WEATHER | {"name": "a b"}]}, "tools.0.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools.1.name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [WEATHER | {"cache_control": {"type": "x"}}]}, "tools.0.cache_control.type"),
        ({"tools": [WEATHER | {"input_examples": [{}]}]}, "tools.0.input_examples"),
        ({"tools": [WEATHER | {"defer_loading": True}]}, "tools.0.defer_loading"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "auto", "name": "weather"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "any"},
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
            },
            "tool_choice",
        ),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"thinking": {"type": "adaptive", "display": "loud"}}, "thinking.display"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": "some"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "text", "schema": {}}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        (turns(RESULT | {"tool_use_id": "d"}), "messages.2.content.0.tool_use_id"),
        (turns(RESULT | {"content": [{"type": "image"}]}), "messages.2.content.0.content.0.type"),
        (turns(RESULT | {"is_error": "yes"}), "messages.2.content.0.is_error"),
        (turns(RESULT, use=USE | {"input": "{}"}), "messages.1.content.0.input"),
        (turns(RESULT, use=USE | {"caller": {"type": "program"}}), "messages.1.content.0.caller"),
        (turns(RESULT, use={"type": "redacted_thinking", "data": "x"}), "messages.1.content.0.type"),
        (turns(USE), "messages.2.content.0.type"),
        ({"messages": [*HI, {"role": "assistant", "content": [USE]}]}, "messages"),
        ({"messages": [{"role": "system", "content": [RESULT]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0"),
        ({"messages": [*HI, {"role": "assistant", "content": [USE] * 129}, *HI]}, "messages.1.content"),
    ],
)
def test_a_wrong_field_is_named(client, served, fields, param):
    with pytest.raises(anthropic.BadRequestError) as caught:
        create(client, max_tokens=9, extra_body=fields)
    assert caught.value.body["error"]["message"].startswith((param + ":", param + " "))
    assert not served.engine.requests


def test_the_history_that_those_mistakes_were_made_in_is_right():
    assert parsed(**turns(RESULT)).prompt.messages[1].tool_calls == (ToolCall("c", "now", "{}"),)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_what_the_engine_refuses_of_a_tool_is_named_in_anthropics_words(served, path, stream):
    engines = "tools.0.function.parameters"
    refusal = InvalidParameter(engines, f"{engines}: a $ref leads nowhere.")

    async def refuse(prompt, tenant):
        raise refusal

    engine = ScriptedEngine(script=always(refusal))
    engine.tokenize = refuse
    body = {"messages": HI, "tools": [WEATHER]} | ({} if "count" in path else {"max_tokens": 9, "stream": stream})
    with running(engine) as url:
        answer = served.http.post(url + path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "tools.0.input_schema: a $ref leads nowhere."


@pytest.mark.parametrize("budget", [1, 8, 9, 2000, None])
def test_a_budget_bounds_the_reasoning(budget):
    thinking = {"type": "enabled", "budget_tokens": budget}
    assert parsed(THINKER, thinking=thinking).thinking_token_budget == budget
    with pytest.raises(InvalidParameter) as caught:
        parsed(THINKER, thinking=thinking | {"budget_tokens": 2**31})
    assert caught.value.param == "thinking.budget_tokens"


def test_with_compat_a_budget_where_it_does_not_belong_is_left_out_and_listed():
    engine = ScriptedEngine(script=TWO_CALLS)
    thinking = {"type": "adaptive", "budget_tokens": 8}
    with (
        running(engine, card=THINKER, access=Access(compat=True)) as url,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        answer = client.messages.with_raw_response.create(model=MODEL, max_tokens=9, messages=HI, thinking=thinking)
    assert answer.headers["x-ignored-params"] == "thinking.budget_tokens"
    assert answer.parse().content[0].thinking == "hm"
