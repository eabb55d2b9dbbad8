"""Waiting sequences of several tenants, in the order that gives each tenant its share.

Virtual token counters (Sheng et al. 2024, "Fairness in Serving Large Language Models", algorithm 2): each tenant has a
counter of what was computed for it, and the one with the lowest goes first. A tenant that returns after a pause starts
no lower than the waiting tenants, so that none can save up. Cached tokens cost nothing. Among level tenants, the one
with the fewest running sequences goes first, so that tenants that flood the queue hold equal numbers of slots.

Decides order only. Invariant: the same calls in the same order give the same order of sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from penstock.contract.request import SequenceRequest
from penstock.core.policy import Rank, SeqList
from penstock.core.sequence import Seq
from penstock.core.slot_shares import SlotShares
from penstock.core.waiting import QueuePart, QueueParts

__all__ = ["GENERATED_WEIGHT", "FairQueue"]

GENERATED_WEIGHT = 2
"""A generated token counts as this many prompt tokens, as in the paper: it takes a step of its own."""

_MANY = 64
"""Number of counters above which unneeded ones are dropped."""


class FairQueue:
    """Sequences that wait, tenant by tenant in order of arrival, and the tenants' counters: one for each API key.

    Args:
        level: counters within this distance of the lowest are level with it.
    """

    __slots__ = ("_counters", "_last", "_level", "_slots", "_waiting")

    def __init__(self, level: float = 0.0) -> None:
        self._level = level
        self._slots = SlotShares()
        self._waiting: dict[str, SeqList] = {}  # only of tenants that have any
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
        """See `WaitingQueue`; a sequence that was taken out meanwhile counts in the order of the rest."""
        passed = dict.fromkeys(self._waiting, 0)
        while True:
            first = {of: self._waiting[of][passed[of]].rank for of in passed if self._has(of, passed)}
            if not first:
                return
            tenant = self._turns(first)[0]
            seq = self._waiting[tenant][passed[tenant]]
            yield seq
            if seq in self:
                passed[tenant] += 1

    def heads(self) -> list[Seq]:
        """See `WaitingQueue`."""
        return [
            self._waiting[tenant][0] for tenant in self._turns({of: seqs[0].rank for of, seqs in self._waiting.items()})
        ]

    def givers(self, request: SequenceRequest) -> list[Seq]:
        """See `WaitingQueue`: sequences of that tenant which holds most, among those with as many tokens or level."""
        others = self._given_as_much(request)
        if not others:
            return []
        return self._slots.givers(request, max(others, key=lambda of: (self._slots.load(of), of)))

    def crowding(self, request: SequenceRequest) -> frozenset[str]:
        """See `WaitingQueue`: only tenants that were given as many tokens as this one, or are level with it."""
        return self._slots.above_share(request).intersection(self._given_as_much(request))

    def _given_as_much(self, request: SequenceRequest) -> list[str]:
        """The other tenants that run and were given at least as many tokens as that of `request`, or are level."""
        floor = self._floor()
        own = self._counters.get(request.tenant, floor)
        if request.tenant not in self._waiting:
            own = max(own, floor)
        others = [of for of in self._slots if of != request.tenant]
        return [of for of in others if self._counters.get(of, floor) + self._level >= own]

    def in_turn(self, seqs: Iterable[Seq]) -> list[Seq]:
        """See `WaitingQueue`: by the turns that their tenants would have in the queue."""
        eldest: dict[str, list[Seq]] = {}
        for seq in seqs:
            eldest.setdefault(seq.request.tenant, []).append(seq)
        return [seq for of in self._turns({of: own[0].rank for of, own in eldest.items()}) for seq in eldest[of]]

    def _turns(self, ranks: dict[str, Rank]) -> list[str]:
        """Tenants in order: by tokens, level ones by slots, and ties by the given `ranks`."""
        floor = self._floor()
        counts = {of: self._counters.get(of, floor) for of in ranks}
        level = min(counts.values(), default=0.0) + self._level
        return sorted(ranks, key=lambda of: (max(counts[of], level), self._slots.load(of), counts[of], ranks[of]))

    def part_of(self, tenant: str) -> QueuePart:
        """See `WaitingQueue`: each tenant that waits has a part, and one more is kept free for a new tenant."""
        own = self._waiting.get(tenant, ())
        return QueuePart(len(own), sum(len(seq.tokens) for seq in own), len(self._waiting) + (not own) + 1)

    def parts(self) -> QueueParts:
        """See `WaitingQueue`."""
        own = {tenant: self.part_of(tenant) for tenant in self._waiting}
        return QueueParts(own, QueuePart(0, 0, len(own) + 2), shared=False)

    def before(self, request: SequenceRequest, rank: Rank) -> list[Seq]:
        """See `WaitingQueue`; an estimate: of each other tenant, one sequence more than of its own."""
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
        self._charge(seq, len(seq.tokens), free=max(seq.computed, seq.restore_end))
        self._slots.add(seq)

    def stopped(self, seq: Seq) -> None:
        """See `WaitingQueue`."""
        self._slots.remove(seq)

    def charge(self, seq: Seq) -> None:
        """See `WaitingQueue`."""
        self._charge(seq, seq.computed)

    def _charge(self, seq: Seq, upto: int, free: int = 0) -> None:
        """Charge the leading `upto` positions of `seq` that were not charged yet, except the first `free`."""
        begin = max(seq.charged, free)
        if upto <= begin:
            return
        generated = max(0, upto - max(begin, len(seq.request.prompt)))
        seq.charged = upto
        tenant, cost = seq.request.tenant, (upto - begin + (GENERATED_WEIGHT - 1) * generated) / seq.request.share
        self._counters[tenant] = self._counters.get(tenant, self._floor()) + cost

    def _floor(self) -> float:
        """The counter with which a returning tenant starts."""
        return min(self._counters.get(each, 0.0) for each in self._waiting or (self._last,))

    def _forget(self) -> None:
        """Drop the counters of tenants that would start at the floor anyway, since the number of names is unbounded."""
        floor = self._floor()
        self._counters = {
            each: count
            for each, count in self._counters.items()
            if count > floor or each in self._waiting or each == self._last
        }
