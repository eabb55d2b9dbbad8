"""The scheduler's counts, present and total; every report on an engine contains them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SchedulerStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """The scheduler at one moment. Counts are since the start.

    Attributes:
        running: sequences that hold a slot.
        waiting: sequences that do not.
        steps: steps so far.
        preemptions: how often a running sequence had to give up its blocks.
        total_blocks: all KV blocks.
        free_blocks: blocks that no lease holds, whether or not they still cache something.
        cached_blocks: free blocks that the prefix cache can still find.
        query_tokens: positions that admissions looked up in the prefix cache; again after a preemption.
        hit_tokens: how many of these were found.
        sought_tokens: positions that were not found and were looked for in the store of blocks, if there is one.
        restored_tokens: how many of these were read from the store.
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
    sought_tokens: int = 0
    restored_tokens: int = 0

    def numbers(self) -> dict[str, int]:
        """Name -> value, for a report that contains them."""
        return {name: getattr(self, name) for name in SchedulerStats.__slots__}
