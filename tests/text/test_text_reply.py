"""Answers are taken apart the same however they are cut, and what is no valid call stays text."""

from __future__ import annotations

import json
from time import process_time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.contract.errors import ConfigError, InvalidParameter
from penstock.contract.grammar import JSON_OBJECT
from penstock.contract.request import ChatPrompt, Message
from penstock.contract.tools import ReasoningUse, ReplyRules, Tool, ToolUse
from penstock.text.call_entry import Judgement
from penstock.text.call_format import CALL_FORMATS, find_call_format
from penstock.text.call_parser import CallParser, CallPart
from penstock.text.call_values import FoundCall
from penstock.text.json_scan import JsonScan, ScanState
from penstock.text.reasoning import ReasoningSplit
from penstock.text.reply import ReplyFormat, ReplyReader
from penstock.text.tool_schemas import ToolSchemas

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str = "weather", parameters: object = WEATHER, *, strict: bool = False) -> Tool:
    definition = {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}
    return Tool(name, json.dumps(definition), json.dumps(parameters), strict)


TOOLS = (tool(), tool("now", {"type": "object"}))
FREE = ToolSchemas(TOOLS)
STRICT = ToolSchemas([tool(strict=True), tool("now", {"type": "object"}, strict=True)])
BESIDE = ReplyReader(
    ReplyRules(tool_use=ToolUse.AUTO, form=JSON_OBJECT), CALL_FORMATS["json"], FREE, False, False
).judgement
PARIS = FoundCall("weather", '{"city": "Paris"}')
ROME = FoundCall("weather", '{"city":"Rome","days":2}')
ROME_WHOLE = FoundCall("weather", '{"city": "Rome", "days": 2}')
NOW = FoundCall("now", "{}")
P, R = '{"name": "weather", "arguments": {"city": "Paris"}}', '{"name":"weather","arguments":{"city":"Rome","days":2}}'
BAD = '{"name": "weather", "arguments": {"town": "Paris"}}'


def parser_of(form: str, tools: ToolSchemas = FREE, *, beside: bool = False, **options) -> CallParser:
    """A parser; with `beside`, of an answer that may have a form where it does not call."""
    free = Judgement(tools.accepts, tools.takes_any)
    return CallParser(CALL_FORMATS[form], BESIDE if beside else free, **options)


def calls_of(parts: list[CallPart]) -> list[FoundCall]:
    """The calls that parts add up to."""
    calls: list[FoundCall] = []
    for part in parts:
        if part.name:
            calls.append(FoundCall(part.name, part.arguments))
        else:
            calls[-1] = FoundCall(calls[-1].name, calls[-1].arguments + part.arguments)
    return calls


def parse(form: str, *pieces: str, tools: ToolSchemas = FREE, **options) -> tuple[str, list[FoundCall]]:
    parser = parser_of(form, tools, **options)
    results = [parser.push(piece) for piece in pieces] + [parser.finish()]
    return "".join(text for text, _ in results), calls_of([part for _, parts in results for part in parts])


def called(name: str, arguments: str) -> FoundCall:
    return FoundCall(name, arguments)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted(cut % (len(text) + 1) for cut in cuts)
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


BAR = "\uff5c"  # a wide bar, as DeepSeek's tokens have it
DS_NEXT, DS_SEP, DS_END = (f"<{BAR}tool▁{part}{BAR}>" for part in ("call▁begin", "sep", "call▁end"))
DS, DS_OVER = (f"<{BAR}tool▁calls▁{part}{BAR}>" for part in ("begin", "end"))
DS += DS_NEXT
FOR_PARIS = '{"city": "Paris"}'

# --- what each format's answers mean

WHOLE = [
    ("hermes", f"<tool_call>\n{P}\n</tool_call>", "", [PARIS]),
    ("hermes", f"So.\n<tool_call>\n{P}\n</tool_call>\n<tool_call>\n{R}\n</tool_call>\n", "So.", [PARIS, ROME]),
    ("hermes", f"<tool_call>{P}</tool_call> Done.", "Done.", [PARIS]),
    ("hermes", f"<tool_call>{P}", "", [PARIS]),
    ("hermes", f"<tool_call>[{P}, {R}]</tool_call>", "", [PARIS, ROME]),
    ("hermes", f"<tool_call>\n{BAD}\n</tool_call>", "", [called("weather", '{"town": "Paris"}')]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Par', "", [called("weather", '{"city": "Par')]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": Paris}}</tool_call>', "Paris}}</tool_call>",
     [called("weather", '{"city": ')]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}</tool_call> Done.', "Done.", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}, "id": 1}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}, "id" 1}</tool_call>', ', "id" 1}</tool_call>', [NOW]),
    ("hermes", '<tool_call>{"arguments": { }, "name": "now"}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"id": 1, "name": "now", "arguments": { }}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": { }}</tool_call>', "", [called("now", "{ }")]),
    ("hermes", f"a <tool_call> b <tool_call>{P}</tool_call>", "a <tool_call> b", [PARIS]),
    ("hermes", f"<tool_call><tool_call>{P}</tool_call>", "<tool_call>", [PARIS]),
    ("hermes", f"<tool_call>{P}</tool_cool>", "</tool_cool>", [PARIS]),
    ("hermes", f"{P}", P, []),
    ("hermes", "a < b <tool and <tool_cal", "a < b <tool and <tool_cal", []),
    ("hermes", ' \n {"x": 1} \n', ' \n {"x": 1} \n', []),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"s": "</tool_call>"}}</tool_call>', "",
     [FoundCall("now", '{"s": "</tool_call>"}')]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', '<tool_call>{"name": "now"}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "later", "arguments": {}}</tool_call>',
     '<tool_call>{"name": "later", "arguments": {}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"x": "\\ud800"}}</tool_call>', '"}}</tool_call>',
     [called("now", '{"x": "\\ud800')]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"x": 1e999}}</tool_call>', "",
     [called("now", '{"x": 1e999}')]),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    ("llama3_json", f"<|python_tag|>{P}; {R}", "", [PARIS, ROME]),
    ("llama3_json", f"{P};{R}\n", "", [PARIS, ROME]),
    ("llama3_json", '{"type": "function", "function": {"name": "now", "parameters": {}}}', "", [NOW]),
    ("llama3_json", f"Call: {P}", f"Call: {P}", []),
    ("llama3_json", '<|python_tag|>import math', "<|python_tag|>import math", []),
    ("mistral", f"[TOOL_CALLS][{P}, {R}]", "", [PARIS, ROME]),
    ("mistral", f"[TOOL_CALLS] [{P}]", "", [PARIS]),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now{}', "", [PARIS, NOW]),
    (
        "mistral",
        'So: [TOOL_CALLS]weather[CALL_ID]aB3dE6gH9[ARGS]{"city": "Paris"}[TOOL_CALLS]now[CALL_ID]x[ARGS]{}',
        "So:",
        [PARIS, NOW],
    ),
    ("mistral", "[TOOL_CALLS]now[CALL_ID][ARGS]{}", "[TOOL_CALLS]now[CALL_ID][ARGS]{}", []),
    ("mistral", "[TOOL_CALLS]now[CALL_ID]a b[ARGS]{}", "[TOOL_CALLS]now[CALL_ID]a b[ARGS]{}", []),
    ("mistral", "[TOOL_CALLS]now[CALL_ID]a[CALL_ID]b[ARGS]{}", "[TOOL_CALLS]now[CALL_ID]a[CALL_ID]b[ARGS]{}", []),
    ("mistral", "[TOOL_CALLS]now[CALL_ID]abc", "[TOOL_CALLS]now[CALL_ID]abc", []),
    ("mistral", "[TOOL_CALLS]weather[ARGS] none", "[TOOL_CALLS]weather[ARGS] none", []),
    ("mistral", f"[TOOL_CALLS][{P}, {BAD}]", "", [PARIS, called("weather", '{"town": "Paris"}')]),
    ("mistral", f'[TOOL_CALLS][{P}, {{"x": 1}}] So.', ', {"x": 1}] So.', [PARIS]),
    ("mistral", f"[TOOL_CALLS][{P}", "", [PARIS]),
    ("mistral", f"[TOOL_CALLS][{P},", "", [PARIS]),
    ("mistral", f"[TOOL_CALLS][{P} {R}]", '{"name":"weather","arguments":{"city":"Rome","days":2}}]', [PARIS]),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Par', "", [called("weather", '{"city": "Par')]),
    ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ("granite", f"<|tool_call|>[{P}, {R}]", "", [PARIS, ROME]),
    ("granite", f"I look. <|tool_call|>{P} Done", "I look.Done", [PARIS]),
    ("phi4", f"<|tool_call|>[{P}]<|/tool_call|>", "", [PARIS]),
    ("phi4", f"functools[{P}, {R}]", "", [PARIS, ROME]),
    ("phi4", "functools is a module of Python", "functools is a module of Python", []),
    ("gemma", f"```tool_code\n{P}\n```", "", [PARIS]),
    ("gemma", f"So:\n```json\n[{P}]\n```\nDone", "So:Done", [PARIS]),
    ("gemma", '```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```', []),
    ("deepseek_v31", f"So.{DS}weather{DS_SEP}{FOR_PARIS}{DS_END}{DS_OVER}", "So.", [PARIS]),
    ("deepseek_v31", f"{DS}now{DS_SEP}{{}}{DS_END}\n{DS_NEXT}weather{DS_SEP}{FOR_PARIS}{DS_END}", "", [NOW, PARIS]),
    ("deepseek_v31", f"{DS}now{DS_SEP} none", f"{DS}now{DS_SEP} none", []),
    ("deepseek_v3", f"{DS}function{DS_SEP}weather\n```json\n{FOR_PARIS}\n```{DS_END}{DS_OVER}", "", [PARIS]),
    ("json", P, "", [PARIS]),
    ("json", f" [{P}, {R}] ", "", [PARIS, ROME]),
    ("json", '{"answer": 42}', '{"answer": 42}', []),
    ("json", '{"answer": 42', '{"answer": 42', []),
    ("json", "[1] is a footnote.", "[1] is a footnote.", []),
    ("json", "{'name': 'now'}", "{'name': 'now'}", []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "answer", "text", "calls"), WHOLE)
def test_what_an_answer_means(form, answer, text, calls):
    assert parse(form, answer) == (text, calls)
    assert parse(form, *answer) == (text, calls)


def test_a_call_with_an_id_is_the_same_for_every_split_into_two():
    answer = 'So: [TOOL_CALLS]weather[CALL_ID]aB3dE6gH9[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{} Done.'
    for at in range(len(answer)):
        assert parse("mistral", answer[:at], answer[at:]) == ("So:Done.", [PARIS, NOW]), at


OF_STRICT_TOOLS = [
    ("hermes", f"<tool_call>{P}</tool_call><tool_call>{R}", "", [PARIS, ROME_WHOLE]),
    ("hermes", f"<tool_call>\n{BAD}\n</tool_call>", f"<tool_call>\n{BAD}\n</tool_call>", []),
    ("hermes", f"<tool_call>{P[:-3]}", f"<tool_call>{P[:-3]}", []),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"x": "\\ud800"}}</tool_call>',
     '<tool_call>{"name": "now", "arguments": {"x": "\\ud800"}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"x": 1e999}}</tool_call>',
     '<tool_call>{"name": "now", "arguments": {"x": 1e999}}</tool_call>', []),
    ("mistral", f"[TOOL_CALLS][{P}, {BAD}]", f", {BAD}]", [PARIS]),
    ("mistral", f"[TOOL_CALLS][{BAD}, {P}]", f"[TOOL_CALLS][{BAD}, {P}]", []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "answer", "text", "calls"), OF_STRICT_TOOLS)
def test_a_strict_tool_is_called_whole_and_by_its_schema(form, answer, text, calls):
    assert parse(form, answer, tools=STRICT) == (text, calls)
    assert parse(form, *answer, tools=STRICT) == (text, calls)


BESIDE_A_FORM = [
    (P, "", [PARIS]),
    (f" [{P}, {R}]", "", [PARIS, ROME]),
    (BAD, BAD, []),
    (f"[{BAD}, {P}]", f"[{BAD}, {P}]", []),
    (P[:-1], P[:-1], []),
    ('{"name": "Bob", "arguments": {}}', '{"name": "Bob", "arguments": {}}', []),
    ('{"name": "now", "parameters": {}}', '{"name": "now", "parameters": {}}', []),
    ('{"arguments": {}, "name": "now"}', '{"arguments": {}, "name": "now"}', []),
    ('{"function": {"name": "now", "arguments": {}}}', '{"function": {"name": "now", "arguments": {}}}', []),
    ('{"name": "now", "arguments": "{}"}', '{"name": "now", "arguments": "{}"}', []),
    ('{\n "name" : "now" , "arguments" : { } }', "", [called("now", "{ }")]),
    ('{"name": "now", "arguments": {"x": 1e999}}', "", [called("now", '{"x": 1e999}')]),
    ('{"name": "now", "arguments": {}, "id": 1}', '{"name": "now", "arguments": {}, "id": 1}', []),
    ('{"name": "now"' + " " * 600 + ', "arguments": {}}', '{"name": "now"' + " " * 600 + ', "arguments": {}}', []),
    (f'{{"city": {P}}}', f'{{"city": {P}}}', []),
    ("{}", "{}", []),
    (f"<tool_call>{P}</tool_call>", f"<tool_call>{P}</tool_call>", []),
]


@pytest.mark.parametrize(("answer", "text", "calls"), BESIDE_A_FORM)
def test_beside_a_form_an_object_is_a_call_in_the_exact_spelling_if_its_arguments_fit(answer, text, calls):
    assert parse("json", answer, beside=True) == (text, calls)
    assert parse("json", *answer, beside=True) == (text, calls)


def test_beside_a_form_text_comes_as_soon_as_it_is_no_call():
    for answer in ('{"na', '{ "name" : "w', '{"name": "weather", "arguments": {"city": 1', '[{"name": "now",'):
        assert parser_of("json", beside=True).push(answer) == ("", [])
    for answer in ('{"ni', "{1", '{"name": "Bob"', '{"name": "é', '{"name": "now", "p', '[{"x'):
        assert parser_of("json", beside=True).push(answer) == (answer, [])


# --- however it is cut

FRAGMENTS = st.sampled_from(
    [P, R, BAD, "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "weather", "now", "[ARGS]", "[ARG",
     "[", "]", ",", ";", " ", "\n", "text", "<", "<tool", "{", "}", '"', "{}", "<think>", "</think>", "</thi", "\\"]
)  # fmt: skip
ANSWERS = st.lists(FRAGMENTS | st.text(max_size=3), max_size=10).map("".join)


@settings(max_examples=300)
@given(st.sampled_from(sorted(CALL_FORMATS)), ANSWERS, st.lists(st.integers(0, 400), max_size=6), st.booleans())
@example("llama3_json", f"{P} ; ; x", [30], True)
@example("hermes", "<tool_call> \n<tool_call>", [12], True)
def test_calls_and_text_do_not_depend_on_the_cut(form, answer, cuts, parallel):
    whole = parse(form, answer, parallel=parallel)
    assert parse(form, *pieces_of(answer, cuts), parallel=parallel) == whole
    assert parse(form, *answer, parallel=parallel) == whole
    if not whole[1]:
        assert whole[0] == answer  # what is no call is text, to the last space
    for way in ({"tools": STRICT}, {"beside": True}):
        assert parse(form, *pieces_of(answer, cuts), parallel=parallel, **way) == parse(
            form, answer, parallel=parallel, **way
        )


@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral", "json"])
@pytest.mark.parametrize("tools", [FREE, STRICT], ids=["free", "strict"])
@pytest.mark.parametrize("lengths", [5, pytest.param(1, marks=pytest.mark.deep)])
def test_every_cut_into_three_gives_the_same_calls_at_the_same_places(form, tools, lengths):
    """Every place of the first cut, with every length of the second piece or every fifth."""
    opening, closing = {
        "hermes": ("So.\n<tool_call>\n", "\n</tool_call>\nDone"),
        "llama3_json": ("<|python_tag|>", "; " + R),
        "mistral": ("So. [TOOL_CALLS][", f",{R}] Done"),
        "json": ("", " Done"),
    }[form]
    answer = opening + '{"name": "weather", "arguments": {"city": "a \\"}{ é", "days": 1}}' + closing

    def read(*pieces: str) -> tuple[str, list[FoundCall], list[int]]:
        parser = parser_of(form, tools)
        results = [parser.push(piece) for piece in pieces] + [parser.finish()]
        parts = [part for _, found in results for part in found]
        return (
            "".join(text for text, _ in results),
            calls_of(parts),
            [part.text_before for part in parts if part.name],
        )

    whole = read(answer)
    assert whole[1][0].name == "weather"
    assert json.loads(whole[1][0].arguments) == {"city": 'a "}{ é', "days": 1}
    for first in range(len(answer) + 1):
        for second in range(first, len(answer) + 1, lengths):
            assert read(answer[:first], answer[first:second], answer[second:]) == whole


@settings(max_examples=300)
@given(st.sampled_from(sorted(CALL_FORMATS)), ANSWERS, st.booleans())
def test_arguments_are_always_the_beginning_of_an_object(form, answer, parallel):
    for call in parse(form, answer, parallel=parallel)[1]:
        scan = JsonScan()
        assert scan.take(call.arguments, 0) == len(call.arguments)
        assert scan.state is not ScanState.BROKEN


@settings(max_examples=200)
@given(ANSWERS, st.lists(st.integers(0, 400), max_size=6), st.booleans())
def test_reasoning_does_not_depend_on_the_cut(answer, cuts, opened):
    def split(*pieces: str) -> tuple[str, str, int, bool]:
        parser = ReasoningSplit(opened=opened)
        results = [parser.push(piece) for piece in pieces] + [parser.finish()]
        return "".join(r for r, _ in results), "".join(t for _, t in results), parser.end, parser.over

    assert split(*pieces_of(answer, cuts))[:2] == split(answer)[:2] == split(*answer)[:2]
    if not opened and not answer.lstrip().startswith("<think>"):
        assert split(answer)[:2] == ("", answer)


@pytest.mark.parametrize(
    ("answer", "opened", "reasoning", "text"),
    [
        ("<think>\nhm\n</think>\n\nYes.", False, "hm", "Yes."),
        ("\nhm\n\nso\n</think>\n\nYes.\n", True, "hm\n\nso", "Yes.\n"),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("Yes.</think> no", False, "", "Yes.</think> no"),
        ("still thinking </thi", True, "still thinking </thi", ""),
        ("  plain", False, "", "  plain"),
        ("a</think>b</think>c", True, "a", "b</think>c"),
    ],
)
def test_what_is_reasoning(answer, opened, reasoning, text):
    parser = ReasoningSplit(opened=opened)
    first, last = parser.push(answer), parser.finish()
    assert (first[0] + last[0], first[1] + last[1]) == (reasoning, text)


# --- holding back


def test_no_more_is_held_back_than_may_still_be_a_call():
    parser = parser_of("hermes")
    assert parser.push("It is <b>")[0] == "It is <b>"
    assert parser.push(" so <tool_c")[0] == " so"
    assert parser.push("ool>")[0] == " <tool_cool>"
    assert parser.push('<tool_call>{"name": ')[0] == ""
    assert parser.push("'x'}")[0] == "<tool_call>{\"name\": 'x'}"
    strict = parser_of("hermes", STRICT)
    assert strict.push(f"<tool_call>{P[:-1]}") == ("", [])
    assert calls_of(strict.push("}")[1]) == [PARIS]


def test_arguments_go_on_as_they_are_written():
    parser = parser_of("hermes")
    assert parser.push('Well. <tool_call>{"name": "weather", "arguments": ') == ("Well.", [])
    assert parser.push("{") == ("", [CallPart("weather", "", 5), CallPart("", "{")])
    assert parser.push('"city": "Par') == ("", [CallPart("", '"city": "Par')])
    assert parser.push('is"}') == ("", [CallPart("", 'is"}')])
    assert parser.push("}</tool_call>") == ("", [])
    assert parser.finish() == ("", [])


def test_a_named_tools_arguments_go_on_from_their_first_character():
    parser = parser_of("json", arguments_of="weather")
    assert parser.push("{") == ("", [CallPart("weather", ""), CallPart("", "{")])
    assert parser.push('"city"') == ("", [CallPart("", '"city"')])


def test_an_answer_that_is_json_but_no_call_comes_as_soon_as_that_is_clear():
    parser = parser_of("json")
    assert parser.push('{"answer": 42') == ("", [])
    assert parser.push("}") == ('{"answer": 42}', [])
    assert parser.push(f" {P}") == (f" {P}", [])


def test_the_only_call_that_is_wanted_ends_the_answer():
    for form, answer in (("hermes", f"<tool_call>{P}</tool_call><tool_call>{R}</tool_call> and"), ("json", f"[{P},")):
        parser = parser_of(form, parallel=False)
        text, parts = parser.push(answer)
        assert (text, calls_of(parts)) == ("", [PARIS])
        assert parser.ended
        assert parser.finish() == ("", [])


def test_a_named_tools_answer_is_its_arguments():
    assert parse("json", '{"city": "Paris"}', arguments_of="weather") == ("", [PARIS])
    assert parse("json", '{"town": "Paris"}', arguments_of="weather")[1] == [called("weather", '{"town": "Paris"}')]
    strict = parse("json", '{"town": "Paris"}', arguments_of="weather", tools=STRICT)
    assert strict == ('{"town": "Paris"}', [])
    assert parse("json", "[{}]", arguments_of="weather") == ("[{}]", [])


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "unit",
    ['<tool_call>{"', ";", " ", "[TOOL_CALLS]a[ARGS]", "[", '{"a":', f"<tool_call>{P}</tool_call>", P + ";", "\n<"],
)
def test_time_grows_with_the_length_alone(unit):
    """Ten times the text takes about ten times as long; a quadratic parser would take a hundred times."""

    def seconds(count: int, form: str, whole: bool) -> float:
        text = unit * count
        began = process_time()
        parse(form, *([text] if whole else text))
        parser = ReasoningSplit(opened=True)
        for piece in [text] if whole else text:
            parser.push(piece)
        return process_time() - began

    for form in CALL_FORMATS:
        for whole in (True, False):
            size = max(1, 600 // len(unit))
            small = min(seconds(size, form, whole) for _ in range(3))
            assert _at_most(40 * small + 0.05, lambda: seconds(size * 8, form, whole)), (form, whole)  # noqa: B023


def _at_most(limit: float, measure) -> bool:
    """Whether one of a few measurements keeps the limit: a busy machine spoils some, a quadratic parser all."""
    return any(measure() < limit for _ in range(5))


# --- rules of a request


def reader(use: ToolUse = ToolUse.AUTO, reasoning=ReasoningUse.SPLIT, *, thinks: bool = True, form="hermes", **rest):
    rendered, prompt = rest.pop("rendered", ""), rest.pop("prompt", ChatPrompt((Message("user", "x"),), tools=TOOLS))
    format_ = ReplyFormat(CALL_FORMATS[form], thinks)
    return format_.reader(prompt, ReplyRules(reasoning, use, **rest), rendered)


def read(parser, text: str):
    first, last = parser.push(text), parser.finish()
    return first.reasoning + last.reasoning, first.text + last.text, first.calls + last.calls


ANSWER = f"<think>a <tool_call>{R}</tool_call></think>\n\nWell.\n<tool_call>{P}</tool_call>"


def test_a_call_that_is_only_thought_of_is_none():
    reasoning, text, calls = read(reader().parser("ask/0"), ANSWER)
    assert (reasoning, text) == (f"a <tool_call>{R}</tool_call>", "Well.")
    assert [(piece.index, piece.name, piece.arguments) for piece in calls] == [
        (0, "weather", ""),
        (0, "", PARIS.arguments),
    ]
    assert calls[0].id.startswith("call_")
    assert calls[1].id == ""


def test_hidden_reasoning_is_left_out_and_nothing_else():
    assert read(reader(reasoning=ReasoningUse.HIDDEN).parser("ask/0"), ANSWER)[:2] == ("", "Well.")


def test_without_rules_an_answer_is_plain_text():
    assert reader(ToolUse.NONE, ReasoningUse.INLINE) is None
    assert reader(ToolUse.NONE, thinks=False) is None
    no_tools = ChatPrompt((Message("user", "x"),))
    assert reader(thinks=False, prompt=no_tools) is None


def test_ids_are_the_same_again_and_never_shared():
    def ids(seq_id: str, form: str = "hermes") -> list[str]:
        text = f"<tool_call>{P}</tool_call><tool_call>{R}</tool_call>" if form == "hermes" else f"[TOOL_CALLS][{P},{R}]"
        return [piece.id for piece in read(reader(form=form).parser(seq_id), text)[2] if piece.id]

    assert ids("a/0") == ids("a/0")
    assert len({*ids("a/0"), *ids("a/1"), *ids("b/0")}) == 6
    assert all(len(each) == 9 and each.isalnum() and each.isascii() for each in ids("a/0", "mistral"))


def test_reasoning_that_the_prompt_opens_is_reasoning_from_the_first_character():
    chat = ChatPrompt((Message("user", "<think>"),))
    assert reader(prompt=chat, rendered="<user>x<assistant><think>\n").opened
    assert not reader(prompt=chat, rendered="<user><think></user><assistant>").opened
    silent = ChatPrompt((Message("user", "<think>"),), add_generation_prompt=False)
    assert not reader(prompt=silent, rendered="<user><think>").opened
    for content, opened in [("<think>hm", True), ("<think>hm</think>So", False), ("So", False)]:
        going_on = ChatPrompt((Message("assistant", content),), continue_final_message=True)
        assert reader(prompt=going_on, rendered=content).opened is opened


@pytest.mark.parametrize(
    ("source", "name"),
    [
        *(
            ("... <tool_call> ...", "hermes"),
            ("[TOOL_CALLS]", "mistral"),
            ("<|python_tag|>", "llama3_json"),
            ("", "json"),
        ),
        *(("<tool_call><function=a><parameter=b>", "qwen3_xml"), ("<|channel|>", "harmony"), ("<|tool|>", "phi4")),
        ("<|tool_call>call:", "gemma4"),
        *(("respond with <|tool_call|>", "granite"), ("<start_of_turn>user", "gemma")),
        *((DS_NEXT, "deepseek_v31"), (f"{DS_NEXT}function ```json", "deepseek_v3")),
    ],
)
def test_the_format_is_read_from_the_template(source, name):
    assert find_call_format("auto", source).name == name
    assert find_call_format("json", source).name == "json"
    assert find_call_format("none", source) is None
    with pytest.raises(ConfigError, match="tool_call_parser"):
        find_call_format("yaml", source)


def test_tools_are_refused_where_the_operator_wants_none():
    with pytest.raises(InvalidParameter, match="tools"):
        ReplyFormat(None).reader(ChatPrompt((), tools=TOOLS), ReplyRules(tool_use=ToolUse.AUTO), "")


# --- schemas

REFERRING = {"$defs": {"city": {"type": "string"}}, "properties": {"c": {"$ref": "#/$defs/city"}, "t": {"$ref": "#"}}}


def accepts(schema: object, arguments: dict) -> bool:
    return ToolSchemas([tool("f", schema, strict=True)]).accepts("f", arguments)


def test_arguments_are_checked_against_the_schema():
    assert accepts(WEATHER, {"city": "Paris", "days": 1})
    assert FREE.accepts("weather", {})
    assert not FREE.accepts("later", {})
    for wrong in ({}, {"city": 1}, {"city": "P", "days": 0}, {"city": "P", "x": 1}):
        assert not accepts(WEATHER, wrong)
    assert accepts(REFERRING, {"c": "x", "t": {"t": {"c": "y"}}})
    assert not accepts(REFERRING, {"t": {"t": {"c": 1}}})
    assert not ToolSchemas([]).accepts("f", {})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "dragon"},
        {"$ref": "http://127.0.0.1:1/schema"},
        {"$ref": "#/$defs/none"},
        {"$ref": 3},
        {"$dynamicRef": "#x"},
        {"$id": "urn:x"},
        {"$schema": "urn:x"},
        {"properties": {"a": {"pattern": "(?=a)"}}},
        {"properties": {"a": {"pattern": "(a{1000}){1000}"}}},
        {"properties": {f"p{i}": {} for i in range(2_001)}},
        {"properties": {f"p{i}": {"pattern": "a"} for i in range(201)}},
        {"patternProperties": {f"p{i}": True for i in range(201)}},
    ],
)
def test_a_schema_that_cannot_be_checked_is_refused_by_name(schema):
    with pytest.raises(InvalidParameter) as caught:
        ToolSchemas([tool("ok"), tool("f", schema)])
    assert caught.value.param == "tools.1.function.parameters"


KEYWORDS = st.sampled_from(
    [
        "$ref",
        "$defs",
        "type",
        "properties",
        "items",
        "prefixItems",
        "allOf",
        "anyOf",
        "not",
        "if",
        "then",
        "enum",
        "const",
        "x",
        "pattern",
        "patternProperties",
        "additionalProperties",
        "propertyNames",
        "required",
        "dependentSchemas",
        "contains",
    ]
)
WORDS = st.sampled_from(["#", "#/properties/x", "#/$defs/x", "#/allOf/0", "object", "string", "x", "("])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS, inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(KEYWORDS, JSON, max_size=4)


@settings(max_examples=300)
@given(OBJECTS, OBJECTS)
@example({"patternProperties": 1}, {})
@example({"allOf": [{"$ref": "#"}]}, {})
def test_any_json_is_a_schema_or_is_refused_by_name(schema, arguments):
    try:
        assert accepts(schema, arguments) in (True, False)
    except InvalidParameter as error:
        named = error.param
    else:
        named = "tools.0.function.parameters"
    assert named == "tools.0.function.parameters"


def doubled(depth: int) -> dict:
    """A valid schema that takes 2^depth visits in a checker that shares nothing."""
    steps = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    return {"$defs": {**steps, f"d{depth}": {"type": "object"}}, "$ref": "#/$defs/d0"}


def nested(depth: int) -> dict:
    value: dict = {}
    for _ in range(depth):
        value = {"x": value}
    return value


BRANCHING = {"properties": {"x": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}}}
CHAIN = {
    "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1_800)} | {"d1800": {}},
    "$ref": "#/$defs/d0",
}


@pytest.mark.parametrize(
    ("schema", "arguments"), [(doubled(60), {}), (BRANCHING, nested(60)), (CHAIN, {})], ids=["defs", "depth", "chain"]
)
def test_a_check_that_cannot_be_borne_is_not_made(schema, arguments):
    began = process_time()
    assert not accepts(schema, arguments)
    assert process_time() - began < 1


def test_schemas_that_are_merely_recursive_are_checked():
    assert accepts(doubled(6), {})
    assert accepts(BRANCHING, nested(10))
    assert accepts({"$ref": "#"}, {})
    assert accepts(
        {"uniqueItems": True, "properties": {"a": {"items": {"type": "integer"}}}}, {"a": list(range(5_000))}
    )
