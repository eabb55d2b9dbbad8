"""Splits a model's reasoning from its answer while both arrive: `<think> ... </think>`, then the answer.

Gemma 4 writes other tags: its `<|channel>` is followed by the channel's name, and `thought` is the only named channel.

Reasoning comes at most once, and first; white space around the tags belongs to neither side. Holds back only what may
still be a tag or white space next to one. Does not know tokens or calls.
Invariant: the split depends on the text alone, not on how it is cut into pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

__all__ = ["GEMMA4_TAGS", "THINK_TAGS", "ReasoningSplit", "ThinkTags", "leaves_open", "partial_suffix"]


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """The tags around reasoning.

    Attributes:
        control: the part of the opening that models write as a control token; "" for all of it.
    """

    opening: str
    closing: str
    control: str = ""

    @property
    def markers(self) -> tuple[str, str]:
        """Spellings that must reach the parser even where the model writes them as control tokens."""
        return self.control or self.opening, self.closing


THINK_TAGS = ThinkTags("<think>", "</think>")
GEMMA4_TAGS = ThinkTags("<|channel>thought", "<channel|>", control="<|channel>")


def leaves_open(prompt: str, tags: ThinkTags = THINK_TAGS) -> bool:
    """Whether `prompt` ends inside reasoning, so that the model continues it."""
    return prompt.rfind(tags.opening) > prompt.rfind(tags.closing)


class _Place(Enum):
    BEFORE = auto()
    INSIDE = auto()
    BEHIND = auto()
    """After the closing tag, in the blank space that follows it."""
    ANSWER = auto()


class ReasoningSplit:
    """Parses one answer. Owned by the choice that it belongs to.

    Args:
        opened: whether the prompt has already written the opening tag.
        tags: the tags around reasoning.

    Attributes:
        end: number of characters of the answer, tags and space included, that are reasoning so far.
    """

    __slots__ = ("_held", "_place", "_seen", "_space", "_started", "_tags", "end")

    def __init__(self, *, opened: bool, tags: ThinkTags = THINK_TAGS) -> None:
        self._tags = tags
        self._place = _Place.INSIDE if opened else _Place.BEFORE
        self._held = ""  # may be the start of a tag
        self._space: list[str] = []  # emitted with the text that follows; dropped if a tag follows
        self._started = False
        self._seen = 0
        self.end = 0

    @property
    def over(self) -> bool:
        """Whether no more reasoning can come."""
        return self._place in (_Place.BEHIND, _Place.ANSWER)

    @property
    def inside(self) -> bool:
        """Whether what comes next is reasoning, or the closing tag."""
        return self._place is _Place.INSIDE

    @property
    def closing_begun(self) -> int:
        """Length of the part of the closing tag that the reasoning so far may end with."""
        return len(self._held) if self.inside else 0

    def push(self, text: str) -> tuple[str, str]:
        """Parse the next piece of the answer; return (reasoning, answer)."""
        self._seen += len(text)
        if self._place is _Place.BEFORE:
            text = self._before(text)
        reasoning = ""
        if self._place is _Place.INSIDE:
            reasoning, text = self._inside(text)
        if self._place is _Place.BEHIND:
            text = text.lstrip()
            if text:
                self._place = _Place.ANSWER
        return reasoning, text if self._place is _Place.ANSWER else ""

    def finish(self) -> tuple[str, str]:
        """End the answer; return what was held back, as (reasoning, answer)."""
        held, self._held = self._held, ""
        if self._place is _Place.INSIDE:
            held = self._trimmed(held)
        rest = "".join(self._space)
        self._space = []
        return (held + rest, "") if self._place is _Place.INSIDE else ("", rest + held)

    def _before(self, text: str) -> str:
        """Wait until it is clear whether the answer begins with the opening tag; return what follows it, or all."""
        text, self._held = self._held + text, ""
        begun = text.lstrip()
        if begun.startswith(self._tags.opening):
            self._space, self._place = [], _Place.INSIDE
            return begun[len(self._tags.opening) :]
        self._space.append(text[: len(text) - len(begun)])
        if self._tags.opening.startswith(begun):
            self._held = begun
            return ""
        before, self._space, self._place = "".join(self._space), [], _Place.ANSWER
        return before + begun

    def _inside(self, text: str) -> tuple[str, str]:
        text = self._held + text
        body, tag, rest = text.partition(self._tags.closing)
        if tag:
            said = self._trimmed(body)
            self._held, self._space, self._place = "", [], _Place.BEHIND
            self.end = self._seen - len(rest)
            return said, rest
        keep = partial_suffix(text, (self._tags.closing,))
        self._held = text[len(text) - keep :]
        self.end = self._seen
        return self._trimmed(text[: len(text) - keep]), ""

    def _trimmed(self, text: str) -> str:
        """`text` without the white space at either end of the reasoning; trailing space is kept until text follows."""
        if not self._started:
            text = text.lstrip()
        body = text.rstrip()
        if not body:
            self._space.append(text)
            return ""
        said = "".join([*self._space, body])
        self._space, self._started = [text[len(body) :]], True
        return said


def partial_suffix(text: str, markers: tuple[str, ...]) -> int:
    """Length of the longest suffix of `text` that begins a marker and is shorter than the longest marker."""
    longest = min(max(map(len, markers), default=1) - 1, len(text))
    return next(
        (size for size in range(longest, 0, -1) if any(m.startswith(text[len(text) - size :]) for m in markers)), 0
    )
