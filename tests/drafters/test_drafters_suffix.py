"""Guesses from what a sequence, and earlier answers, repeat."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from penstock.contract.plan import Draftable
from penstock.drafters import SuffixDrafter, suffix_drafter
from penstock.drafters.suffix_index import GRAM, TOKEN_BYTES, SuffixIndex

MEMORY = 1 << 30


def longest(tokens, query) -> int:
    """The length of the longest end of `query` that occurs in `tokens`, before their end if both are the same list."""
    best = 0
    for end in range(1, len(tokens) + (tokens is not query)):
        length = 0
        while length < min(end, len(query)) and tokens[end - length - 1] == query[-length - 1]:
            length += 1
        best = max(best, length)
    return best


@pytest.mark.parametrize("seed", range(20))
def test_a_match_is_a_longest_one_where_few_places_agree(seed):
    rng = random.Random(seed)
    stem = [rng.randrange(300) for _ in range(200)]
    tokens = [*stem, *(rng.randrange(300) for _ in range(20)), *stem[50 : 50 + rng.randrange(2, 60)]]
    index = SuffixIndex()
    index.extend(tokens)
    found = index.match(index.tokens)
    assert found is not None
    assert found.length == longest(index.tokens, index.tokens) >= GRAM
    assert tokens[found.end - found.length : found.end] == tokens[len(tokens) - found.length :]
    assert found.end < len(tokens)


def test_tokens_are_taken_in_one_by_one_as_all_at_once():
    rng = random.Random(3)
    tokens = [rng.randrange(4) for _ in range(300)]
    whole, grown = SuffixIndex(), SuffixIndex()
    whole.extend(tokens)
    for count, token in enumerate(tokens, start=1):
        grown.extend([token])
        assert (grown.match(grown.tokens) is None) == (longest(grown.tokens, grown.tokens) < GRAM), count
    assert whole.match(whole.tokens) == grown.match(grown.tokens)


def test_what_is_looked_for_may_be_another_sequence():
    index = SuffixIndex()
    index.extend([1, 2, 3, 4, 5, 6])
    assert index.match([9, 3, 4]) == (4, 2)
    assert index.match([2, 3, 4]) == (4, 3)
    assert index.match([4]) is None
    assert index.match([5, 6]) == (6, 2)
    assert index.after(6, 3) == ()


def test_a_loop_is_guessed_beyond_what_it_has_said():
    index = SuffixIndex()
    index.extend([7, 1, 2, 3, 1, 2, 3, 1, 2])
    found = index.match(index.tokens)
    assert index.after(found.end, 7) == (3, 1, 2, 3, 1, 2, 3)


def ask_all(drafter, seq_id, tokens, most=8, prompt_tokens=0, scope="", foreseen=()):
    return drafter.draft(Draftable(seq_id, tokens, most, prompt_tokens, scope, foreseen))


def ask(*args, **named):
    """The one guess, or None."""
    guesses = ask_all(*args, **named)
    assert len(guesses) <= 1
    return guesses[0] if guesses else None


def test_a_sequence_goes_on_as_it_did_before():
    draft = ask(SuffixDrafter(MEMORY), "a", [5, 6, 7, 8, 9, 1, 5, 6], most=3)
    assert (draft.seq_id, draft.tokens, draft.drafter, draft.evidence) == ("a", (7, 8, 9), "suffix", 2)
    assert ask(SuffixDrafter(MEMORY), "a", [1, 2, 3, 4]) is None


def test_earlier_answers_count_for_the_same_caller_alone_and_prompts_do_not():
    drafter = SuffixDrafter(MEMORY)
    ask(drafter, "first", [50, 51, 52, 1, 2, 3, 4, 5, 6], prompt_tokens=3, scope="mine")
    drafter.forget("first")
    assert ask(drafter, "second", [9, 2, 3], most=2, scope="mine").tokens == (4, 5)
    assert ask(drafter, "second", [9, 2, 3], most=2, scope="mine").drafter == "recent"
    assert ask(drafter, "third", [9, 2, 3], scope="others") is None
    assert ask(drafter, "fourth", [9, 50, 51], scope="mine") is None


def test_more_of_a_match_in_the_sequence_itself_counts_more():
    drafter = SuffixDrafter(MEMORY)
    ask(drafter, "first", [1, 2, 3, 4, 5], scope="mine")
    drafter.forget("first")
    assert ask(drafter, "second", [8, 1, 2, 7, 7, 8, 1, 2], most=1, scope="mine").tokens == (7,)


def test_what_is_foreseen_comes_first_and_what_repeats_is_looked_for_behind_it():
    repeats, new = [5, 6, 7, 8, 9, 1, 5], [5, 6, 7, 8, 9, 1, 2]
    first, behind = ask_all(SuffixDrafter(MEMORY), "a", repeats, most=4, foreseen=(6,))
    assert (first.tokens, first.drafter) == ((6,), "grammar")
    assert (behind.tokens, behind.drafter, behind.evidence) == ((7, 8, 9), "suffix", 2)
    assert ask(SuffixDrafter(MEMORY), "a", repeats, most=1, foreseen=(6, 7)).tokens == (6,)
    assert ask(SuffixDrafter(MEMORY), "a", new, foreseen=(3, 4)).tokens == (3, 4)


def test_what_was_foreseen_and_did_not_come_is_not_remembered():
    drafter = SuffixDrafter(MEMORY)
    ask_all(drafter, "a", [1, 2, 3], foreseen=(4, 5, 6))
    assert ask(drafter, "a", [1, 2, 3, 7, 4, 5]) is None
    drafter.forget("a")
    assert ask(drafter, "b", [4, 5]) is None


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(suffix_drafter, "_REMEMBERED", 100)
    monkeypatch.setattr(suffix_drafter, "_CALLERS", 3)
    monkeypatch.setattr(suffix_drafter, "_LONGEST_INDEXED", 50)
    drafter, rng = SuffixDrafter(MEMORY), random.Random(1)
    for number in range(60):
        name, scope = f"seq {number}", f"scope {number % 5}"
        ask(drafter, name, [rng.randrange(1000) for _ in range(80)], scope=scope)
        assert len(drafter._live[name].index.tokens) == 50
        drafter.forget(name)
        drafter.forget(name)  # no error
        assert len(drafter._live) == 0
        assert len(drafter._recent) <= 3
        assert all(len(recent.tokens) <= 200 for recent in drafter._recent.values())


@pytest.mark.parametrize("callers", [1, 4, 20])
def test_what_is_kept_stays_within_its_memory(callers):
    most, rng = 100 * TOKEN_BYTES, random.Random(callers)
    drafter, fullest = SuffixDrafter(most), 0
    for number in range(200):
        name, scope = f"seq {number}", f"scope {rng.randrange(callers)}"
        answer = [rng.randrange(1 << 20) for _ in range(rng.randrange(3, 90))]
        ask(drafter, name, answer, scope=scope)
        drafter.forget(name)
        fullest = max(fullest, drafter.bytes)
        assert drafter.bytes == sum(recent.bytes for recent in drafter._recent.values()) <= most
        assert scope in drafter._recent, "the latest answer is always kept, as far as there is room"
        assert drafter._recent[scope].tokens[-len(answer[-40:]) :] == answer[-40:]
    assert fullest > most // 2


def test_an_index_takes_no_more_memory_than_it_says():
    tracemalloc.start()
    try:
        index = SuffixIndex()
        index.extend(range(1_000, 31_000))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken <= index.bytes < 1.3 * taken
    assert index.bytes == pytest.approx(30_000 * TOKEN_BYTES, rel=0.001)
