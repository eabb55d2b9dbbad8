"""Finds stop strings in streamed text, and holds back only what may still become one.

The match that ends first wins; if several end together, the longest. A generation that checked every stop string
after every character would stop in the same place, so the result does not depend on how the text is cut into pieces.

The search is an automaton over all stop strings at once (Aho and Corasick, 1975): one transition per character, and
the depth of the current state is the length of the longest suffix that may still become a stop string.

Does not know tokens. Invariant: everything emitted is final; text = emitted + held, until a match.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.contract.errors import InvalidParameter

__all__ = ["StopScan", "StopStrings"]


@dataclass(frozen=True, slots=True)
class StopScan:
    """The result of scanning one piece of text.

    Attributes:
        emit: text that is final, in order; never cut or taken back later.
        matched: the stop string that ended the text; None if none has matched yet.
    """

    emit: str
    matched: str | None = None


class StopStrings:
    """Searches one sequence's text. Owned by the code that streams that sequence; not shared between threads.

    Args:
        strings: the stop strings; with none, every piece is emitted at once.
        include: emit the matched string too; the text after it is dropped either way.

    Raises:
        InvalidParameter: a stop string is empty.
    """

    __slots__ = ("_depth", "_fallback", "_held", "_include", "_longest", "_matched", "_next", "_state")

    def __init__(self, strings: Sequence[str], *, include: bool = False) -> None:
        if "" in strings:
            raise InvalidParameter("stop", "a stop string must not be empty")
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._longest: list[str | None] = [None]
        for string in strings:
            self._add(string)
        self._fallback = [0] * len(self._next)
        self._link()
        self._include = include
        self._state = 0
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> StopScan:
        """Scan the next piece of text. After a match, further text is dropped and the match is reported again."""
        if self._matched is not None:
            return StopScan("", self._matched)
        if len(self._next) == 1:  # no stop strings
            return StopScan(text)
        seen = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            self._state = self._move(self._state, character)
            matched = self._longest[self._state]
            if matched is not None:
                return self._stop(seen, end, matched)
        final = len(seen) - self._depth[self._state]
        self._held = seen[final:]
        return StopScan(seen[:final])

    def flush(self) -> str:
        """End the text; return what was held back for a match that never came."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _stop(self, seen: str, end: int, matched: str) -> StopScan:
        self._matched, self._held = matched, ""
        return StopScan(seen[: end if self._include else end - len(matched)], matched)

    def _move(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)

    def _add(self, string: str) -> None:
        state = 0
        for character in string:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._longest.append(None)
            state = self._next[state][character]
        self._longest[state] = string

    def _link(self) -> None:
        """Link each state to that of its longest proper suffix; a state without a match inherits the match there."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                self._fallback[child] = self._move(self._fallback[state], character)
                if self._longest[child] is None:
                    self._longest[child] = self._longest[self._fallback[child]]
                queue.append(child)
