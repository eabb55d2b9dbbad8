"""Calls in Gemma 4's notation: JSON in the end, and the same however they are cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_text_reply import calls_of, tool

from penstock.contract.request import ChatPrompt, Message
from penstock.text.call_entry import Judgement
from penstock.text.call_values import FoundCall
from penstock.text.chat_template import ChatTemplate
from penstock.text.control_tokens import ControlTokens
from penstock.text.gemma_call_parser import GemmaCallParser
from penstock.text.reasoning import GEMMA4_TAGS, ReasoningSplit
from penstock.text.reply import find_reply_format, opens_reasoning
from penstock.text.tool_schemas import ToolSchemas

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
FREE = ToolSchemas((tool("weather", SCHEMA), tool("now", {"type": "object"})))
STRICT = ToolSchemas([tool("weather", SCHEMA, strict=True), tool("now", {"type": "object"}, strict=True)])


def noted(value) -> str:
    """A value as the model's chat template writes it (`format_argument`), keys without quotes."""
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return "{" + ",".join(f"{key}:{noted(each)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ",".join(map(noted, value)) + "]"
    return json.dumps(value)


def written(name: str, **values) -> str:
    return f"<|tool_call>call:{name}{noted(values)}<tool_call|>"


def parse(*pieces: str, tools=FREE, **options) -> tuple[str, list[FoundCall]]:
    parser = GemmaCallParser(Judgement(tools.accepts, tools.takes_any), tools.knows, **options)
    results = [parser.push(piece) for piece in pieces] + [parser.finish()]
    return "".join(text for text, _ in results), calls_of([part for _, parts in results for part in parts])


PARIS = written("weather", city="Paris", days=2)
PARIS_CALL = FoundCall("weather", '{"city": "Paris", "days": 2}')
NOW_CALL = FoundCall("now", "{}")

WHOLE = [
    (PARIS, "", [PARIS_CALL]),
    (f"So.\n\n{PARIS}\n{written('now')}\nDone.", "So.Done.", [PARIS_CALL, NOW_CALL]),
    ('<|tool_call> call:weather{ city : <|"|>Paris<|"|> , days: 2 }', "", [PARIS_CALL]),
    ('<|tool_call>call:now{<|"|>a b<|"|>:[],c:{d:[1,[{}]]}}', "",
     [FoundCall("now", '{"a b": [], "c": {"d": [1, [{}]]}}')]),
    ("<|tool_call>call:now{a:NaN,b:null,c:x y,d:-1.5e3}", "",
     [FoundCall("now", '{"a": "NaN", "b": null, "c": "x y", "d": -1500.0}')]),
    (written("now", a='"\n\\ é {,}'), "", [FoundCall("now", '{"a": "\\"\\n\\\\ é {,}"}')]),
    (PARIS.partition("is<")[0], "", [FoundCall("weather", '{"city": "Par')]),
    (f"{PARIS.removesuffix('<tool_call|>')}text", "text", [PARIS_CALL]),
    ("<|tool_call>call:now{a:1]", "]", [FoundCall("now", '{"a": 1')]),
    (written("later", a="b"), written("later", a="b"), []),
    ("<|tool_call>\ncal", "<|tool_call>\ncal", []),
    ("<|tool_call>call:now", "<|tool_call>call:now", []),
    ('<|tool_call>{"name": "now"}<tool_call|>', '<|tool_call>{"name": "now"}<tool_call|>', []),
    ("a <| b <|tool_ c", "a <| b <|tool_ c", []),
    (" \n x \n", " \n x \n", []),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "text", "calls"), WHOLE)
def test_what_an_answer_means(answer, text, calls):
    assert parse(answer) == (text, calls)
    assert parse(*answer) == (text, calls)


@pytest.mark.parametrize(("answer", "text", "calls"), WHOLE)
def test_every_cut_in_two_means_the_same(answer, text, calls):
    for at in range(len(answer) + 1):
        assert parse(answer[:at], answer[at:]) == (text, calls), at


def test_strict_tools_are_called_whole_and_only_if_arguments_fit():
    parser = GemmaCallParser(Judgement(STRICT.accepts, STRICT.takes_any), STRICT.knows)
    assert parser.push(PARIS[:-20]) == ("", [])
    assert parse(PARIS, tools=STRICT) == ("", [PARIS_CALL])
    wrong = written("weather", days=2)
    for pieces in ([wrong], list(wrong)):
        assert parse("So. ", *pieces, tools=STRICT) == (f"So. {wrong}", [])


def test_arguments_stream_as_they_are_written_and_one_call_is_enough_where_one_is_wanted():
    parser = GemmaCallParser(Judgement(FREE.accepts, FREE.takes_any), FREE.knows, parallel=False)
    assert [part.name for part in parser.push("<|tool_call>call:weather{")[1]] == ["weather"]
    assert [part.arguments for part in parser.push('city:<|"|>Par')[1]] == ['{"city": "Par']
    assert not parser.ended
    assert [part.arguments for part in parser.push('is<|"|>}<tool_call|>')[1]] == ['is"}']
    assert parser.ended


KEYS = st.text("abc_", min_size=1, max_size=3)
STRINGS = st.text('ab,:{}[]<|" \n', max_size=6).filter(lambda text: '<|"|>' not in text)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200)
@given(values=st.dictionaries(KEYS, VALUES, max_size=3), cuts=st.lists(st.integers(0, 200), max_size=6))
def test_any_arguments_come_back_however_they_are_cut(values, cuts):
    answer = f"Well. {written('now', **values)} Then."
    places = sorted({min(cut, len(answer)) for cut in cuts} | {0, len(answer)})
    text, calls = parse(*(answer[begin:end] for begin, end in pairwise(places)))
    assert text == "Well.Then."
    assert [json.loads(call.arguments) for call in calls] == [values]


THOUGHT = "<|channel>thought\nI look it up.\n<channel|>"
CALLED = '<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>'
TEMPLATE = "{{ '<|turn>model\\n' }}{% if not enable_thinking %}{{ '<|channel>thought\n<channel|>' }}{% endif %}"


@pytest.mark.parametrize(
    ("answer", "opened", "reasoning", "said"),
    [
        (f"{THOUGHT}It rains.", False, "I look it up.", "It rains."),
        (f"{THOUGHT}{CALLED}", False, "I look it up.", CALLED),
        (THOUGHT.removeprefix("<|channel>thought"), True, "I look it up.", ""),
        ("<|channel>thought\n<channel|>It rains.", False, "", "It rains."),
        ("<|channel>think I", False, "", "<|channel>think I"),
        ("<|channel>thought\nI <channel", False, "I <channel", ""),
        ("It rains.", False, "", "It rains."),
    ],
)
def test_reasoning_is_split_off_for_every_split_of_the_text(answer, opened, reasoning, said):
    cuts = [(answer,), tuple(answer), *((answer[:at], answer[at:]) for at in range(1, len(answer)))]
    for pieces in cuts:
        split = ReasoningSplit(opened=opened, tags=GEMMA4_TAGS)
        parts = [*map(split.push, pieces), split.finish()]
        assert ("".join(first for first, _ in parts), "".join(last for _, last in parts)) == (reasoning, said), pieces


def test_the_template_shows_that_the_model_thinks_and_whether_the_prompt_has_begun_it():
    found = find_reply_format(
        "auto", "auto", ChatTemplate(TEMPLATE, file="t", special_tokens={}, control_tokens=ControlTokens(()))
    )
    assert (found.thinks, found.tags, found.channels) == (True, GEMMA4_TAGS, False)
    assert found.tags.markers == ("<|channel>", "<channel|>"), "control tokens, which must be seen as text"
    prompt = ChatPrompt((Message("user", "?"),))
    for rendered, opened in (
        ("<|turn>model\n", False),
        ("<|turn>model\n<|channel>thought\n", True),
        ("<|turn>model\n<|channel>thought\n<channel|>", False),
    ):
        assert opens_reasoning(prompt, rendered, found.tags) is opened
