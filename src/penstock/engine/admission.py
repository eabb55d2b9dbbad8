"""Whether a request is taken now: how many may wait, how many tokens, and for how long.

Decides what is refused as `Overloaded`, and after how many seconds it is worth another try. Knows nothing of requests
that can never be served: those the scheduler refuses. Owned by the engine's loop.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from penstock.contract.errors import Overloaded, RefusalCause
from penstock.contract.measurements import Timings
from penstock.core import Scheduler
from penstock.engine.intake import ResolvedRequest
from penstock.engine.retry_after import LONGEST, EndRate

__all__ = ["Admission", "QueueLimits"]


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may wait.

    Attributes:
        sequences: at most. Where tenants have shares, they have parts of this, and one part is kept free for who comes.
        tokens: of them, in all; an empty queue takes a request of any length.
        seconds: that a newcomer may have to wait before its prompt is read, as far as that can be told; 0 for any.
    """

    sequences: int = sys.maxsize
    tokens: int = sys.maxsize
    seconds: int = 0


class Admission:
    """Refuses what the queue cannot take now.

    Args:
        scheduler: whose queue it is; only looked at.
        limits: of that queue.
    """

    def __init__(self, scheduler: Scheduler, limits: QueueLimits) -> None:
        self._scheduler = scheduler
        self._limits = limits
        self._ends = EndRate()

    def ended(self, timings: Timings) -> None:
        """A request is over."""
        self._ends.ended(timings.ended - timings.admitted)

    def check(self, resolved: ResolvedRequest) -> None:
        """Make sure that the request may wait.

        Raises:
            Overloaded: it may not; says why, and when to try again.
        """
        waiting, waiting_tokens, parts = self._scheduler.queue_part(resolved.sequences[0].tenant)
        sequences, tokens = self._limits.sequences // parts, self._limits.tokens // parts
        whose = "the queue takes" if parts == 1 else "your part of the queue takes"
        if waiting + len(resolved.sequences) > max(sequences, 1):
            message = f"{waiting} sequences are waiting already; {whose} {sequences}."
            raise _overloaded(RefusalCause.QUEUE_SEQUENCES, message, self._seconds_until(waiting))
        if waiting and waiting_tokens + _tokens(resolved) > tokens:
            message = f"{waiting_tokens} tokens are waiting already; {whose} {tokens}."
            raise _overloaded(RefusalCause.QUEUE_TOKENS, message, self._seconds_until(waiting))
        if (self._limits.seconds or resolved.max_seconds) and self._scheduler.has_work:
            self._check_wait(resolved)

    def _check_wait(self, resolved: ResolvedRequest) -> None:
        """Hold the wait to what the queue takes, and to what the caller allows for the whole answer."""
        wait, most, own = self._wait(resolved), self._limits.seconds, resolved.max_seconds
        beginning = f"It would take about {math.ceil(wait)} s to begin this"
        if most and wait > most:
            raise _overloaded(RefusalCause.QUEUE_SECONDS, f"{beginning}; the queue takes {most} s.", wait - most)
        if own and wait > own:
            raise _overloaded(RefusalCause.OWN_TIMEOUT, f"{beginning}, and it may take {own:g} s in all.", wait - own)

    def _wait(self, resolved: ResolvedRequest) -> float:
        """Seconds until it is begun: what is before it is read while others end, and the longer of both counts."""
        backlog = self._scheduler.backlog(resolved.sequences[0])
        return max(backlog.seconds, self._seconds_until(backlog.ends))

    def _seconds_until(self, ends: int) -> float:
        """Seconds until so many of those that run have ended; 0.0 while nothing is known."""
        return self._ends.seconds_until(ends, self._scheduler.num_running)


def _overloaded(cause: RefusalCause, message: str, seconds: float) -> Overloaded:
    return Overloaded(message, retry_after=max(1, min(LONGEST, math.ceil(seconds))), cause=cause)


def _tokens(resolved: ResolvedRequest) -> int:
    return resolved.prompt_tokens * len(resolved.sequences)
