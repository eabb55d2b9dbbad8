"""Who may have made a step fail as a whole: a step that raises does not say whose row it was.

Everybody who had a row in it is a suspect. A suspect is computed alone until it has drawn its next token; then it is
none any more. One that makes a step fail alone is the one. So a sequence costs at most two steps, and no other its
answer.

Where what computed was killed from outside, nobody is suspected at first: only who was there three times, without a
token in between (the system kills what takes too much memory, too). Then a sequence costs at most six steps.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.core.sequence import Seq

__all__ = ["POISONED", "Suspects"]

POISONED = "Computing this request made the engine's step fail, among others and alone. Do not send it again."

_FAILED, _KILLED = 3, 1
_SUSPECT, _GUILTY = 3, 6
"""How much speaks against a sequence: by one step that failed, or was killed; and from how much on it is what."""


class Suspects:
    """Sequences that are to be computed alone. Owned by the scheduler."""

    __slots__ = ("_against", "_seqs")

    def __init__(self) -> None:
        self._against: dict[Seq, int] = {}
        self._seqs: set[Seq] = set()

    def __len__(self) -> int:
        return len(self._seqs)

    @property
    def remembers(self) -> bool:
        """Whether anything speaks against anybody."""
        return bool(self._against)

    @property
    def first(self) -> Seq:
        """The next one to be computed alone; there must be one."""
        return min(self._seqs, key=lambda seq: seq.rank)

    def suspect(self, seqs: Mapping[Seq, bool], *, killed: bool = False) -> Seq | None:
        """Note who had rows in plans that failed; the one who is guilty, as it was a suspect and alone in them.

        Args:
            seqs: all of them, and whether they are still there: one that has left may have been the one.
            killed: they failed because something outside ended what computed.
        """
        seen = {seq for seq, there in seqs.items() if there}
        alone = next(iter(seen)) if len(seqs) == 1 and seen and seen <= self._seqs else None
        for seq in seen:
            self._against[seq] = self._against.get(seq, 0) + (_KILLED if killed else _FAILED)
            if self._against[seq] >= _SUSPECT:
                self._seqs.add(seq)
        return alone if alone is not None and self._against[alone] >= _GUILTY else None

    def acquit(self, seq: Seq) -> bool:
        """`seq` has drawn a token, or left; whether it was a suspect."""
        self._against.pop(seq, None)
        suspected = seq in self._seqs
        self._seqs.discard(seq)
        return suspected
