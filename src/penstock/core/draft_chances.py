"""How often guesses turn out right: by drafter and evidence, of all sequences and of each.

A guess is judged by the tokens that were drawn at its places, as far as there are any, whether a step computed it as a
draft or not; so a sequence whose guesses are wrong costs no time, and is found out when they get right. Old judgements
fade.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.contract.plan import Draft

__all__ = ["DraftChances", "Judgements", "judge"]

_FADE = 0.95
"""What is left of a judgement after the next one of its kind: some twenty guesses count."""

_TRUST = 2.0
"""How many judgements of a sequence's own count as much as what is known of all sequences."""

_MOST = 0.98
"""No guess is taken to be surer: a long one would cost all the time there is."""


class Judgements:
    """Right and wrong tokens of guesses, by kind. Of one sequence; or of all, where it begins with one of each."""

    __slots__ = ("_first", "_kinds")

    def __init__(self, first: float = 0.0) -> None:
        self._first = first
        self._kinds: dict[tuple[str, int], tuple[float, float]] = {}

    def of(self, kind: tuple[str, int]) -> tuple[float, float]:
        """(right tokens, judged tokens), faded."""
        return self._kinds.get(kind, (self._first, 2 * self._first))

    def add(self, kind: tuple[str, int], right: int, judged: int) -> None:
        """A guess of this kind was judged."""
        before = self.of(kind)
        self._kinds[kind] = (before[0] * _FADE + right, before[1] * _FADE + judged)


class DraftChances:
    """What is known of the guesses for all sequences. Owned by the scheduler."""

    __slots__ = ("_all",)

    def __init__(self) -> None:
        self._all = Judgements(1.0)

    def of(self, own: Judgements, draft: Draft) -> float:
        """The chance that a token of `draft` is right if those before it are, for a sequence with judgements `own`."""
        kind = _kind(draft)
        right, judged = self._all.of(kind)
        own_right, own_judged = own.of(kind)
        return min(_MOST, (own_right + _TRUST * right / judged) / (own_judged + _TRUST))

    def learn(self, own: Judgements, draft: Draft, drawn: Iterable[int]) -> None:
        """`drawn` are the tokens at the places of `draft`, as far as there are any."""
        right, judged = judge(draft.tokens, drawn)
        if judged:
            self._all.add(_kind(draft), right, judged)
            own.add(_kind(draft), right, judged)


def judge(guessed: Iterable[int], drawn: Iterable[int]) -> tuple[int, int]:
    """(tokens that were right, tokens that were judged): those behind the first wrong one are not."""
    right = 0
    for guess, token in zip(guessed, drawn, strict=False):
        if guess != token:
            return right, right + 1
        right += 1
    return right, right


def _kind(draft: Draft) -> tuple[str, int]:
    return draft.drafter, draft.evidence.bit_length()
