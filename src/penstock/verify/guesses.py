"""Guesses the next tokens for schedules, some right and some wrong: answers must not depend on guesses.

The guesser knows each request's answer, so it can be right at any chosen rate. Drafts are not weighed in these
schedules: every guess for which there is room is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Protocol

from penstock.contract.plan import Draft, Draftable

__all__ = ["LONGEST_GUESS", "Guesser", "Guesses"]

LONGEST_GUESS = 4


class Guesser(Protocol):
    """Guesses for all rows of a step."""

    def guess(self, sequences: Iterable[Draftable]) -> tuple[Draft, ...]:
        """Return at most one guess for each of these sequences."""
        ...


class Guesses:
    """The guesses of one schedule. Owned by its drive.

    Args:
        seed: seeds the random draws.
        right: the chance that a guessed token is right.
        answers: generated tokens by request id; other requests get no guesses.
    """

    def __init__(self, seed: str, right: float, answers: Mapping[str, Sequence[int]]) -> None:
        self._draw = Random(f"guesses/{seed}")  # noqa: S311 - a workload, not a secret
        self._right = right
        self._answers = answers

    def guess(self, sequences: Iterable[Draftable]) -> tuple[Draft, ...]:
        """A guess for each sequence whose answer is known and not yet complete."""
        guesses = ((one.seq_id, self._tokens(one)) for one in sequences if one.seq_id in self._answers)
        return tuple([Draft(seq_id, tokens) for seq_id, tokens in guesses if tokens])

    def _tokens(self, one: Draftable) -> tuple[int, ...]:
        answer, known = self._answers[one.seq_id], len(one.tokens) - one.prompt_tokens
        coming = answer[known : known + min(one.most, self._draw.randint(1, LONGEST_GUESS))]
        return tuple([token if self._draw.random() < self._right else self._draw.choice(answer) for token in coming])
