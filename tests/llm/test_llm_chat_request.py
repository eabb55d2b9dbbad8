"""`chat`'s messages and tools become what an HTTP request with the same fields becomes, and answers are taken apart."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from penstock.contract.errors import InvalidParameter
from penstock.contract.events import ChoiceDelta, ChoiceFinished, FinishReason, RequestFinished, Usage
from penstock.contract.grammar import Grammar, GrammarKind
from penstock.contract.limits import DEFAULT_LIMITS
from penstock.contract.model import ModelCard
from penstock.contract.request import ChatPrompt, EngineRequest, Message, SequenceRequest, TextPrompt
from penstock.contract.tools import CallPiece, ReasoningUse, ReplyRules, ToolCall
from penstock.engine import ResolvedRequest
from penstock.llm.chat_request import ChatArguments, applied, prompt_of, read_chat, read_chats
from penstock.llm.outputs import Answer
from penstock.server.openai.chat import parse_chat

CARD = ModelCard("m", 0, 512, 1000, has_chat_template=True)
HI = [{"role": "user", "content": "Hi"}]
NOW = {"type": "function", "function": {"name": "now"}}
CALL = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
ASK = EngineRequest("id", TextPrompt(""))


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [NOW]},
        {"tools": [NOW], "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "now"}}},
        {"include_reasoning": False},
        {"chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": False},
        {"messages": [*HI, {"role": "assistant", "content": "It"}], "continue_final_message": True},
        {
            "messages": [
                *HI,
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": "x"},
            ]
        },
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
        {"reasoning_effort": "none"},
        {},
    ],
)
def test_every_option_means_what_the_request_field_means(fields):
    body = {"messages": HI} | fields
    [ask] = parse_chat(body, "id", CARD, DEFAULT_LIMITS).requests
    options = {name: value for name, value in body.items() if name != "messages"}
    request = read_chat(body["messages"], ChatArguments(**options), CARD)
    ours = applied(request, ASK)
    assert (ours.prompt, ours.reply, ours.grammar) == (ask.prompt, ask.reply, ask.grammar)
    assert prompt_of(request) == ask.prompt


def test_mappings_and_tuples_of_any_sort_are_taken():
    from types import MappingProxyType

    request = read_chat((MappingProxyType(HI[0]),), ChatArguments(tools=(MappingProxyType(NOW),)), CARD)
    assert [tool.name for tool in request.prompt.tools] == ["now"]


def test_one_conversation_or_a_list_of_them():
    expected = ChatPrompt((Message("user", "Hi"),))
    for given, count in ((HI, 1), ([HI, HI], 2), ([], 0)):
        assert [request.prompt for request in read_chats(given, ChatArguments(), CARD)] == [expected] * count


def test_plain_turns_may_have_any_role_and_keep_their_grammar():
    request = read_chat([{"role": "critic", "content": "x"}], ChatArguments(), CARD)
    assert request.prompt.messages == (Message("critic", "x"),)
    guided = replace(ASK, grammar=Grammar(GrammarKind.CHOICE, '["a"]'))
    assert applied(request, guided).grammar == guided.grammar
    assert applied(request, guided).reply == ReplyRules(ReasoningUse.SPLIT)
    assert applied(TextPrompt("x"), guided) is guided


@pytest.mark.parametrize(
    ("messages", "options", "param"),
    [
        (HI, {"tools": [{"type": "function"}]}, "tools.0.function"),
        (HI, {"tool_choice": "required"}, "tool_choice"),
        (HI, {"tools": 1}, "tools"),
        (HI, {"reasoning_effort": 7}, "reasoning_effort"),
        (HI, {"continue_final_message": True}, "continue_final_message"),
        ([{"role": "user"}], {}, "messages.0.content"),
        ([{"role": "user", "content": "x", "weight": 1}], {}, "messages.0.weight"),
        ([{"role": "tool", "content": "x", "tool_call_id": "c"}], {}, "messages.0.tool_call_id"),
        ([], {"tools": [NOW]}, "messages"),
    ],
)
def test_mistakes_are_named(messages, options, param):
    with pytest.raises(InvalidParameter) as caught:
        read_chat(messages, ChatArguments(**options), CARD)
    assert caught.value.param == param


def test_a_form_and_a_call_that_must_be_made_contradict_each_other():
    request = read_chat(HI, ChatArguments(tools=[NOW], tool_choice="required"), CARD)
    with pytest.raises(InvalidParameter, match="give one of them"):
        applied(request, replace(ASK, grammar=Grammar(GrammarKind.CHOICE, '["a"]')))


def test_an_answer_comes_apart_and_can_be_sent_back():
    resolved = ResolvedRequest("id", (SequenceRequest("id/0", (1,)),), "", answered=1)
    answer = Answer(resolved, wants_logprobs=False)
    answer.add(ChoiceDelta(0, "", (), reasoning="hm"))
    answer.add(ChoiceDelta(0, "I ", ()))
    assert answer.output().outputs[0].tool_calls == ()
    answer.add(ChoiceDelta(0, "look.", (), calls=(CallPiece(0, "c", "now", ""), CallPiece(0, "", "", "{}"))))
    answer.add(ChoiceFinished(0, FinishReason.TOOL_CALLS))
    answer.add(RequestFinished(Usage()))
    output = answer.output().outputs[0]
    assert (output.text, output.reasoning, output.tool_calls) == ("I look.", "hm", (ToolCall("c", "now", "{}"),))
    assert output.finish_reason == "tool_calls"
    turns = [*HI, output.message, {"role": "tool", "tool_call_id": "c", "content": "noon"}]
    assert read_chat(turns, ChatArguments(), CARD).prompt.messages == (
        Message("user", "Hi"),
        Message("assistant", "I look.", (ToolCall("c", "now", "{}"),), reasoning="hm"),
        Message("tool", "noon", tool_call_id="c", name="now"),
    )


def test_an_answer_in_words_is_a_plain_message():
    answer = Answer(ResolvedRequest("id", (SequenceRequest("id/0", (1,)),), "", answered=1), wants_logprobs=False)
    answer.add(ChoiceDelta(0, "Hi", ()))
    assert answer.output().outputs[0].message == {"role": "assistant", "content": "Hi"}


def test_plain_turns_need_no_http_stack():
    code = (
        "import sys; from penstock.llm.chat_request import ChatArguments, read_chat\n"
        "read_chat([{'role': 'user', 'content': 'Hi'}], ChatArguments(), None)\n"
        "sys.exit('fastapi' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
