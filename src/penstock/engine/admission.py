"""Whether a request is accepted now: how many may wait, with how many tokens, and for how long.

Decides what is refused as `Overloaded`, and when to try again. The scheduler refuses requests that can never be served.
Owned by the engine's loop.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from penstock.contract.errors import Overloaded, RefusalCause
from penstock.contract.measurements import Timings
from penstock.contract.request import SequenceRequest
from penstock.core import Scheduler
from penstock.core.waiting import QueuePart, QueueParts
from penstock.engine.intake import ResolvedRequest
from penstock.engine.retry_after import LONGEST, EndRate

__all__ = ["Admission", "QueueLimits"]

_SHORT = SequenceRequest("", (0,))
"""The smallest possible request."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait.

    Attributes:
        sequences: the most sequences. If tenants have shares, each has a part, and one part is kept free for newcomers.
        tokens: the most tokens in all; an empty queue takes a request of any length.
        seconds: the longest estimated wait until the prompt of a new request is read; 0 for no limit.
    """

    sequences: int = sys.maxsize
    tokens: int = sys.maxsize
    seconds: int = 0

    def check(self, part: QueuePart, sequences: int, tokens: int, seconds_per_end: float) -> None:
        """Make sure that `part` has room for `sequences` more sequences with `tokens` tokens together.

        Args:
            part: the part of the queue that belongs to the new request's tenant.
            sequences: number of new sequences.
            tokens: number of tokens of all new sequences together.
            seconds_per_end: time until a running sequence ends, on average; for `Retry-After`.

        Raises:
            Overloaded: the part has no room.
        """
        most_sequences, most_tokens = self.sequences // part.parts, self.tokens // part.parts
        whose = "the queue takes" if part.parts == 1 else "your part of the queue takes"
        until_empty = part.sequences * seconds_per_end
        if part.sequences + sequences > max(most_sequences, 1):
            message = f"{part.sequences} sequences are waiting already; {whose} {most_sequences}."
            raise _overloaded(RefusalCause.QUEUE_SEQUENCES, message, until_empty)
        if part.sequences and part.tokens + tokens > most_tokens:
            message = f"{part.tokens} tokens are waiting already; {whose} {most_tokens}."
            raise _overloaded(RefusalCause.QUEUE_TOKENS, message, until_empty)


class Admission:
    """Refuses what the queue cannot accept now.

    Args:
        scheduler: owner of the queue; only read.
        limits: limits of that queue.
    """

    def __init__(self, scheduler: Scheduler, limits: QueueLimits) -> None:
        self._scheduler = scheduler
        self._limits = limits
        self._ends = EndRate()

    def ended(self, timings: Timings) -> None:
        """A request has ended."""
        self._ends.ended(timings.ended - timings.admitted)

    def check(self, resolved: ResolvedRequest) -> None:
        """Make sure that the request may wait.

        Raises:
            Overloaded: it may not wait; says why, and when to try again.
        """
        part = self._scheduler.queue_part(resolved.tenant)
        self._limits.check(part, len(resolved.sequences), resolved.num_tokens, self._seconds_until(1))
        if (self._limits.seconds or resolved.max_seconds) and self._scheduler.has_work:
            self._check_wait(resolved)

    def look(self) -> tuple[QueueParts, float]:
        """The queue now, and the seconds until a running sequence ends, on average; for `RecentQueue`."""
        return self._scheduler.queue_parts(), self._seconds_until(1)

    def waiting_seconds(self) -> tuple[float, float]:
        """Seconds until all accepted prompts are read, and until a short request that came now would be started."""
        backlog = self._scheduler.backlog(_SHORT)
        return backlog.seconds, max(backlog.seconds, self._seconds_until(backlog.ends))

    def _check_wait(self, resolved: ResolvedRequest) -> None:
        """Refuse if the wait would exceed the queue's limit or the time that the caller allows for the whole answer."""
        wait, most, own = self._wait(resolved), self._limits.seconds, resolved.max_seconds
        beginning = f"It would take about {math.ceil(wait)} s to begin this"
        if most and wait > most:
            raise _overloaded(RefusalCause.QUEUE_SECONDS, f"{beginning}; the queue takes {most} s.", wait - most)
        if own and wait > own:
            raise _overloaded(RefusalCause.OWN_TIMEOUT, f"{beginning}, and it may take {own:g} s in all.", wait - own)

    def _wait(self, resolved: ResolvedRequest) -> float:
        """Seconds until a request starts: until all prompts ahead of it are read and enough sequences have ended."""
        backlog = self._scheduler.backlog(resolved.sequences[0])
        return max(backlog.seconds, self._seconds_until(backlog.ends))

    def _seconds_until(self, ends: int) -> float:
        """Seconds until `ends` running sequences have ended; 0.0 while unknown."""
        return self._ends.seconds_until(ends, self._scheduler.num_running)


def _overloaded(cause: RefusalCause, message: str, seconds: float) -> Overloaded:
    return Overloaded(message, retry_after=max(1, min(LONGEST, math.ceil(seconds))), cause=cause)
