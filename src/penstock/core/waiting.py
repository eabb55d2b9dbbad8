"""The queue of sequences that wait for admission: its port, and the queue that does not know tenants.

Decides order only, never whether a sequence fits. `core.fair_shares` has the queue that knows tenants.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

from penstock.contract.request import SequenceRequest
from penstock.core.policy import Rank, SeqList
from penstock.core.sequence import Seq

__all__ = ["OneQueue", "QueuePart", "QueueParts", "TenantLoad", "WaitingQueue"]


class QueuePart(NamedTuple):
    """The part of the queue that a tenant's newcomers wait in.

    Attributes:
        sequences: how many wait in it.
        tokens: how many tokens they have.
        parts: into how many parts the queue's room is divided.
    """

    sequences: int
    tokens: int
    parts: int


class QueueParts(NamedTuple):
    """Every tenant's part of the queue at one moment; a value that other threads may keep.

    Attributes:
        tenants: the parts of waiting tenants; empty if all tenants share one part.
        other: the part of any other tenant.
        shared: whether all tenants share one part.
    """

    tenants: Mapping[str, QueuePart]
    other: QueuePart
    shared: bool

    def of(self, tenant: str) -> QueuePart:
        """The part of a tenant."""
        return self.tenants.get(tenant, self.other)


class TenantLoad(NamedTuple):
    """A tenant's running and waiting sequences at one moment.

    Attributes:
        running: sequences that hold a slot.
        waiting: sequences that do not.
        waiting_tokens: tokens of these.
    """

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0


class WaitingQueue(Protocol):
    """Waiting sequences. Owned by the scheduler, which also says what was computed for which tenant."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Seq]: ...

    def __contains__(self, seq: Seq) -> bool: ...

    def add(self, seq: Seq) -> None:
        """Put `seq` at its place."""
        ...

    def remove(self, seq: Seq) -> None:
        """Take `seq` out; it must be in."""
        ...

    def in_order(self) -> Iterator[Seq]:
        """Sequences in order; the caller may remove one before it asks for the next."""
        ...

    def before(self, request: SequenceRequest, rank: Rank) -> list[Seq]:
        """The sequences that would be served before a newcomer of this rank."""
        ...

    def part_of(self, tenant: str) -> QueuePart:
        """The part of a tenant."""
        ...

    def parts(self) -> QueueParts:
        """The parts of all tenants; takes time in proportion to the queue."""
        ...

    def heads(self) -> list[Seq]:
        """The first sequence of each tenant, in order, if tenants may take slots from each other; else none."""
        ...

    def givers(self, request: SequenceRequest) -> list[Seq]:
        """Running sequences that may be stopped for `request`, in the order in which to stop them."""
        ...

    def crowding(self, request: SequenceRequest) -> frozenset[str]:
        """The tenants above their share of slots, which may be left out of a step for `request`."""
        ...

    def in_turn(self, seqs: Iterable[Seq]) -> list[Seq]:
        """Running sequences (given by rank) in the order in which their prompts are read."""
        ...

    def charge_admission(self, seq: Seq) -> None:
        """`seq` was admitted: its known tokens will be computed, except the cached ones."""
        ...

    def stopped(self, seq: Seq) -> None:
        """`seq` no longer runs."""
        ...

    def charge(self, seq: Seq) -> None:
        """More of `seq` was computed."""
        ...


class OneQueue(SeqList):
    """One queue for all tenants, by rank. What was computed for which tenant changes nothing."""

    __slots__ = ()

    def in_order(self) -> Iterator[Seq]:
        """See `WaitingQueue`."""
        index = 0
        while index < len(self):
            seq = self[index]
            yield seq
            index += index < len(self) and self[index] is seq

    def before(self, request: SequenceRequest, rank: Rank) -> list[Seq]:  # noqa: ARG002
        """See `WaitingQueue`."""
        return [seq for seq in self if seq.rank < rank]

    def part_of(self, tenant: str) -> QueuePart:  # noqa: ARG002
        """See `WaitingQueue`."""
        return QueuePart(len(self), sum(len(seq.tokens) for seq in self), 1)

    def parts(self) -> QueueParts:
        """See `WaitingQueue`."""
        return QueueParts({}, self.part_of(""), shared=True)

    def heads(self) -> list[Seq]:
        """See `WaitingQueue`."""
        return []

    def givers(self, request: SequenceRequest) -> list[Seq]:  # noqa: ARG002
        """See `WaitingQueue`."""
        return []

    def crowding(self, request: SequenceRequest) -> frozenset[str]:  # noqa: ARG002
        """See `WaitingQueue`."""
        return frozenset()

    def in_turn(self, seqs: Iterable[Seq]) -> list[Seq]:
        """See `WaitingQueue`."""
        return list(seqs)

    def charge_admission(self, seq: Seq) -> None:
        """See `WaitingQueue`."""

    def stopped(self, seq: Seq) -> None:
        """See `WaitingQueue`."""

    def charge(self, seq: Seq) -> None:
        """See `WaitingQueue`."""
