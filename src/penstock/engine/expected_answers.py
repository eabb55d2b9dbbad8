"""Guesses from answers that are known beforehand: answers that another engine had begun when it was lost.

An answer follows from its request, so what was generated once is generated again. A right guess costs one position of
a step instead of a whole step. Should a guess be wrong, it costs that position and changes nothing. Owned by the
engine's thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.contract.plan import Draft, Draftable, Guess

__all__ = ["ExpectedAnswers"]

_DRAFTER = "expected"
_EVIDENCE = 1 << 15
"""The same for all guesses: how often they are right does not depend on what they say."""


class ExpectedAnswers:
    """See the module, and `contract.ports.Drafter`. False where no answer is expected."""

    def __init__(self) -> None:
        self._answers: dict[str, _Answer] = {}

    def __bool__(self) -> bool:
        return bool(self._answers)

    def add(self, seq_id: str, tokens: Sequence[int]) -> None:
        """The answer of this sequence will probably begin with `tokens`."""
        if tokens:
            self._answers[seq_id] = _Answer(tokens)

    def draft(self, sequence: Draftable) -> Guess:
        """See `Drafter.draft`; forgets an answer that went another way, or is longer than the known tokens."""
        answer = self._answers.get(sequence.seq_id)
        if answer is None:
            return ()
        following = answer.after(sequence)
        if following:
            return (Draft(sequence.seq_id, following, _DRAFTER, _EVIDENCE),)
        self.forget(sequence.seq_id)
        return ()

    def forget(self, seq_id: str) -> None:
        """See `Drafter.forget`."""
        self._answers.pop(seq_id, None)


class _Answer:
    """The known tokens of one answer, and how many of them were generated so far."""

    __slots__ = ("_come", "_tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tuple(tokens)
        self._come = 0

    def after(self, sequence: Draftable) -> tuple[int, ...]:
        """The tokens that come next; () if no more are known."""
        first, come = sequence.prompt_tokens, len(sequence.tokens) - sequence.prompt_tokens
        new = tuple(sequence.tokens[first + self._come :])
        if new != self._tokens[self._come : come]:
            return ()
        self._come = come
        return self._tokens[come : come + sequence.most]
