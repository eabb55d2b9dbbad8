"""Which sequence made a step fail as a whole: a step that raises does not say which row was to blame.

Every sequence with a row in it is a suspect. A suspect is computed alone until it draws its next token, which acquits
it. A suspect that makes a step fail alone is guilty. So one bad request costs at most two steps, and costs no other
request its answer.

If the runner was killed from outside, only a sequence that was there three times without drawing a token in between is
suspected (the system also kills what takes too much memory). Then a bad request costs at most six steps.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.core.sequence import Seq

__all__ = ["POISONED", "Suspects"]

POISONED = "Computing this request made the engine's step fail, among others and alone. Do not send it again."

_FAILED, _KILLED = 3, 1
_SUSPECT, _GUILTY = 3, 6
"""Points against a sequence for a step that failed or was killed; points that make it a suspect, and a guilty one."""


class Suspects:
    """Sequences that must be computed alone. Owned by the scheduler."""

    __slots__ = ("_against", "_seqs")

    def __init__(self) -> None:
        self._against: dict[Seq, int] = {}
        self._seqs: set[Seq] = set()

    def __len__(self) -> int:
        return len(self._seqs)

    @property
    def remembers(self) -> bool:
        """Whether any sequence has points."""
        return bool(self._against)

    @property
    def first(self) -> Seq:
        """The next suspect to compute alone; there must be one."""
        return min(self._seqs, key=lambda seq: seq.rank)

    def suspect(self, seqs: Mapping[Seq, bool], *, killed: bool = False) -> Seq | None:
        """Note which sequences had rows in plans that failed. Returns the guilty one: a suspect that was alone in them.

        Args:
            seqs: all of them, and whether each still runs: one that has left may have been guilty.
            killed: the plans failed because something outside killed the runner.
        """
        seen = {seq for seq, there in seqs.items() if there}
        alone = next(iter(seen)) if len(seqs) == 1 and seen and seen <= self._seqs else None
        for seq in seen:
            self._against[seq] = self._against.get(seq, 0) + (_KILLED if killed else _FAILED)
            if self._against[seq] >= _SUSPECT:
                self._seqs.add(seq)
        return alone if alone is not None and self._against[alone] >= _GUILTY else None

    def acquit(self, seq: Seq) -> bool:
        """`seq` has drawn a token or left. Returns whether it was a suspect."""
        self._against.pop(seq, None)
        suspected = seq in self._seqs
        self._seqs.discard(seq)
        return suspected
