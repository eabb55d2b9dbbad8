"""Calls whose arguments are tagged one by one, as Qwen3-Coder writes them: the same however they are cut."""

from __future__ import annotations

import json
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_text_reply import calls_of, pieces_of, read, tool

from penstock.contract.request import ChatPrompt, Message
from penstock.contract.tools import ReplyRules, ToolUse
from penstock.text.call_entry import Judgement
from penstock.text.call_format import XML, find_call_format
from penstock.text.call_values import FoundCall
from penstock.text.json_scan import JsonScan, ScanState
from penstock.text.reply import ReplyFormat
from penstock.text.tool_schemas import ToolSchemas
from penstock.text.xml_call_parser import XmlCallParser

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}},
    "required": ["city"],
}
TOOLS = (tool("weather", SCHEMA), tool("now", {"type": "object"}))
FREE = ToolSchemas(TOOLS)
STRICT = ToolSchemas([tool("weather", SCHEMA, strict=True), tool("now", {"type": "object"}, strict=True)])


def written(name: str, **values: str) -> str:
    """A call as the model's chat template writes it."""
    said = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{said}</function>\n</tool_call>"


PARIS = written("weather", city="Paris", days="2")
PARIS_CALL = FoundCall("weather", '{"city": "Paris", "days": 2}')
NOW, NOW_CALL = written("now"), FoundCall("now", "{}")


def parser_of(tools=FREE, **options) -> XmlCallParser:
    return XmlCallParser(Judgement(tools.accepts, tools.takes_any), tools.takes_text, tools.knows, **options)


def parse(*pieces: str, tools=FREE, **options) -> tuple[str, list[FoundCall]]:
    parser = parser_of(tools, **options)
    results = [parser.push(piece) for piece in pieces] + [parser.finish()]
    return "".join(text for text, _ in results), calls_of([part for _, parts in results for part in parts])


WHOLE = [
    (PARIS, "", [PARIS_CALL]),
    (f"So.\n\n{PARIS}\n{NOW}\nDone.", "So.Done.", [PARIS_CALL, NOW_CALL]),
    (f"So.{PARIS.removeprefix('<tool_call>').removesuffix('</tool_call>')}Done.", "So.Done.", [PARIS_CALL]),
    (written("weather", city="007", days="two"), "", [FoundCall("weather", '{"city": "007", "days": "two"}')]),
    (written("weather", city='a "b"\n\\ é', tags='["x", 1]'), "",
     [FoundCall("weather", '{"city": "a \\"b\\"\\n\\\\ é", "tags": ["x", 1]}')]),
    (written("weather", city=""), "", [FoundCall("weather", '{"city": ""}')]),
    (written("now", at="NaN", no="null", by="{"), "", [FoundCall("now", '{"at": "NaN", "no": null, "by": "{"}')]),
    ("<tool_call><function=weather><parameter=city>Paris</parameter></function></tool_call>", "",
     [FoundCall("weather", '{"city": "Paris"}')]),
    (PARIS.partition("is\n")[0], "", [FoundCall("weather", '{"city": "Par')]),
    (PARIS.partition("2\n")[0], "", [FoundCall("weather", '{"city": "Paris"')]),
    (PARIS.replace("</function>", "text"), "text\n</tool_call>", [FoundCall("weather", '{"city": "Paris", "days": 2')]),
    (written("later", a="b"), written("later", a="b"), []),
    ("<tool_call>\n<functio", "<tool_call>\n<functio", []),
    ("a < b <tool and <function", "a < b <tool and <function", []),
    ('<tool_call>{"name": "now"}</tool_call>', '<tool_call>{"name": "now"}</tool_call>', []),
    (" \n x \n", " \n x \n", []),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "text", "calls"), WHOLE)
def test_what_an_answer_means(answer, text, calls):
    assert parse(answer) == (text, calls)
    assert parse(*answer) == (text, calls)


def test_a_strict_tool_is_called_whole_and_by_its_schema():
    assert parse(PARIS, tools=STRICT) == ("", [PARIS_CALL])
    for wrong in (written("weather", days="2"), written("weather", city="Paris", days="two"), PARIS[:-30]):
        assert parse(wrong, tools=STRICT) == (wrong, [])
        assert parse(*wrong, tools=STRICT) == (wrong, [])


FRAGMENTS = st.sampled_from(
    [PARIS, NOW, "<tool_call>", "</tool_call>", "<function=", "<function=weather>", "</function>", "<parameter=city>",
     "<parameter=days>", "<parameter=", "</parameter>", "now", ">", "<", "</", "2", "[1]", " ", "\n", '"', "text", "\\"]
)  # fmt: skip
ANSWERS = st.lists(FRAGMENTS | st.text(max_size=3), max_size=10).map("".join)


@settings(max_examples=400)
@given(ANSWERS, st.lists(st.integers(0, 400), max_size=6), st.booleans())
def test_calls_and_text_do_not_depend_on_the_cut(answer, cuts, parallel):
    for tools in (FREE, STRICT):
        whole = parse(answer, tools=tools, parallel=parallel)
        assert parse(*pieces_of(answer, cuts), tools=tools, parallel=parallel) == whole
        assert parse(*answer, tools=tools, parallel=parallel) == whole
        if not whole[1]:
            assert whole[0] == answer
        for call in whole[1]:
            scan = JsonScan()
            assert scan.take(call.arguments, 0) == len(call.arguments)
            assert scan.state is not ScanState.BROKEN


@pytest.mark.parametrize("tools", [FREE, STRICT], ids=["free", "strict"])
def test_every_cut_into_three_gives_the_same_calls_at_the_same_places(tools):
    answer = "So.\n" + written("weather", city='a "\n</param é', days="1") + "\nDone"

    def told(*pieces: str):
        parser = parser_of(tools)
        results = [parser.push(piece) for piece in pieces] + [parser.finish()]
        parts = [part for _, found in results for part in found]
        places = [part.text_before for part in parts if part.name]
        return "".join(text for text, _ in results), calls_of(parts), places

    whole = told(answer)
    assert json.loads(whole[1][0].arguments) == {"city": 'a "\n</param é', "days": 1}
    assert whole[2] == [3]
    for first in range(len(answer) + 1):
        for second in range(first, len(answer) + 1):
            assert told(answer[:first], answer[first:second], answer[second:]) == whole


def test_strings_go_on_as_they_are_written():
    parser = parser_of()
    assert parser.push("<tool_call>\n<function=weather>")[1][0].name == "weather"
    assert calls_like(parser.push("\n<parameter=city>\nPar")) == '"city": "Par'
    assert calls_like(parser.push("is\n</param")) == "is"
    assert calls_like(parser.push("eter>\n</function>")) == '"}'


def calls_like(result) -> str:
    return "".join(part.arguments for part in result[1])


def test_the_only_call_that_is_wanted_ends_the_answer():
    for tools in (FREE, STRICT):
        parser = parser_of(tools, parallel=False)
        text, parts = parser.push(PARIS + NOW + " and")
        assert (text, calls_of(parts)) == ("", [PARIS_CALL])
        assert parser.ended
        assert parser.finish() == ("", [])


@pytest.mark.parametrize("unit", ["<tool_call>", "<function=weather>", "<parameter=city>", "\n<", " ", PARIS, "x"])
def test_time_grows_with_the_length_alone(unit):
    def seconds(count: int, whole: bool) -> float:
        text, began = "<function=weather><parameter=city>" + unit * count, process_time()
        parse(*([text] if whole else text))
        return process_time() - began

    for whole in (True, False):
        size = max(1, 1_200 // len(unit))
        small = min(seconds(size, whole) for _ in range(3))
        assert any(seconds(size * 8, whole) < 40 * small + 0.05 for _ in range(5)), whole


def test_a_request_is_answered_in_this_format():
    prompt = ChatPrompt((Message("user", "x"),), tools=TOOLS)
    reader = ReplyFormat(XML, thinks=True).reader(prompt, ReplyRules(tool_use=ToolUse.AUTO), "")
    reasoning, text, calls = read(reader.parser("ask/0"), f"Hm. {PARIS}")
    assert (reasoning, text) == ("", "Hm.")
    assert [(call.name, call.arguments) for call in calls] == [("weather", ""), ("", PARIS_CALL.arguments)]
    required = ReplyFormat(XML).reader(prompt, ReplyRules(tool_use=ToolUse.REQUIRED), "").parser("ask/0")
    assert read(required, '{"name": "now", "arguments": {}}')[2][0].name == "now"
    assert find_call_format("auto", "<tool_call>\n<function=a>\n<parameter=b>") is XML
