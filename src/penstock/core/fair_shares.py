"""Waiting sequences of several tenants, in the order that gives each tenant its share.

Virtual token counters (Sheng et al. 2024, "Fairness in Serving Large Language Models", algorithm 2): each tenant has a
counter of what was computed for it, and the one with the smallest goes first. A tenant that comes back after a pause
begins no lower than those that wait, so that nobody saves up. What the prefix cache gave costs nothing.

Decides order only. Invariant: the same calls in the same order give the same order of sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from penstock.contract.request import SequenceRequest
from penstock.core.policy import Rank, SeqList
from penstock.core.sequence import Seq
from penstock.core.waiting import QueuePart, QueueParts

__all__ = ["GENERATED_WEIGHT", "FairQueue"]

GENERATED_WEIGHT = 2
"""A generated token counts as so many of a prompt, as in the paper: it takes a step of its own."""

_MANY = 64
"""Counters that are kept without a look at who needs one."""


class FairQueue:
    """Sequences that wait, tenant by tenant in order of arrival, and the tenants' counters: one for each API key."""

    __slots__ = ("_counters", "_last", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[str, SeqList] = {}  # of tenants that have any
        self._counters: dict[str, float] = {}
        self._last = ""  # the tenant that left the queue last

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Seq]:
        for seqs in self._waiting.values():
            yield from seqs

    def __contains__(self, seq: Seq) -> bool:
        return seq.request.tenant in self._waiting and seq in self._waiting[seq.request.tenant]

    def in_order(self) -> Iterator[Seq]:
        """See `WaitingQueue`; who was taken out meanwhile counts for the order of the rest."""
        passed = dict.fromkeys(self._waiting, 0)
        while True:
            first = [
                (self._counters[of], self._waiting[of][passed[of]].rank, of) for of in passed if self._has(of, passed)
            ]
            if not first:
                return
            tenant = min(first)[2]
            seq = self._waiting[tenant][passed[tenant]]
            yield seq
            if seq in self:
                passed[tenant] += 1

    def part_of(self, tenant: str) -> QueuePart:
        """See `WaitingQueue`: each tenant that waits has a part, and one is kept free for whoever comes."""
        own = self._waiting.get(tenant, ())
        return QueuePart(len(own), sum(len(seq.tokens) for seq in own), len(self._waiting) + (not own) + 1)

    def parts(self) -> QueueParts:
        """See `WaitingQueue`."""
        own = {tenant: self.part_of(tenant) for tenant in self._waiting}
        return QueueParts(own, QueuePart(0, 0, len(own) + 2), shared=False)

    def before(self, request: SequenceRequest, rank: Rank) -> list[Seq]:
        """See `WaitingQueue`; about: of each other tenant one more than of its own."""
        own = [seq for seq in self._waiting.get(request.tenant, ()) if seq.rank < rank]
        others = (seqs for tenant, seqs in self._waiting.items() if tenant != request.tenant)
        return own + [seq for seqs in others for seq in islice(seqs, len(own) + 1)]

    def _has(self, tenant: str, passed: dict[str, int]) -> bool:
        return tenant in self._waiting and passed[tenant] < len(self._waiting[tenant])

    def add(self, seq: Seq) -> None:
        """Put `seq` at its place."""
        tenant = seq.request.tenant
        if tenant not in self._waiting:
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), self._floor())
            self._waiting[tenant] = SeqList()
        self._waiting[tenant].add(seq)

    def remove(self, seq: Seq) -> None:
        """Take `seq` out; it must be in."""
        tenant = seq.request.tenant
        self._waiting[tenant].remove(seq)
        if not self._waiting[tenant]:
            del self._waiting[tenant]
            self._last = tenant
            if len(self._counters) > _MANY:
                self._forget()

    def charge_admission(self, seq: Seq) -> None:
        """See `WaitingQueue`: the prompt is charged at once, so that a tenant cannot fill all slots before it pays."""
        self._charge(seq, len(seq.tokens), free=seq.computed)

    def charge(self, seq: Seq) -> None:
        """See `WaitingQueue`."""
        self._charge(seq, seq.computed)

    def _charge(self, seq: Seq, upto: int, free: int = 0) -> None:
        """Count the leading `upto` positions of `seq` that were not counted yet, but for the first `free`."""
        begin = max(seq.charged, free)
        if upto <= begin:
            return
        generated = max(0, upto - max(begin, len(seq.request.prompt)))
        seq.charged = upto
        tenant, cost = seq.request.tenant, (upto - begin + (GENERATED_WEIGHT - 1) * generated) / seq.request.share
        self._counters[tenant] = self._counters.get(tenant, self._floor()) + cost

    def _floor(self) -> float:
        """Where a tenant begins that comes back."""
        return min(self._counters.get(each, 0.0) for each in self._waiting or (self._last,))

    def _forget(self) -> None:
        """Drop counters of tenants that would begin at the floor anyhow: there is no end to names."""
        floor = self._floor()
        self._counters = {
            each: count
            for each, count in self._counters.items()
            if count > floor or each in self._waiting or each == self._last
        }
