"""Learns how fast an engine reads prompts, by looking at its counters now and then."""

from __future__ import annotations

__all__ = ["ReadingRate"]

_REMEMBERED = 60.0
"""Seconds of reading after which earlier ones count half as much."""


class ReadingRate:
    """Counts what was computed between two looks that both found prompts to read: the engine then read all the time.

    Tokens that were generated meanwhile count as read; compared with a prompt they are few. An engine that never has
    prompts left from one look to the next reads too fast to be measured this way, and too fast for it to matter.
    """

    def __init__(self) -> None:
        self._looked: float | None = None  # time of the last look; None if nothing was left to read
        self._computed = 0
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Prompt tokens read per second; 0.0 while unknown."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    def look(self, now: float, backlog_seconds: float, computed_tokens: int) -> None:
        """Take a look.

        Args:
            now: seconds, on a clock that does not jump.
            backlog_seconds: seconds until the engine has read all its prompts; above 0 if it has any.
            computed_tokens: positions that the engine has computed since it was started.
        """
        reading = backlog_seconds > 0
        if reading and self._looked is not None and now > self._looked:
            self._tokens += computed_tokens - self._computed
            self._seconds += now - self._looked
            if self._seconds > _REMEMBERED:
                self._tokens, self._seconds = self._tokens / 2, self._seconds / 2
        self._looked, self._computed = (now, computed_tokens) if reading else (None, computed_tokens)
