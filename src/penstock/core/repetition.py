"""Whether generated tokens end in a loop: the same few tokens, over and over."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["loops"]


def loops(tokens: Sequence[int], start: int, shortest: int, longest: int, count: int) -> bool:
    """Whether `tokens[start:]` ends in `count` copies of one pattern of `shortest` to `longest` tokens."""
    most = min(longest, (len(tokens) - start) // count)
    return any(_repeats(tokens, size, size * (count - 1)) for size in range(shortest, most + 1))


def _repeats(tokens: Sequence[int], period: int, span: int) -> bool:
    """Whether each of the last `span` tokens is the one `period` places before it; usually the first is not."""
    end = len(tokens) - 1
    return all(tokens[end - back] == tokens[end - back - period] for back in range(span))
