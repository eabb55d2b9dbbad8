"""Where each token begins in the text that callers get, whatever the prompt ends with and whatever is echoed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.contract.model import GgufVocabulary
from penstock.contract.request import SequenceRequest, StopRules
from penstock.engine.choice import Choice
from penstock.engine.intake import ResolvedRequest
from penstock.engine.prompt_echo import PromptEcho
from penstock.text import Detokenizer, open_text

PIECES = ("a", "b", "\u0120", "\u00e2", "\u0124", "\u00ac", "\u00f0", "<|end|>")  # of which three spell a euro sign
A, B, SPACE, E2, X82, XAC, XF0, END = range(len(PIECES))


def text_model(model: str = "gpt2", pieces=PIECES):
    spelled = model == "gpt2"
    kinds = {"<unk>": 2, "<s>": 3, "<|end|>": 3}
    return open_text(
        GgufVocabulary(
            file="places.gguf",
            model=model,
            pre="gpt-2" if spelled else "",
            tokens=pieces,
            token_types=tuple(kinds.get(piece, 1) for piece in pieces),
            merges=(),
            scores=() if spelled else tuple(-float(at) for at in range(len(pieces))),
            bos=-1 if spelled else 1,
            eos=pieces.index("<|end|>"),
            unknown=-1 if spelled else 0,
            add_bos=not spelled,
            add_space_prefix=not spelled,
            chat_template="",
        )
    )


TEXT = text_model()


def told(prompt: tuple[int, ...], tokens: tuple[int, ...]):
    """The text of a choice, and its token pieces."""
    choice = Choice(0, StopRules(max_tokens=9), TEXT.tokenizer, prompt=prompt)
    deltas = [choice.push(token, 0.0) for token in tokens] + [choice.finish()]
    return "".join(each.text for each in deltas), [piece for each in deltas for piece in each.tokens]


@pytest.mark.parametrize(
    ("prompt", "tokens", "text", "starts"),
    [
        ((A,), (A, B, B), "abb", [0, 1, 2]),
        ((A, E2), (X82, XAC, A, B), "\u20acab", [0, 0, 1, 2]),
        ((E2, X82), (XAC, A), "\u20aca", [0, 1]),
        ((A, E2), (A, B), "\ufffdab", [0, 2]),
        ((A,), (A, END, B), "ab", [0, 1, 1]),
    ],
)
def test_a_token_begins_where_its_text_does(prompt, tokens, text, starts):
    got, pieces = told(prompt, tokens)
    assert (got, [piece.start for piece in pieces]) == (text, starts)


@given(st.lists(st.integers(0, END), min_size=1, max_size=6), st.lists(st.integers(0, END), max_size=9))
def test_what_follows_a_token_is_what_the_tokens_after_it_say(prompt, tokens):
    text, pieces = told(tuple(prompt), tuple(tokens))
    assert [piece.id for piece in pieces] == tokens
    for at, piece in enumerate(pieces):
        before = Detokenizer(TEXT.tokenizer, prompt=prompt)
        assert text[: piece.start] == "".join(before.push(token) for token in tokens[:at])


def echoed(text, prompt: tuple[int, ...], given_text: str):
    request = SequenceRequest("a/0", prompt)
    output = PromptEcho(ResolvedRequest("a", (request,), given_text, 1, echo=True), text.tokenizer).output()
    return output.text, [piece.start for piece in output.tokens]


def test_the_tokens_of_an_echoed_prompt_begin_where_their_text_does():
    assert echoed(TEXT, (A, E2, X82, XAC, B), "") == ("a\u20acb", [0, 1, 1, 1, 2])
    assert echoed(TEXT, (A, END, B, E2), "") == ("a<|end|>b", [0, 1, 8, 9])


def test_what_a_tokenizer_puts_in_front_of_a_text_moves_no_token():
    pieces = ("<unk>", "<s>", "<|end|>", "\u2581", "a", "b", "\u2581a")
    text = text_model("llama", pieces)
    ids = text.tokenizer.encode("a b")
    assert [pieces[id_] for id_ in ids] == ["<s>", "\u2581a", "\u2581", "b"]
    assert echoed(text, ids, "a b") == ("a b", [0, 0, 1, 2])
    assert echoed(text, ids[1:], "") == ("a b", [0, 1, 2])
