"""The queue as the engine last showed it, for threads that must not wait for a step to learn that it is full.

The engine looks at what was submitted between two steps only, and a step takes up to a second. What came since it
showed the queue counts as waiting, so no more pass than there is room for. Whoever passes may still be refused by the
engine: its own check (`Admission`) holds, and knows how long the wait is, too. Safe to call from any thread.
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
    """Refuses at once what the queue has no room for. Until it is shown a queue, that is an empty one.

    Args:
        limits: of the queue; how long it takes is left to the engine.
    """

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()  # held for one look, never for a step
        self._parts = QueueParts({}, QueuePart(0, 0, 1), shared=True)
        self._seconds_per_end = 0.0
        self._sequences: Counter[str] = Counter()  # that came since, by tenant
        self._tokens: Counter[str] = Counter()  # of these sequences
        self._refused = 0

    def check(self, tenant: str) -> None:
        """Make sure that there is room for the least that this tenant could ask for: one sequence of one token.

        Raises:
            Overloaded: there is none.
        """
        with self._lock:
            self._check(tenant, 1, 1)

    def add(self, resolved: ResolvedRequest) -> None:
        """Make sure that there is room for a request, which the engine is about to be given, and count it.

        Raises:
            Overloaded: there is none.
        """
        tenant, sequences, tokens = resolved.tenant, len(resolved.sequences), resolved.num_tokens
        with self._lock:
            self._check(tenant, sequences, tokens)
            self._count(tenant, sequences, tokens)

    def show(self, parts: QueueParts, seconds_per_end: float, taken: Iterable[ResolvedRequest] = ()) -> int:
        """The queue is like this now, requests in it or not that were `taken` from those added.

        Returns:
            How many were refused since the last call.
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
