"""Skip what a client already has of an answer that is generated again.

A choice's outputs are counted until they cover what the client has, and are cut there. The endpoint's formatter gets
the first part if it needs it for its state; the client gets the second.
"""

from __future__ import annotations

from penstock.contract.events import ChoiceDelta
from penstock.contract.places import START, Place, split
from penstock.server.delivery.event_ids import HEADER
from penstock.server.http.failures import HttpRefusal

__all__ = ["CatchUp", "StreamDiffers"]

DIFFERS = 409


class StreamDiffers(HttpRefusal):
    """The answer that was generated again is shorter than what the client already has."""

    def __init__(self) -> None:
        message = f"{HEADER}: this answer is shorter than what that event says; it cannot be resumed. Ask again."
        super().__init__(DIFFERS, message, code="stream_differs", param=HEADER)


class CatchUp:
    """Skips the part of one choice that the client already has. Owned by the task that answers.

    Args:
        place: how much the client has.
        whole: whether to keep all of that part; otherwise deltas that end before `place` are dropped.
    """

    def __init__(self, choice: int, place: Place, *, whole: bool) -> None:
        self._choice = choice
        self._wanted = place
        self._whole = whole
        self._passed = START  # where the dropped deltas end
        self._come = START
        self._deltas: list[ChoiceDelta] = []

    def take(self, delta: ChoiceDelta) -> tuple[ChoiceDelta, ChoiceDelta] | None:
        """Add a delta; once the client's part is complete, return that part and the rest. Do not call it after that."""
        self._come = self._come.past(delta)
        if not self._whole and not self._deltas and self._wanted.reaches(self._come) and self._wanted != self._come:
            self._passed = self._come
            return None
        self._deltas.append(delta)
        if not self._come.reaches(self._wanted):
            return None
        return split(self._choice, self._deltas, self._wanted.behind(self._passed))

    def check_end(self) -> None:
        """Check, at the end of the choice, that it is as long as the client's part.

        Raises:
            StreamDiffers: the client has more than the whole choice.
        """
        if not self._come.reaches(self._wanted):
            raise StreamDiffers
