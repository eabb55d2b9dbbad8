"""The ids of a stream's events: each names the answer, and how much of it a client with this event has.

The form is `<answer's id>:<position>`; a position is opaque to clients. In an answer in chunks it is the place in each
choice, joined by `-`: `tokens.text` or `tokens.text.reasoning.calls`, and `e` after it once the choice has ended; then
`usage`, then `end`. In an answer in named events it is `<place>/structure.events`: the place in the only choice, the
number of structure events so far (they add nothing to the choice), and the number of all events; then `end`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from penstock.contract.errors import InvalidParameter
from penstock.contract.events import ChoiceDelta
from penstock.contract.places import START, Place

__all__ = ["END", "HEADER", "USAGE", "ChunkIds", "ChunkPosition", "NamedPosition", "Progress", "id_line"]

HEADER = "Last-Event-ID"
END = "end"
USAGE = "usage"
_COUNT = "([0-9]{1,12})"
_PLACE = rf"{_COUNT}\.{_COUNT}(?:\.{_COUNT}\.{_COUNT})?"
_CHOICE = re.compile(rf"{_PLACE}(e?)")
_NAMED = re.compile(rf"{_PLACE}/{_COUNT}\.{_COUNT}")


class Progress(NamedTuple):
    """How much of one choice was sent; a choice that has not begun has none."""

    place: Place = START
    ended: bool = False


@dataclass(frozen=True, slots=True)
class ChunkPosition:
    """What a client has of an answer in chunks.

    Attributes:
        choices: index -> progress, of the choices that have begun.
        usage: whether the client has the usage, so that only `[DONE]` is left.
    """

    choices: dict[int, Progress]
    usage: bool = False

    @classmethod
    def read(cls, position: str, num_choices: int) -> ChunkPosition:
        """Parse the position in an event's id; "" is the beginning.

        Raises:
            InvalidParameter: no event of such an answer has this position.
        """
        if position in (USAGE, END):
            return cls({}, usage=True)
        written = position.split("-") if position else [""] * num_choices
        if len(written) != num_choices:
            raise _unknown()
        return cls({index: _read_progress(each) for index, each in enumerate(written) if each})


class NamedPosition(NamedTuple):
    """What a client has of an answer in named events.

    Attributes:
        structure: number of events that add nothing to the choice.
        events: number of all events.
    """

    place: Place = START
    structure: int = 0
    events: int = 0

    @classmethod
    def read(cls, position: str) -> NamedPosition:
        """As `ChunkPosition.read`."""
        if position in ("", END):
            return cls()
        match = _NAMED.fullmatch(position)
        if match is None:
            raise _unknown()
        *place, structure, events = match.groups()
        return cls(_place(place), int(structure), int(events))

    def __str__(self) -> str:
        return f"{write_place(self.place)}/{self.structure}.{self.events}"


def write_place(place: Place) -> str:
    """Format a place for an id."""
    tokens, text, reasoning, calls = place
    return f"{tokens}.{text}.{reasoning}.{calls}" if reasoning or calls else f"{tokens}.{text}"


class ChunkIds:
    """The id lines of an answer in chunks as it progresses. Owned by the task that answers.

    Args:
        had: what the client already has.

    Attributes:
        usage: the id line of the usage.
        end: the id line of `[DONE]`.
    """

    def __init__(self, answer_id: str, num_choices: int, had: ChunkPosition) -> None:
        self.usage = id_line(answer_id, USAGE)
        self.end = id_line(answer_id, END)
        self._stem = f"id: {answer_id}:"
        self._places = {index: progress.place for index, progress in had.choices.items()}
        self._written = [""] * num_choices
        for index, progress in had.choices.items():
            self._written[index] = write_place(progress.place) + "e" * progress.ended

    def begin(self, choice: int) -> bool:
        """Note that a choice has something to send; return whether it is the choice's first."""
        if choice in self._places:
            return False
        self._places[choice] = START
        self._written[choice] = write_place(START)
        return True

    def text_begun(self, choice: int) -> int:
        """Characters of a choice's text that were sent."""
        return self._places.get(choice, START).text

    def advance(self, delta: ChoiceDelta) -> None:
        """Advance a choice past `delta`."""
        choice = delta.choice
        self._places[choice] = place = self._places[choice].past(delta)
        self._written[choice] = write_place(place)

    def finish(self, choice: int) -> None:
        """Mark a choice as ended."""
        self._written[choice] += "e"

    def here(self) -> bytes:
        """The id line of an event at the present position."""
        return f"{self._stem}{'-'.join(self._written)}\n".encode()


def id_line(answer_id: str, position: str) -> bytes:
    """The id line of an event."""
    return f"id: {answer_id}:{position}\n".encode()


def _read_progress(written: str) -> Progress:
    match = _CHOICE.fullmatch(written)
    if match is None:
        raise _unknown()
    *place, ended = match.groups()
    return Progress(_place(place), bool(ended))


def _place(counts: list[str | None]) -> Place:
    return Place(*(int(each or 0) for each in counts))


def _unknown() -> InvalidParameter:
    return InvalidParameter(HEADER, f"{HEADER} must be the id of an event of this answer.", code="unknown_event")
