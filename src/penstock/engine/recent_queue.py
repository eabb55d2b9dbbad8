"""The queue as the engine last showed it, for threads that must not wait for a step to learn that it is full.

The engine looks at submitted requests only between two steps, and a step takes up to a second. Requests that came since
it last showed the queue count as waiting, so no more pass than there is room for. The engine may still refuse a request
that passes here: its own check (`Admission`) decides, and also estimates the wait. Safe to call from any thread.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from penstock.contract.errors import Overloaded
from penstock.core.waiting import QueuePart, QueueParts
from penstock.engine.admission import QueueLimits
from penstock.engine.intake import ResolvedRequest

__all__ = ["RecentQueue"]


class RecentQueue:
    """Refuses at once what the queue has no room for. Until the first `show`, the queue is taken as empty.

    Args:
        limits: limits of the queue; the limit on the wait is left to the engine.
    """

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()  # held for one check, never for a step
        self._parts = QueueParts({}, QueuePart(0, 0, 1), shared=True)
        self._seconds_per_end = 0.0
        self._sequences: Counter[str] = Counter()  # submitted since the last `show`, by tenant
        self._tokens: Counter[str] = Counter()  # of these sequences
        self._refused = 0

    def check(self, tenant: str) -> None:
        """Make sure that there is room for the smallest request of this tenant: one sequence of one token.

        Raises:
            Overloaded: there is no room.
        """
        with self._lock:
            self._check(tenant, 1, 1)

    def add(self, resolved: ResolvedRequest) -> None:
        """Make sure that there is room for a request that is about to be given to the engine, and count it.

        Raises:
            Overloaded: there is no room.
        """
        tenant, sequences, tokens = resolved.tenant, len(resolved.sequences), resolved.num_tokens
        with self._lock:
            self._check(tenant, sequences, tokens)
            self._count(tenant, sequences, tokens)

    def show(self, parts: QueueParts, seconds_per_end: float, taken: Iterable[ResolvedRequest] = ()) -> int:
        """Set the queue's present state. The engine has taken the requests `taken` among those added, queued or not.

        Returns:
            How many requests were refused since the last call.
        """
        with self._lock:
            self._parts, self._seconds_per_end = parts, seconds_per_end
            for each in taken:
                self._count(each.tenant, -len(each.sequences), -each.num_tokens)
            refused, self._refused = self._refused, 0
        return refused

    def _check(self, tenant: str, sequences: int, tokens: int) -> None:
        part = self._parts.of(tenant)
        if self._parts.shared:
            coming, coming_tokens = self._sequences.total(), self._tokens.total()
        else:
            coming, coming_tokens = self._sequences[tenant], self._tokens[tenant]
        part = QueuePart(part.sequences + coming, part.tokens + coming_tokens, part.parts)
        try:
            self._limits.check(part, sequences, tokens, self._seconds_per_end)
        except Overloaded:
            self._refused += 1
            raise

    def _count(self, tenant: str, sequences: int, tokens: int) -> None:
        self._sequences[tenant] += sequences
        self._tokens[tenant] += tokens
        if not self._sequences[tenant]:
            del self._sequences[tenant], self._tokens[tenant]
