"""Steps in which nothing is decided: each running sequence computes its newest token and draws the next one.

Most steps of a day are of this kind, and many of them follow each other until a sequence comes or ends. A simulation
passes over such a run at once (`Scheduler.pass_plain_steps`), and leaves what as many plans and commits would have
left. This file says how many steps that is, and in which order the sequences need and fill blocks in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core.block_pool import BlockPool
from penstock.core.chunk_limit import decodes
from penstock.core.sequence import Seq

__all__ = ["BlockChange", "PlainSteps", "block_changes", "can_be_plain", "plain_steps"]


class PlainSteps(NamedTuple):
    """Steps that are known without being planned.

    Attributes:
        steps: how many; 0 if it is not known.
        seq_ids: the sequences that draw a token in each of them.
    """

    steps: int
    seq_ids: tuple[str, ...]


class BlockChange(NamedTuple):
    """A sequence needs or fills a block in one step of a run. Ascending order of these values is the order in time.

    Attributes:
        step: number of the step in the run, from 0.
        fills: whether it fills one, when the step is committed; else it needs one, when the step is planned.
        place: index of the sequence among the running ones.
    """

    step: int
    fills: bool
    place: int


def can_be_plain(config: SchedulerConfig) -> bool:
    """Whether a model's steps can be passed over: it keeps all it computed, in blocks of this process alone."""
    stateful = config.window is not None or config.checkpoints is not None
    return not (stateful or config.storing or config.draft_context or config.looks_ahead)


def plain_steps(running: Sequence[Seq], pool: BlockPool) -> PlainSteps:
    """The next steps that are plain if nothing comes in: until a sequence may end, or blocks may run out."""
    if not all(map(_goes_on, running)):
        return PlainSteps(0, ())
    steps = min((seq.limit - len(seq.tokens) for seq in running), default=0) - 1
    while steps > 0 and _blocks_needed(running, steps, pool) > pool.available:
        steps //= 2
    return PlainSteps(max(0, steps), tuple(seq.id for seq in running))


def block_changes(running: Sequence[Seq], steps: int, size: int) -> Iterator[BlockChange]:
    """The block changes of so many steps, sequence by sequence.

    Args:
        running: all running sequences, as they are before the steps.
        steps: how many steps.
        size: tokens in a block.
    """
    for place, seq in enumerate(running):
        first, end = seq.computed, seq.computed + steps
        for index in range(len(seq.lease.blocks), -(-end // size)):
            yield BlockChange(index * size - first, fills=False, place=place)
        for index in range(first // size, end // size):
            yield BlockChange((index + 1) * size - 1 - first, fills=True, place=place)


def _goes_on(seq: Seq) -> bool:
    """Whether a sequence draws a token in each step, and only their number ends it."""
    rules = seq.request.stop
    return decodes(seq) and seq.remaining == 1 and not seq.stop_ids and not rules.repetition


def _blocks_needed(running: Sequence[Seq], steps: int, pool: BlockPool) -> int:
    return sum(max(0, pool.blocks_for(seq.computed + steps) - len(seq.lease.blocks)) for seq in running)
