"""Budgets for reasoning: which token is due when, by the rules that parse answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_vocabularies import NAMES, save

from penstock.contract.errors import InvalidParameter
from penstock.contract.request import ChatPrompt, Message, TextPrompt, TokenPrompt
from penstock.contract.thinking import ThinkingBudget
from penstock.text import Detokenizer, ReasoningBudgets, ReplyFormat, TextModel, open_text
from penstock.text.reasoning import THINK_TAGS, ReasoningSplit

CLOSING = THINK_TAGS.closing
TAGS = ("<think>", CLOSING)


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> dict[str, TextModel]:
    opened = {name: open_text(save(name, tmp_path_factory.mktemp(name))) for name in NAMES}
    return {name: replace(text, reply_format=ReplyFormat(thinks=True)) for name, text in opened.items()}


def follow(text: TextModel, budget: ThinkingBudget, said: list[int], prompt=()) -> list[int]:
    """The tokens of a model that would say `said`: a due token goes first, and nothing of `said` is lost."""
    thinking = ReasoningBudgets(text).begin(budget, prompt)
    tokens: list[int] = []
    rest = iter(said)
    while True:
        token = thinking.due if thinking.due is not None else next(rest, None)
        if token is None:
            return tokens
        tokens.append(token)
        thinking.take(token)


def taken_apart(text: TextModel, budget: ThinkingBudget, tokens: list[int], prompt=()) -> tuple[str, str, int]:
    """Reasoning, answer, and how many tokens began inside the reasoning, by the parser that callers see."""
    split, inside = ReasoningSplit(opened=budget.opened), 0
    detokenizer = Detokenizer(text.tokenizer, spelled=frozenset(budget.spelled), prompt=prompt)
    reasoning = answer = ""
    for token in tokens:
        inside += split.inside
        more, rest = split.push(detokenizer.push(token))
        reasoning, answer = reasoning + more, answer + rest
    more, rest = split.finish()
    return reasoning + more, answer + rest, inside


def ids(text: TextModel, said: str) -> list[int]:
    return list(text.tokenizer.longest_matches(said))


@pytest.mark.parametrize("name", NAMES)
def test_after_so_many_tokens_the_reasoning_is_closed_and_the_answer_goes_on(texts, name):
    text = texts[name]
    said = ids(text, "abc def ghi")
    for tokens in range(len(said)):
        budget = ThinkingBudget(tokens, opened=True)
        got = follow(text, budget, said)
        closing = got[tokens : len(got) - len(said) + tokens]
        assert got == [*said[:tokens], *closing, *said[tokens:]]
        assert b"".join(map(text.tokenizer.token_bytes, closing)) == CLOSING.encode()
        reasoning, answer, inside = taken_apart(text, budget, got)
        assert (reasoning + answer).replace(" ", "") == "abcdefghi"
        assert inside == tokens + len(closing)


def test_a_tag_that_is_one_token_is_written_as_that_token(texts):
    text = texts["qwen2"]
    [closing] = text.tokenizer.encode(CLOSING)
    assert follow(text, ThinkingBudget(0, opened=True), []) == [closing]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_due_outside_of_reasoning_or_within_the_budget(texts, name):
    text = texts[name]
    for said in ("answer <think> is no opening here", "<think>ab</think>answer <think>not again"):
        tokens = ids(text, said)
        assert follow(text, ThinkingBudget(len(tokens)), tokens) == tokens
    plain = ids(text, "an answer without reasoning")
    assert follow(text, ThinkingBudget(0), plain) == plain


@pytest.mark.parametrize("name", NAMES)
def test_what_the_model_wrote_of_the_tag_is_not_written_again(texts, name):
    text = texts[name]
    for size in range(1, len(CLOSING)):
        begun = [id_ for character in CLOSING[:size] for id_ in ids(text, character)]
        got = follow(text, ThinkingBudget(1 + len(begun), opened=True), [*ids(text, "a"), *begun])
        assert text.tokenizer.decode(got).strip() == "a" + CLOSING


def test_half_a_character_does_not_hide_the_tag(texts):
    text = texts["qwen2"]
    pieces = {text.tokenizer.token_bytes(id_): id_ for id_ in range(text.tokenizer.vocab_size)}
    begun = [pieces[b"<"], pieces[b"/"], pieces[b"\xe2"]]
    budget = ThinkingBudget(3, opened=True)
    got = follow(text, budget, [*begun, *ids(text, "ok")])
    assert taken_apart(text, budget, got)[:2] == ("</\ufffd", "ok")


@settings(deadline=None, max_examples=60)
@given(
    st.data(), st.sampled_from(NAMES), st.integers(0, 9), st.booleans(), st.text("<think>/ \n\u00e9\u4e2d", max_size=24)
)
def test_no_reasoning_is_longer_than_its_budget_and_a_second_look_finds_the_same(texts, data, name, most, opened, said):
    """Whatever the model says; and a budget taken up in the middle, as after a preemption, goes on the same."""
    text = texts[name]
    raw = [next(iter(text.tokenizer.encode(each)), 0) for each in said]
    tokens = data.draw(st.lists(st.sampled_from([*ids(text, "".join(TAGS)), *raw, 0, 5]), max_size=30))
    prompt = tuple(tokens[:2])
    budget = ThinkingBudget(most, opened, tuple(sorted(text.tokenizer.special_ids(TAGS))))
    got = follow(text, budget, tokens, prompt)
    inside = taken_apart(text, budget, got, prompt)[2]
    assert inside <= most + 2 * len(CLOSING)  # the tag, begun again at most once behind half a character
    again = ReasoningBudgets(text).begin(budget, prompt)
    for token in got:
        assert again.due in (None, token)
        again.take(token)


def test_a_prompt_decides_where_the_answer_begins(texts):
    budgets, text = ReasoningBudgets(texts["qwen2"]), texts["qwen2"]
    user = ChatPrompt((Message("user", "<think>"),))
    for prompt, rendered, opened in (
        (TextPrompt(""), "a<think>\n", True),
        (TextPrompt(""), "<think>a</think>", False),
        (TokenPrompt(()), "a", False),
        (user, "<think><|im_end|>assistant\n", False),
        (user, "<|im_end|>assistant\n<think>\n", True),
    ):
        assert budgets.make(3, prompt, rendered, None) == ThinkingBudget(3, opened)
    with pytest.raises(InvalidParameter) as caught:
        ReasoningBudgets(replace(text, reply_format=ReplyFormat(thinks=False))).make(3, user, "", None)
    assert (caught.value.param, caught.value.code) == ("thinking_token_budget", "unsupported_parameter")
