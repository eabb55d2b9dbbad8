"""Answers in channels, as gpt-oss writes them: the same parts however they are cut, and its conversations."""

from __future__ import annotations

import json
from dataclasses import replace
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_text_reply import FREE, NOW, PARIS, STRICT, TOOLS, calls_of, pieces_of, read
from test_text_tool_templates import ASK, DEFINITION, RESULT, TOOL, template
from text_vocabularies import NAMES, save
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.contract.errors import InvalidParameter
from penstock.contract.request import ChatPrompt, Message, TextPrompt
from penstock.contract.tools import ReasoningUse, ReplyRules, ToolCall, ToolUse
from penstock.text import ReasoningBudgets, ReplyFormat, open_text
from penstock.text.call_entry import Judgement
from penstock.text.call_format import HARMONY
from penstock.text.call_values import FoundCall
from penstock.text.channels import CHANNEL_TAGS, ChannelParser
from penstock.text.json_scan import JsonScan, ScanState
from penstock.text.reply import find_reply_format

START = "<|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>The user asks.<|end|>"
FINAL = "<|channel|>final<|message|>It rains."
TO_WEATHER = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
PARIS_ARGUMENTS = '{"city": "Paris"}'


def parse(*pieces: str, tools=FREE, **options) -> tuple[str, str, list[FoundCall]]:
    parser = ChannelParser(Judgement(tools.accepts, tools.takes_any), **options)
    results = [parser.push(piece) for piece in pieces] + [parser.finish()]
    parts = [part for _, _, found in results for part in found]
    return "".join(r for r, _, _ in results), "".join(t for _, t, _ in results), calls_of(parts)


WHOLE = [
    (f"{THOUGHT}{START}{FINAL}<|return|>", "The user asks.", "It rains.", []),
    (f"{THOUGHT}{START}{TO_WEATHER}{PARIS_ARGUMENTS}<|call|>", "The user asks.", "", [PARIS]),
    (f"{TO_WEATHER}{PARIS_ARGUMENTS}", "", "", [PARIS]),
    (f" to=functions.weather<|channel|>commentary json<|message|>{PARIS_ARGUMENTS}<|call|>", "", "", [PARIS]),
    (f"{START} to=functions.now<|channel|>commentary<|message|>{{}}<|call|>", "", "", [NOW]),
    (f"<|channel|>commentary<|message|>I look.<|end|>{START}{TO_WEATHER}\n{PARIS_ARGUMENTS}\n<|call|>", "", "I look.",
     [PARIS]),
    (f"{TO_WEATHER}{PARIS_ARGUMENTS}<|call|>{START}<|channel|>commentary to=now<|message|>{{}}<|call|>", "", "",
     [PARIS, NOW]),
    (f"{TO_WEATHER}{{\"city\": \"Par", "", "", [FoundCall("weather", '{"city": "Par')]),
    (f"{TO_WEATHER}{{\"city\": Paris}}<|call|>", "", "Paris}", [FoundCall("weather", '{"city": ')]),
    (f"<|channel|>commentary to=functions.later<|message|>{PARIS_ARGUMENTS}<|call|>", "",
     f"<|channel|>commentary to=functions.later<|message|>{PARIS_ARGUMENTS}", []),
    (f"{TO_WEATHER}none<|call|>", "", f"{TO_WEATHER}none", []),
    (f"{THOUGHT}{START}<|channel|>analysis<|message|>Still.<|end|>{START}{FINAL}", "The user asks.\n\nStill.",
     "It rains.", []),
    ("<|channel|>analysis<|message|>The user", "The user", "", []),
    (f"<|channel|>analysis<|message|>Hm.{START}{FINAL}", "Hm.", "It rains.", []),
    ("<|channel|>final<|message|>1 <|e", "", "1 <|e", []),
    ('{"a": 1}', "", '{"a": 1}', []),
    ("It rains.<|return|>", "", "It rains.", []),
    ("<|channel|>fin", "", "", []),
    ("<|chan", "", "<|chan", []),
    (f"{START}{START}{FINAL}", "", f"{START}\n\nIt rains.", []),
    ("<|start|>" + "x" * 600, "", "<|start|>" + "x" * 600, []),
    ("", "", "", []),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "reasoning", "text", "calls"), WHOLE)
def test_what_an_answer_means(answer, reasoning, text, calls):
    assert parse(answer) == (reasoning, text, calls)
    assert parse(*answer) == (reasoning, text, calls)


def test_a_strict_tool_is_called_whole_and_by_its_schema():
    wrong = f'{TO_WEATHER}{{"town": "Paris"}}<|call|>'
    assert parse(wrong, tools=STRICT) == ("", wrong.removesuffix("<|call|>"), [])
    broken = f'{TO_WEATHER}{{"city": "Par'
    for answer in (wrong, broken):
        assert parse(*answer, tools=STRICT) == parse(answer, tools=STRICT)
    assert parse(f"{TO_WEATHER}{PARIS_ARGUMENTS}<|call|>", tools=STRICT) == ("", "", [PARIS])
    assert parse(broken, tools=STRICT) == ("", broken, [])


FRAGMENTS = st.sampled_from(
    [THOUGHT, START, FINAL, TO_WEATHER, PARIS_ARGUMENTS, *CHANNEL_TAGS, "analysis", "final", " to=functions.now", "{}",
     "{", '"', "}", " ", "\n", "text", "<|", "<|end", "|>", "\\"]
)  # fmt: skip
ANSWERS = st.lists(FRAGMENTS | st.text(max_size=3), max_size=10).map("".join)


def test_blank_space_in_front_of_a_body_makes_no_call():
    answer = (TO_WEATHER, " \n", "After all no call.")
    assert parse(*answer) == parse("".join(answer))
    assert parse(*answer)[2] == []


@settings(max_examples=300)
@given(ANSWERS, st.lists(st.integers(0, 400), max_size=6), st.booleans(), st.booleans())
def test_parts_do_not_depend_on_the_cut(answer, cuts, parallel, splits):
    for tools in (FREE, STRICT):
        whole = parse(answer, tools=tools, parallel=parallel, splits=splits)
        assert parse(*pieces_of(answer, cuts), tools=tools, parallel=parallel, splits=splits) == whole
        assert parse(*answer, tools=tools, parallel=parallel, splits=splits) == whole
        for call in whole[2]:
            scan = JsonScan()
            assert scan.take(call.arguments, 0) == len(call.arguments)
            assert scan.state is not ScanState.BROKEN
        assert splits or not whole[0]


@pytest.mark.parametrize("tools", [FREE, STRICT], ids=["free", "strict"])
@pytest.mark.parametrize("lengths", [5, pytest.param(1, marks=pytest.mark.deep)])
def test_every_cut_into_three_gives_the_same_parts(tools, lengths):
    """Every place of the first cut, with every length of the second piece or every fifth."""
    answer = f'{THOUGHT}{START}{TO_WEATHER}{{"city": "a \\"}}{{ é"}}<|call|>{START}{FINAL}<|return|>'

    def told(*pieces: str):
        parser = ChannelParser(Judgement(tools.accepts, tools.takes_any))
        results = [parser.push(piece) for piece in pieces] + [parser.finish()]
        parts = [part for _, _, found in results for part in found]
        places = [part.text_before for part in parts if part.name]
        said = ["".join(result[index] for result in results) for index in (0, 1)]
        return said, calls_of(parts), places, parser.reasoning_end

    whole = told(answer)
    assert whole[0] == ["The user asks.", "It rains."]
    assert whole[3] == len(THOUGHT)
    for first in range(len(answer) + 1):
        for second in range(first, len(answer) + 1, lengths):
            assert told(answer[:first], answer[first:second], answer[second:]) == whole


def test_no_more_is_held_back_than_may_still_be_a_tag():
    parser = ChannelParser(Judgement(FREE.accepts, FREE.takes_any))
    assert parser.push("<|channel|>analysis<|message|>So") == ("So", "", [])
    assert parser.push(" <|e") == (" ", "", [])
    assert parser.push("x") == ("<|ex", "", [])
    assert not parser.reasoning_over
    assert parser.push(f"<|end|>{START}{TO_WEATHER}")[2] == []
    assert parser.reasoning_over
    assert calls_of(parser.push('{"city": "P')[2]) == [FoundCall("weather", '{"city": "P')]
    assert parser.push('aris"}')[2][0].arguments == 'aris"}'


def test_the_only_call_that_is_wanted_ends_the_answer():
    parser = ChannelParser(Judgement(FREE.accepts, FREE.takes_any), parallel=False)
    _, text, parts = parser.push(f"{TO_WEATHER}{PARIS_ARGUMENTS}<|call|>{START}{FINAL}")
    assert (text, calls_of(parts)) == ("", [PARIS])
    assert parser.ended
    assert parser.finish() == ("", "", [])


@pytest.mark.parametrize("unit", ["<|start|>", "<|channel|>", "<|channel|>final<|message|>x<|end|>", " to=", "<|", "{"])
def test_time_grows_with_the_length_alone(unit):
    def seconds(count: int, whole: bool) -> float:
        text, began = unit * count, process_time()
        parse(*([text] if whole else text))
        return process_time() - began

    for whole in (True, False):
        size = max(1, 1_200 // len(unit))
        small = min(seconds(size, whole) for _ in range(3))
        assert any(seconds(size * 8, whole) < 40 * small + 0.05 for _ in range(5)), whole


# --- rules of a request

HARMONY_FORMAT = ReplyFormat(HARMONY, thinks=True, channels=True)


def reader(use: ToolUse = ToolUse.AUTO, reasoning=ReasoningUse.SPLIT, **rest):
    prompt = ChatPrompt((Message("user", "x"),), tools=rest.pop("tools", TOOLS))
    return HARMONY_FORMAT.reader(prompt, ReplyRules(reasoning, use, **rest), "")


def test_an_answer_is_taken_apart_by_the_rules_of_its_request():
    answer = f"{THOUGHT}{START}{TO_WEATHER}{PARIS_ARGUMENTS}<|call|>"
    reasoning, text, calls = read(reader().parser("ask/0"), answer)
    assert (reasoning, text) == ("The user asks.", "")
    assert [(call.index, call.name, call.arguments) for call in calls] == [(0, "weather", ""), (0, "", PARIS_ARGUMENTS)]
    assert calls[0].id.startswith("call_")
    assert read(reader(reasoning=ReasoningUse.HIDDEN).parser("ask/0"), answer)[0] == ""
    assert read(reader(tools=()).parser("ask/0"), f"{THOUGHT}{START}{FINAL}")[:2] == ("The user asks.", "It rains.")
    assert set(reader().markers) == set(CHANNEL_TAGS)


def test_a_call_that_must_be_made_is_plain_json():
    """A grammar makes the model write it, and grammars know no channels."""
    named = reader(ToolUse.NAMED, tool_name="weather").parser("ask/0")
    assert [call.arguments for call in read(named, PARIS_ARGUMENTS)[2]] == ["", PARIS_ARGUMENTS]
    required = reader(ToolUse.REQUIRED).parser("ask/0")
    assert read(required, '{"name": "now", "arguments": {}}')[2][0].name == "now"


def test_a_budget_for_reasoning_in_a_channel_is_refused(tmp_path):
    text = replace(open_text(save(NAMES[0], tmp_path)), reply_format=HARMONY_FORMAT)
    with pytest.raises(InvalidParameter, match="channel of its own"):
        ReasoningBudgets(text).make(3, TextPrompt("x"), "x", None)


# --- conversations, in a template of the structure of the published one

SOURCE = """\
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- if tools %}{{- '<|start|>developer<|message|>' }}{%- for t in tools %}{{- t.function.name }}{%- endfor %}{{- '<|end|>' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and 'tool_calls' in message %}
{%- set call = message.tool_calls[0].function %}
{%- if message.content and message.thinking %}{{- raise_exception('Either content or thinking') }}
{%- elif message.content or message.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + (message.content or message.thinking) + '<|end|>' }}{%- endif %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' + call.arguments | tojson + '<|call|>' }}
{%- elif message.role == 'assistant' %}
{%- if 'thinking' in message %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- elif message.role == 'tool' %}{{- '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>' + message.content | tojson + '<|end|>' }}
{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""  # noqa: E501


def test_conversations_with_calls_and_reasoning_are_rendered_as_transformers_does():
    chat = template(SOURCE, *CHANNEL_TAGS)
    call = ToolCall("x", "weather", '{"city": "Zürich"}')
    given = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
    for content, reasoning, shown in (
        ("", "Hm.", "Hm."),
        ("I look.", "", "I look."),
        ("I look.", "Hm.", "Hm.\n\nI look."),
    ):
        messages = (ASK, Message("assistant", content, tool_calls=(call,), reasoning=reasoning), RESULT,
                    Message("assistant", "21.", reasoning="Now I know."))  # fmt: skip
        ours = chat.render_prompt(
            ChatPrompt(messages, tools=(TOOL,), template_variables=(("reasoning_effort", "high"),))
        )
        theirs, _ = render_jinja_template(
            conversations=[[
                {"role": "user", "content": ASK.content},
                {"role": "assistant", "content": "", "thinking": shown, "tool_calls": [given]},
                {"role": "tool", "content": RESULT.content},
                {"role": "assistant", "content": "21.", "thinking": "Now I know."},
            ]],
            tools=[DEFINITION], chat_template=SOURCE, add_generation_prompt=True, reasoning_effort="high",
        )  # fmt: skip
        assert ours.text == theirs[0]
    assert json.loads(ours.text.split("json<|message|>")[1].split("<|call|>")[0]) == {"city": "Zürich"}


def test_the_format_is_recognised():
    found = find_reply_format("auto", "auto", template(SOURCE))
    assert (found.calls, found.thinks, found.channels) == (HARMONY, True, True)
    assert find_reply_format("none", "auto", template(SOURCE)) == replace(found, calls=None)
    assert not find_reply_format("json", "auto", template(SOURCE)).channels
    assert not find_reply_format("auto", "none", template(SOURCE)).thinks
    assert find_reply_format("harmony", "auto", None).channels
