"""Passing over what a client has of an answer that is generated again.

A choice's outputs are counted until they hold all that the client has. Then they are cut there: an endpoint's formatter
is told the first part for its own sake, where it needs it, and the client the second.
"""

from __future__ import annotations

from penstock.contract.events import ChoiceDelta
from penstock.server.delivery.event_ids import HEADER
from penstock.server.delivery.places import START, Place, split
from penstock.server.http.failures import HttpRefusal

__all__ = ["CatchUp", "StreamDiffers"]

DIFFERS = 409


class StreamDiffers(HttpRefusal):
    """The answer that was generated again is not the one that the client has the beginning of."""

    def __init__(self) -> None:
        message = f"{HEADER}: this answer is shorter than what that event says; it cannot be resumed. Ask again."
        super().__init__(DIFFERS, message, code="stream_differs", param=HEADER)


class CatchUp:
    """The part of one choice that a client has, while it is generated again. Owned by the task that answers.

    Args:
        place: how much the client has.
        whole: whether the first part is wanted; else only what of it comes together with the second is kept.
    """

    def __init__(self, choice: int, place: Place, *, whole: bool) -> None:
        self._choice = choice
        self._wanted = place
        self._whole = whole
        self._passed = START  # of the deltas that are not kept
        self._come = START
        self._deltas: list[ChoiceDelta] = []

    def take(self, delta: ChoiceDelta) -> tuple[ChoiceDelta, ChoiceDelta] | None:
        """What the client has and what it lacks, once the former is complete. Not to be called again then."""
        self._come = self._come.past(delta)
        if not self._whole and not self._deltas and self._wanted.reaches(self._come) and self._wanted != self._come:
            self._passed = self._come
            return None
        self._deltas.append(delta)
        if not self._come.reaches(self._wanted):
            return None
        return split(self._choice, self._deltas, self._wanted.behind(self._passed))

    def check_end(self) -> None:
        """The choice has ended before it was complete.

        Raises:
            StreamDiffers: the client has more than there is.
        """
        if not self._come.reaches(self._wanted):
            raise StreamDiffers
