"""The ids of a stream's events: which answer, and how much of it whoever has the event has.

`<answer's id>:<position>`. A position is written for this server alone; to clients it is opaque. Of an answer in chunks
it is the place in each choice, `tokens.text` or `tokens.text.reasoning.calls` with an `e` behind it once the choice has
ended, joined by `-`; then `usage`, then `end`. Of an answer in named events it is the place in the only choice, and how
many events that say nothing new of it, and events at all, were sent: `tokens.text/structure.events`; then `end`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from penstock.contract.errors import InvalidParameter
from penstock.contract.events import ChoiceDelta
from penstock.server.delivery.places import START, Place

__all__ = ["END", "HEADER", "USAGE", "ChunkIds", "ChunkPosition", "NamedPosition", "Progress", "id_line"]

HEADER = "Last-Event-ID"
END = "end"
USAGE = "usage"
_COUNT = "([0-9]{1,12})"
_PLACE = rf"{_COUNT}\.{_COUNT}(?:\.{_COUNT}\.{_COUNT})?"
_CHOICE = re.compile(rf"{_PLACE}(e?)")
_NAMED = re.compile(rf"{_PLACE}/{_COUNT}\.{_COUNT}")


class Progress(NamedTuple):
    """How far one choice has come; a choice of which nothing was said has none."""

    place: Place = START
    ended: bool = False


@dataclass(frozen=True, slots=True)
class ChunkPosition:
    """What somebody has of an answer in chunks.

    Attributes:
        choices: index -> how far, of the choices that have begun.
        usage: whether the usage has come, so that `[DONE]` alone is left.
    """

    choices: dict[int, Progress]
    usage: bool = False

    @classmethod
    def read(cls, position: str, num_choices: int) -> ChunkPosition:
        """The position in an event's id; "" for the beginning.

        Raises:
            InvalidParameter: no event of such an answer has it.
        """
        if position in (USAGE, END):
            return cls({}, usage=True)
        written = position.split("-") if position else [""] * num_choices
        if len(written) != num_choices:
            raise _unknown()
        return cls({index: _read_progress(each) for index, each in enumerate(written) if each})


class NamedPosition(NamedTuple):
    """What somebody has of an answer in named events.

    Attributes:
        structure: events that say nothing new of the choice.
        events: all events.
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
    """A place as it stands in an id."""
    tokens, text, reasoning, calls = place
    return f"{tokens}.{text}.{reasoning}.{calls}" if reasoning or calls else f"{tokens}.{text}"


class ChunkIds:
    """The id lines of an answer in chunks, as it goes on. Owned by the task that answers.

    Args:
        had: what the client has already.

    Attributes:
        usage: the line of the usage.
        end: the line of `[DONE]`.
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
        """A choice says something: whether it is the first that it says."""
        if choice in self._places:
            return False
        self._places[choice] = START
        self._written[choice] = write_place(START)
        return True

    def text_begun(self, choice: int) -> int:
        """Characters of a choice's text that have been said."""
        return self._places.get(choice, START).text

    def advance(self, delta: ChoiceDelta) -> None:
        """More of a choice has been said."""
        choice = delta.choice
        self._places[choice] = place = self._places[choice].past(delta)
        self._written[choice] = write_place(place)

    def finish(self, choice: int) -> None:
        """A choice has ended."""
        self._written[choice] += "e"

    def here(self) -> bytes:
        """The line of an event that says the last that was told."""
        return f"{self._stem}{'-'.join(self._written)}\n".encode()


def id_line(answer_id: str, position: str) -> bytes:
    """The line of an event with its id."""
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
