"""What the scheduler says of itself. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SchedulerStats"]


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """The scheduler at one moment.

    Attributes:
        steps: plans made so far.
        preemptions: how often a running sequence had to give up its blocks, since the start.
        total_blocks: KV blocks there are.
        free_blocks: those that nobody holds, whether or not they still cache something.
        cached_blocks: those of the free ones that the prefix cache can still find.
        query_tokens: positions that admissions asked for, since the start.
        hit_tokens: how many of these the prefix cache had.
    """

    running: int
    waiting: int
    steps: int
    preemptions: int
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    query_tokens: int
    hit_tokens: int
