"""However an answer is cut, what each endpoint streams of its calls adds up to what it says whole."""

from __future__ import annotations

import json
from collections.abc import Iterable

import jiter
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.contract.events import ChoiceDelta, ChoiceFinished, FinishReason, TokenPiece, Usage
from penstock.contract.request import ChatPrompt, Message
from penstock.contract.tools import CallPiece, ReasoningUse, ReplyRules, Tool, ToolUse
from penstock.server.anthropic.messages import MessageFormatter
from penstock.server.delivery.call_arguments import arguments_object
from penstock.server.openai.chat import ChatFormatter
from penstock.server.openai.responses_answer import ResponsesFormatter
from penstock.text.call_format import CALL_FORMATS
from penstock.text.reply import ReplyFormat

PARAMETERS = json.dumps({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
DEFINITION = json.dumps({"type": "function", "function": {"name": "weather", "parameters": json.loads(PARAMETERS)}})
ROME = '{"name": "weather", "arguments": {"city": "Rome \\u00e9", "days": [1, 2.5]}}'
ANSWERS = {
    "calls": f"<think>hm</think>So. <tool_call>{ROME}</tool_call>\n<tool_call>{ROME}</tool_call>",
    "text between": f"So.<tool_call>{ROME}</tool_call>Then.<tool_call>{ROME}</tool_call> Done.",
    "cut off": f"So.<tool_call>{ROME}</tool_call><tool_call>{ROME[:52]}",
    "broken off": f"<tool_call>{ROME[:52]}\n</tool_call> Oh.",
    "unknown": '<tool_call>{"name": "later", "arguments": {}}</tool_call>',
}
CHAT = ChatPrompt((Message("user", "x"),), tools=(Tool("weather", DEFINITION, PARAMETERS),))
STRICT = ChatPrompt((Message("user", "x"),), tools=(Tool("weather", DEFINITION, PARAMETERS, strict=True),))


def deltas(prompt: ChatPrompt, pieces: Iterable[str]) -> list[ChoiceDelta]:
    """The engine's outputs, with one token for each piece."""
    rules = ReplyRules(ReasoningUse.SPLIT, ToolUse.AUTO)
    reader = ReplyFormat(CALL_FORMATS["hermes"], thinks=True).reader(prompt, rules, "")
    assert reader is not None
    parser, found = reader.parser("chatcmpl-1/0"), []
    for index, piece in enumerate(pieces):
        reply = parser.push(piece)
        token = TokenPiece(index, piece.encode(), -0.5)
        found.append(ChoiceDelta(0, reply.text, (token,), reply.reasoning, reply.calls))
    last = parser.finish()
    return [*found, ChoiceDelta(0, last.text, (), last.reasoning, last.calls)]


def joined(parts: list[ChoiceDelta]) -> ChoiceDelta:
    whole = ChoiceDelta(0, "", ())
    for part in parts:
        whole = whole.then(part)
    return whole


FINISHED, USAGE = ChoiceFinished(0, FinishReason.STOP), Usage(1, 1)


def by_chat(parts: list[ChoiceDelta]) -> tuple[str, str, list[tuple[str, str, str]]]:
    formatter = ChatFormatter("id", "m", 0, logprobs=False)
    text, reasoning, calls = "", "", {}
    for part in (each for delta in parts for each in delta.parts()):
        chunk = formatter.piece(part)
        said = chunk["choices"][0]["delta"] if chunk else {}
        text, reasoning = text + said.get("content", ""), reasoning + said.get("reasoning_content", "")
        for call in said.get("tool_calls", []):
            known = calls.setdefault(call["index"], [call.get("id"), call["function"].get("name"), ""])
            known[2] += call["function"]["arguments"]
    return text, reasoning, [tuple(calls[index]) for index in sorted(calls)]


def chat_whole(parts: list[ChoiceDelta]) -> tuple[str, str, list[tuple[str, str, str]]]:
    whole = ChatFormatter("id", "m", 0, logprobs=False).whole([(joined(parts), FINISHED)], USAGE)
    message = whole["choices"][0]["message"]
    calls = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
    return message["content"] or "", message.get("reasoning_content", ""), calls


def by_messages(parts: list[ChoiceDelta]) -> list[dict]:
    formatter = MessageFormatter("msg_1", "m")
    events = [*(e for part in parts for e in formatter.piece(part)), *formatter.closing(FINISHED, USAGE)]
    blocks, texts = {}, {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = dict(event["content_block"])
        elif event["type"] == "content_block_delta":
            [text] = [value for name, value in event["delta"].items() if name != "type"]
            texts[event["index"]] = texts.get(event["index"], "") + text
    for index, text in texts.items():
        kind = blocks[index]["type"]
        blocks[index][{"tool_use": "input"}.get(kind, kind)] = (
            jiter.from_json(text.encode(), partial_mode=True) if kind == "tool_use" else text
        )
    return [blocks[index] for index in sorted(blocks)]


def responses(parts: list[ChoiceDelta]) -> tuple[list[dict], list[dict]]:
    """(the items that a stream completes, the items of the whole response)."""
    formatter = ResponsesFormatter({"id": "resp_1"}, lambda *_: None, logprobs=True)
    events = [*(e for part in parts for e in formatter.piece(part)), *formatter.closing(FINISHED, USAGE)]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    for item in done:
        of_item = [event["delta"] for event in events if event.get("item_id") == item["id"] and "delta" in event]
        said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(of_item) == said
    assert events[-1]["response"]["output"] == done
    whole = ResponsesFormatter({"id": "resp_1"}, lambda *_: None, logprobs=True)
    return done, whole.whole([(joined(parts), FINISHED)], USAGE)["output"]


def said(items: list[dict]) -> list[object]:
    """Items without log probabilities, which depend on the tokens: here each piece is a token."""
    return [item.get("arguments", [part["text"] for part in item.get("content", [])]) for item in items]


def check(prompt: ChatPrompt, answer: str, pieces: list[str], expected: list[ChoiceDelta]) -> None:
    parts = deltas(prompt, pieces)
    assert by_chat(parts) == chat_whole(parts) == chat_whole(expected)
    whole = MessageFormatter("msg_1", "m").whole([(joined(expected), FINISHED)], USAGE)["content"]
    assert by_messages(parts) == whole
    streamed, own_whole = responses(parts)
    assert streamed == own_whole
    assert said(streamed) == said(responses(expected)[1])


@pytest.mark.parametrize("prompt", [CHAT, STRICT], ids=["free", "strict"])
@pytest.mark.parametrize("name", ANSWERS)
def test_every_cut_adds_up_to_the_whole_answer(name, prompt):
    answer = ANSWERS[name]
    expected = deltas(prompt, [answer])
    for cut in range(len(answer) + 1):
        check(prompt, answer, [answer[:cut], answer[cut:]], expected)
    check(prompt, answer, list(answer), expected)


PIECES = st.sampled_from([ROME, ROME[:40], "<tool_call>", "</tool_call>", "a", " ", "\n", "{", '"}', "</think>"])


@given(st.lists(PIECES, max_size=8).map("".join), st.lists(st.integers(0, 300), max_size=6))
def test_any_answer_adds_up(answer, cuts):
    places = sorted(cut % (len(answer) + 1) for cut in cuts)
    pieces = [answer[a:b] for a, b in zip([0, *places], [*places, len(answer)], strict=True)]
    check(CHAT, answer, pieces, deltas(CHAT, [answer]))


def test_arguments_come_while_they_are_written():
    parts = deltas(CHAT, list(ANSWERS["calls"]))
    arguments = [call.arguments for part in parts for call in part.calls if call.arguments]
    assert max(map(len, arguments)) == 1
    assert len(arguments) == 2 * len(json.dumps({"city": "Rome é", "days": [1, 2.5]}))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.floats(-1e9, 1e9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), JSON, max_size=4), st.booleans())
def test_arguments_that_broke_off_are_the_object_that_clients_see(value, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert arguments_object(text) == value
    for cut in range(1, len(text)):
        assert arguments_object(text[:cut]) == jiter.from_json(text[:cut].encode(), partial_mode=True)
    assert arguments_object('{"a": [-1e99') == {"a": [-1e99]}
    assert arguments_object('{"a": [-1e999, 2') == {"a": [-1.7976931348623157e308, 2]}


def test_text_that_was_merged_with_a_call_comes_in_its_place():
    """A slow reader gets several outputs as one; the order of text and calls is still the model's."""
    call = (CallPiece(0, "a", "weather", "", 3), CallPiece(0, "", "", "{}"))
    merged = ChoiceDelta(0, "So.Done", (), calls=call)
    assert [block["type"] for block in by_messages([merged])] == ["text", "tool_use", "text"]
    assert list(ChoiceDelta(0, "Done", (), calls=()).in_order(3)) == ["Done"]
