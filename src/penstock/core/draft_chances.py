"""How often guesses turn out right: by drafter and evidence, for all sequences together and for each.

A guess is compared with the tokens that were drawn at its positions, whether or not a step computed it as a draft. So a
sequence with wrong guesses costs no time, and better guesses are noticed. Old judgements fade.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from penstock.contract.plan import Draft

__all__ = ["MODEL", "DraftChances", "Judgements", "judge"]

MODEL = "model"
"""Name of the draft model among the drafters."""


class _Learning(NamedTuple):
    """How fast estimates change.

    Attributes:
        right: tokens that count as right before any was judged.
        judged: tokens that count as judged before any was.
        fade: the weight of a judgement after the next one of its kind.
        trust: how many of a sequence's own judgements weigh as much as all that is known of other sequences.
    """

    right: float
    judged: float
    fade: float
    trust: float


_TEXT = _Learning(right=1.0, judged=2.0, fade=0.95, trust=2.0)
"""For repetitions: about twenty guesses count, because a text starts and stops repeating."""

_SMALL_MODEL = _Learning(right=6.0, judged=8.0, fade=0.98, trust=16.0)
"""For the draft model, whose quality varies little. It is expected to be good: the operator chose it."""

_MOST = 0.98
"""The highest chance of any guess; at 1.0 a long guess would take all of a step's time."""


class Judgements:
    """Right and wrong tokens of guesses by kind: of one sequence, or of `everyone` (begins with an expectation)."""

    __slots__ = ("_everyone", "_kinds")

    def __init__(self, *, everyone: bool = False) -> None:
        self._everyone = everyone
        self._kinds: dict[tuple[str, int], tuple[float, float]] = {}

    def of(self, kind: tuple[str, int]) -> tuple[float, float]:
        """(right tokens, judged tokens), faded."""
        known = self._kinds.get(kind)
        if known is not None or not self._everyone:
            return known or (0.0, 0.0)
        learning = _learning(kind)
        return learning.right, learning.judged

    def add(self, kind: tuple[str, int], right: int, judged: int) -> None:
        """A guess of this kind was judged."""
        before, fade = self.of(kind), _learning(kind).fade
        self._kinds[kind] = (before[0] * fade + right, before[1] * fade + judged)


class DraftChances:
    """What is known of the guesses for all sequences. Owned by the scheduler."""

    __slots__ = ("_all",)

    def __init__(self) -> None:
        self._all = Judgements(everyone=True)

    def of(self, own: Judgements, draft: Draft) -> float:
        """The chance that a token of `draft` is right if those before it are, for a sequence with judgements `own`."""
        kind = _kind(draft)
        trust = _learning(kind).trust
        right, judged = self._all.of(kind)
        own_right, own_judged = own.of(kind)
        return min(_MOST, (own_right + trust * right / judged) / (own_judged + trust))

    def learn(self, own: Judgements, draft: Draft, drawn: Iterable[int]) -> None:
        """Learn from the tokens `drawn` at the positions of `draft`, as far as there are any."""
        right, judged = judge(draft.tokens, drawn)
        if judged:
            self._all.add(_kind(draft), right, judged)
            own.add(_kind(draft), right, judged)


def judge(guessed: Iterable[int], drawn: Iterable[int]) -> tuple[int, int]:
    """(tokens that were right, tokens that were judged): tokens after the first wrong one are not judged."""
    right = 0
    for guess, token in zip(guessed, drawn, strict=False):
        if guess != token:
            return right, right + 1
        right += 1
    return right, right


def _kind(draft: Draft) -> tuple[str, int]:
    return draft.drafter, draft.evidence.bit_length()


def _learning(kind: tuple[str, int]) -> _Learning:
    return _SMALL_MODEL if kind[0] == MODEL else _TEXT
