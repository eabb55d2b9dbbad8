"""What is ahead of a newcomer: how long earlier prompts take to read, and how many sequences must end first.

An estimate from the present state and from `core.step_time`; decides and changes nothing. Prompts known to be cached
count as read. Running sequences are assumed to go on; an abort makes the wait shorter than estimated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core.block_pool import BlockPool
from penstock.core.chunk_limit import LEAST, decodes, seconds_for_prompts
from penstock.core.sequence import Seq
from penstock.core.step_time import StepTimes, chunk_of

__all__ = ["Backlog", "backlog_of"]


class Backlog(NamedTuple):
    """What has to happen before a sequence that comes now can begin.

    Attributes:
        seconds: until all prompts before its own are read; 0.0 while step times are unknown.
        ends: sequences that must end first because they hold the slots or blocks that it needs.
    """

    seconds: float
    ends: int


def backlog_of(
    config: SchedulerConfig,
    times: StepTimes,
    pool: BlockPool,
    running: Sequence[Seq],
    ahead: Sequence[Seq],
    num_tokens: int,
) -> Backlog:
    """The backlog of a newcomer.

    Args:
        config: the scheduler's configuration.
        times: what steps take.
        pool: the pool of all blocks.
        running: sequences that hold a slot.
        ahead: waiting sequences that would be admitted before the newcomer.
        num_tokens: number of tokens of its prompt.
    """
    unread = [(seq.scheduled, seq.remaining) for seq in running if not decodes(seq)]
    unread += [_unread(seq, pool) for seq in ahead]
    decoding = [len(seq.tokens) for seq in running if decodes(seq)]
    return Backlog(_reading(config, times, unread, decoding), _ends(config, pool, len(running), ahead, num_tokens))


def _unread(seq: Seq, pool: BlockPool) -> tuple[int, int]:
    """The position from which a waiting sequence would be read, and the number of positions to read."""
    known = len(seq.tokens)
    cached = 0 if seq.request.fresh_prompt else pool.quote(seq.chain.keys, known).cached * pool.block_size
    return cached, known - cached


def _reading(config: SchedulerConfig, times: StepTimes, unread: list[tuple[int, int]], decoding: list[int]) -> float:
    """Seconds of all steps that read `unread` (pairs of start and count) while the rows at `decoding` decode."""
    positions = sum(count for _, count in unread)
    prompts = sum(times.of(chunk_of(start, count, times.window)) for start, count in unread)
    if not prompts:
        return 0.0
    beside = times.of(times.decoding(decoding))
    at_most = config.max_num_batched_tokens / positions  # share of all that a step can read
    if config.step_target_ms and decoding:
        share = max(seconds_for_prompts(config.step_seconds, beside) / prompts, LEAST / positions)
        at_most = min(at_most, share)
    return prompts + beside / at_most


def _ends(config: SchedulerConfig, pool: BlockPool, running: int, ahead: Sequence[Seq], num_tokens: int) -> int:
    """How many sequences must end until slots and blocks suffice, if each gives back the average number of blocks."""
    lacking = running + len(ahead) + 1 - config.max_num_seqs
    blocks = pool.blocks_for(num_tokens) + sum(pool.blocks_for(len(seq.tokens)) for seq in ahead) - pool.available
    if blocks > 0 and running:
        lacking = max(lacking, math.ceil(blocks * running / max(1, pool.referenced)))
    return min(max(0, lacking), running + len(ahead))
