"""How much one answer may think: a plain value, so that a plan that carries it can be printed, written and replayed."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ThinkingBudget"]


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """A bound on the reasoning of one sequence. Made by `engine`, read by `text`; other rooms pass it on unread.

    Attributes:
        tokens: most tokens that may begin between the tags around the reasoning; then the closing tag is written.
        opened: whether the prompt already contains the opening tag.
        spelled: ids of control tokens that count as text, ascending: the tags, if they are control tokens.
    """

    tokens: int
    opened: bool = False
    spelled: tuple[int, ...] = ()
