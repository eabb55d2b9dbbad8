"""How much of a choice a client has, measured independently of how the choice was cut into pieces.

Outputs that wait for a slow reader are joined, so the events of two runs of one request may be cut in different places.
Their total is the same: a `Place` counts it, so that two runs can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from penstock.contract.events import ChoiceDelta
from penstock.contract.tools import CallPiece

__all__ = ["MOST_TOKENS", "START", "Place", "in_parts", "split"]


class Place(NamedTuple):
    """How much of one choice has come.

    Attributes:
        tokens: number of tokens.
        text: characters of text.
        reasoning: characters of reasoning.
        calls: characters of the calls' arguments, plus one for each call that has begun.
    """

    tokens: int = 0
    text: int = 0
    reasoning: int = 0
    calls: int = 0

    def past(self, delta: ChoiceDelta) -> Place:
        """The place after `delta`."""
        tokens, text, reasoning, calls = self
        if delta.reasoning or delta.calls:  # few deltas of plain text have either
            reasoning += len(delta.reasoning)
            calls += sum(map(_size, delta.calls))
        return Place(tokens + len(delta.tokens), text + len(delta.text), reasoning, calls)

    def plus(self, *, text: int = 0, reasoning: int = 0, calls: int = 0) -> Place:
        """The place after so many more characters."""
        return Place(self.tokens, self.text + text, self.reasoning + reasoning, self.calls + calls)

    def behind(self, other: Place) -> Place:
        """How far this place is past an earlier one."""
        return Place(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))

    def reaches(self, other: Place) -> bool:
        """Whether this place includes all of `other`."""
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))


START = Place()

MOST_TOKENS = 64
"""Most tokens in one event; with 20 alternatives to each, and their bytes, that is 100 KB."""


def split(choice: int, deltas: Iterable[ChoiceDelta], place: Place) -> tuple[ChoiceDelta, ChoiceDelta]:
    """Join a choice's deltas and split them in two: up to `place`, counted from the first delta, and from there on."""
    whole = ChoiceDelta(choice, "", ())
    parts = list(deltas)
    calls = [piece for delta in parts for piece in delta.calls]
    tokens = tuple(token for delta in parts for token in delta.tokens)
    text, reasoning = "".join(delta.text for delta in parts), "".join(delta.reasoning for delta in parts)
    before_calls, after_calls = _split_calls(calls, place.calls)
    before = whole._replace(
        text=text[: place.text],
        tokens=tokens[: place.tokens],
        reasoning=reasoning[: place.reasoning],
        calls=before_calls,
        # These are final with the first text after the reasoning, wherever in the reasoning the place is.
        reasoning_tokens=sum(delta.reasoning_tokens for delta in parts),
    )
    after = whole._replace(
        text=text[place.text :],
        tokens=tokens[place.tokens :],
        reasoning=reasoning[place.reasoning :],
        calls=after_calls,
    )
    return before, after


def in_parts(delta: ChoiceDelta, begun: int) -> Iterator[ChoiceDelta]:
    """Split a delta into parts of at most `MOST_TOKENS` tokens, so that a slow reader's events stay bounded in size.

    Args:
        delta: one with calls, or with both reasoning and text, stays whole: their order would be lost.
        begun: characters of the choice's text before it.
    """
    if delta.calls or (delta.reasoning and delta.text):
        yield delta
        return
    count, text, reasoning = len(delta.tokens), 0, 0
    for first in range(0, count, MOST_TOKENS):
        end = min(first + MOST_TOKENS, count)
        to = len(delta.text) if end == count else delta.tokens[end].start - begun
        if not text <= to <= len(delta.text):  # a parsed answer: its tokens' starts refer to the text before parsing
            to = max(text, len(delta.text) * end // count)
        thought = len(delta.reasoning) * end // count
        yield ChoiceDelta(
            delta.choice,
            delta.text[text:to],
            delta.tokens[first:end],
            delta.reasoning[reasoning:thought],
            reasoning_tokens=0 if first else delta.reasoning_tokens,
        )
        text, reasoning = to, thought


def _size(piece: CallPiece) -> int:
    return bool(piece.id) + len(piece.arguments)


def _split_calls(pieces: Sequence[CallPiece], size: int) -> tuple[tuple[CallPiece, ...], tuple[CallPiece, ...]]:
    before: list[CallPiece] = []
    after: list[CallPiece] = []
    for piece in pieces:
        own = _size(piece)
        if own <= size:
            before.append(piece)
        elif size == 0:
            after.append(piece)
        else:
            said = size - bool(piece.id)
            before.append(replace(piece, arguments=piece.arguments[:said]))
            after.append(CallPiece(piece.index, "", "", piece.arguments[said:]))
        size = max(0, size - own)
    return tuple(before), tuple(after)
