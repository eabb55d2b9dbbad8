"""The running sequences of each tenant, and whose slots a tenant with fewer may take.

Tokens say whose turn it is (`core.fair_shares`); slots say what a tenant may take back from another that holds more
than its share. Decides nothing about blocks, budget or plans in flight: the scheduler does.

Invariant: a tenant cannot take back a slot that was taken from it, without an admission or an end in between. A slot
passes from one tenant to another only if the taker then holds no more per share than the giver; each passing makes the
sum of `count ** 2 / share` over all tenants smaller.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.contract.request import SequenceRequest
from penstock.core.policy import SeqList
from penstock.core.sequence import Seq

__all__ = ["SlotShares"]


class SlotShares:
    """Running sequences, tenant by tenant. Owned by the `FairQueue`."""

    __slots__ = ("_running",)

    def __init__(self) -> None:
        self._running: dict[str, SeqList] = {}  # only of tenants that have any

    def __iter__(self) -> Iterator[str]:
        """The tenants that have running sequences."""
        return iter(self._running)

    def add(self, seq: Seq) -> None:
        """`seq` begins to run."""
        self._running.setdefault(seq.request.tenant, SeqList()).add(seq)

    def remove(self, seq: Seq) -> None:
        """`seq` no longer runs; it must have run."""
        tenant = seq.request.tenant
        self._running[tenant].remove(seq)
        if not self._running[tenant]:
            del self._running[tenant]

    def load(self, tenant: str) -> float:
        """How many sequences of a tenant run, for each unit of its share."""
        seqs = self._running.get(tenant)
        return len(seqs) / seqs[0].request.share if seqs else 0.0

    def above_share(self, taker: SequenceRequest) -> frozenset[str]:
        """The tenants that hold more than their share of the slots in use; the taker also has a share of these."""
        shares = {of: seqs[0].request.share for of, seqs in self._running.items()} | {taker.tenant: taker.share}
        level = sum(map(len, self._running.values())) / sum(shares.values())
        return frozenset(of for of in self._running if self.load(of) > level)

    def givers(self, taker: SequenceRequest, tenant: str) -> list[Seq]:
        """The sequences of `tenant`, youngest first, that may be stopped for one of the taker's: see the invariant.

        Stop the first of them, or the first two, and so on: as many as needed.
        """
        own = self._running.get(taker.tenant, ())
        seqs = list(self._running.get(tenant, ()))
        parts = (len(own) + 1) / taker.share
        return [seq for left, seq in enumerate(seqs) if parts <= left / seq.request.share][::-1]
