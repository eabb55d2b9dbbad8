"""What must hold of queue, running sequences and pool together, between any two calls of the scheduler.

Decides nothing and changes nothing. Tests check the invariants after every call, and an idle engine checks them now and
then. A violation is raised rather than asserted, because the checks guard production too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.contract.errors import EngineFault
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core.block_keys import KeyChain, root_key
from penstock.core.block_pool import BlockPool, Lease
from penstock.core.in_flight import InFlight
from penstock.core.pending_blocks import PendingBlocks
from penstock.core.policy import SeqList
from penstock.core.sequence import Seq, SeqState
from penstock.core.spare_states import NO_SPARE
from penstock.core.state_keeping import StateKeeping
from penstock.core.suspects import Suspects
from penstock.core.waiting import WaitingQueue

__all__ = ["check_plans", "check_sequences"]

Invariant = tuple[str, bool]


def check_sequences(
    config: SchedulerConfig,
    seqs: dict[str, Seq],
    running: SeqList,
    waiting: WaitingQueue,
    departed: Sequence[Lease],
    pool: BlockPool,
    pending: PendingBlocks,
) -> None:
    """Verify all invariants about sequences.

    Raises:
        EngineFault: one does not hold; the message states it.
    """
    for invariant, holds in _invariants_of_all(seqs, running, waiting, departed, pool, pending):
        _require(holds, invariant)
    for seq in seqs.values():
        for invariant, holds in _invariants_of_one(seq, config):
            _require(holds, f"{invariant} ({seq.id}, {seq.state})")
        if seq.state is SeqState.RUNNING:
            for invariant, holds in _invariants_of_running(seq, config, pool):
                _require(holds, f"{invariant} ({seq.id})")


def check_plans(
    config: SchedulerConfig,
    running: SeqList,
    in_flight: InFlight,
    states: StateKeeping | None,
    suspects: Suspects,
    free_slots: Sequence[int],
) -> None:
    """Verify all invariants about plans in flight, and about what they take.

    Raises:
        EngineFault: one does not hold; the message states it.
    """
    departed = in_flight.departed
    of_none = not departed and all(seq.scheduled == seq.reached for seq in running)
    _require(bool(in_flight) or of_none, "what is in flight belongs to a plan in flight")
    kept = states is not None and states.pending
    _require(bool(in_flight) or not kept, "a state that is being written belongs to a plan in flight")
    if states is not None:
        states.spares.check([seq.resume for seq in running if seq.resume != NO_SPARE])
    alone = not suspects or set(running) <= {suspects.first}
    _require(alone, "while there are suspects, one of them runs alone")
    slots = sorted([*free_slots, *(seq.slot for seq in running), *(each.slot for each in departed)])
    _require(slots == list(range(config.max_num_seqs)), "every slot is free or belongs to one running sequence")


def _invariants_of_all(
    seqs: dict[str, Seq],
    running: SeqList,
    waiting: WaitingQueue,
    departed: Sequence[Lease],
    pool: BlockPool,
    pending: PendingBlocks,
) -> Iterator[Invariant]:
    yield "who runs is in `running`", all((s.state is SeqState.RUNNING) == (s in running) for s in seqs.values())
    yield "who waits is in the queue", all((s.state is SeqState.WAITING) == (s in waiting) for s in seqs.values())
    yield "nobody else is in either", len(running) + len(waiting) == len(seqs)
    held = {block for lease in (*(seq.lease for seq in running), *departed) for block in lease.held}
    yield "only running sequences hold blocks, and those that left within a step", len(held) == pool.referenced
    yield "pending blocks have running makers", all(s in running for s in pending.makers.values())


def _invariants_of_one(seq: Seq, config: SchedulerConfig) -> Iterator[Invariant]:
    yield "who does not run holds nothing", seq.holds_nothing == (seq.state is not SeqState.RUNNING)
    yield "a live sequence is not finished", seq.state is not SeqState.FINISHED
    yield "something is left to compute", 0 <= seq.computed < len(seq.tokens)
    generates = seq.request.embedding is None
    yield "tokens stay below the limit", len(seq.tokens) + generates <= seq.limit
    root = root_key(config.model_digest, seq.request.cache_salt, seq.request.adapter_digest)
    chain = KeyChain(root, config.block_size)
    if config.prefix_caching:
        chain.follow(seq.tokens)
    yield "keys name what the blocks hold", chain.keys == seq.chain.keys


def _invariants_of_running(seq: Seq, config: SchedulerConfig, pool: BlockPool) -> Iterator[Invariant]:
    lease = seq.lease
    yield "blocks cover what is scheduled", seq.computed <= seq.scheduled <= len(lease.blocks) * config.block_size
    yield "sealed blocks are computed", lease.sealed * config.block_size <= seq.computed
    if config.prefix_caching:
        yield "computed full blocks are sealed", lease.sealed == seq.computed // config.block_size
    seen = max(0, seq.computed - config.window + 1) if config.window is not None else 0
    yield "what the next position sees is held", lease.left * config.block_size <= seen
    keys = zip(lease.blocks[lease.left : lease.sealed], seq.chain.keys[lease.left :], strict=False)
    yield "a block is found under its own key or not at all", all(pool.key_of(b) in (None, key) for b, key in keys)


def _require(holds: bool, invariant: str) -> None:
    if not holds:
        raise EngineFault(f"scheduler: not so: {invariant}")
