"""Answers with reasoning and calls, generated again and cut elsewhere: together they are the answer."""

from __future__ import annotations

import pytest
from fleet_harness import joined
from hypothesis import given
from hypothesis import strategies as st

from penstock.contract.events import ChoiceDelta, ChoiceFinished, FinishReason, RequestFinished, TokenPiece, Usage
from penstock.contract.request import StopRules
from penstock.contract.tools import ReasoningUse, ReplyRules, Tool, ToolUse, made_calls
from penstock.engine.choice import Choice
from penstock.engine.output_queue import merge
from penstock.fleet import AnswerDiffers, Delivered
from penstock.text.call_format import CALL_FORMATS
from penstock.text.reply import ReplyFormat


class Characters:
    """A tokenizer whose tokens are characters, by their numbers."""

    def token_bytes(self, token: int) -> bytes:
        return chr(token).encode()

    def is_special(self, token: int) -> bool:
        return False

    def decode(self, tokens, skip_special_tokens=True) -> str:
        return "".join(map(chr, tokens))


TOOL = Tool("f", '{"type":"function","function":{"name":"f"}}', '{"type":"object"}')
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "one two"}}\n</tool_call>'
parts = st.lists(st.sampled_from(("some text ", CALL, "a stop", "é🌊", "<tool_", "\n")), max_size=6).map("".join)
answers = st.tuples(st.sampled_from(("", "<think>why and how</think>", "<think>endless ")), parts).map("".join)
FORMAT = ReplyFormat(CALL_FORMATS["hermes"], thinks=True)


def said(index: int, text: str, *, stops: bool, plain: bool) -> list:
    """The outputs of one choice, a push each."""
    reader = None if plain else FORMAT.reader_of((TOOL,), ReplyRules(ReasoningUse.SPLIT, ToolUse.AUTO), opened=False)
    rules = StopRules(strings=("stop",) if stops else ())
    choice = Choice(index, rules, Characters(), reader, f"one/{index}")
    outputs = []
    for character in text:
        outputs.append(choice.push(ord(character), -0.5))
        if choice.ended:
            break
    else:
        outputs.append(choice.finish())
    reason = choice.reason(FinishReason.STOP)
    return [each for each in outputs if not each.empty] + [ChoiceFinished(index, reason, choice.matched)]


def pieces(outputs: list, cuts: list[int]) -> list[list]:
    """The outputs as a reader that takes these portions gets them."""
    portions, at = [], 0
    for cut in [*cuts, len(outputs)]:
        portion: list = []
        merge(portion, outputs[at : at + cut])
        at += cut
        if portion:
            portions.append(portion)
    return portions


@given(
    st.lists(answers, min_size=1, max_size=2),
    st.booleans(),
    st.booleans(),
    st.lists(st.tuples(st.lists(st.integers(1, 9), max_size=20), st.integers(0, 20)), max_size=4),
    st.randoms(use_true_random=False),
)
def test_runs_that_are_cut_anywhere_add_up_to_the_answer(texts, stops, plain, runs, random):
    choices = [said(index, text, stops=stops, plain=plain) for index, text in enumerate(texts)]
    whole: list = []
    while any(choices):
        whole.append(random.choice([each for each in choices if each]).pop(0))
    whole.append(RequestFinished(Usage(1, 2)))
    delivered, got = Delivered(len(texts)), []
    for cuts, portions in [*runs, ([], len(whole))]:
        if not delivered.ended:
            delivered.begin_again()
            for portion in pieces(whole, cuts)[:portions]:
                got += delivered.take(portion)
    assert delivered.ended
    expected, found = joined(whole), joined(got)
    for one in (expected, found):
        one["choices"] = {
            choice: (
                text,
                tokens,
                reasoning,
                made_calls(calls),
                [(c.text_before, c.tokens_before) for c in calls if c.id],
            )
            for choice, (text, tokens, reasoning, calls, _) in one["choices"].items()
        }
    assert found == expected


def delta(*tokens: int, choice: int = 0) -> ChoiceDelta:
    return ChoiceDelta(choice, "x" * len(tokens), tuple(TokenPiece(token, b"x", 0.0) for token in tokens))


def test_other_tokens_or_a_shorter_answer_differ():
    delivered = Delivered(1)
    assert delivered.take([delta(1, 2, 3)])
    delivered.begin_again()
    assert delivered.take([delta(1)]) == []
    with pytest.raises(AnswerDiffers):
        delivered.take([delta(4)])
    delivered.begin_again()
    with pytest.raises(AnswerDiffers):
        delivered.take([delta(1, 2), ChoiceFinished(0, FinishReason.STOP)])
    delivered.begin_again()
    (rest,) = delivered.take([delta(1, 2, 3, 4)])
    assert [token.id for token in rest.tokens] == [4]
    assert delivered.tokens == ((1, 2, 3, 4),)
