"""KV blocks outside memory: which ones to save, and how many to read instead of computing them.

Decides whether reading is worth its time, from what reading and computing are expected to take (`core.step_time`), and
how much one step reads. Does not know where blocks are stored. `Scheduler.note_stored` says that some are; if they turn
out to be gone, they are computed. Invariant: what is to be saved is sealed and keeps its block until the next plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from penstock.contract.plan import RowResult, Save, StepPlan, StepResult
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core.block_pool import BlockPool
from penstock.core.chunk_limit import decodes
from penstock.core.sequence import Seq
from penstock.core.step_time import StepTimes, chunk_of

__all__ = ["SOUGHT_AHEAD", "Restoring"]

SOUGHT_AHEAD = 8
"""Number of waiting sequences, those that may be admitted soon, whose blocks are looked for at once."""

_STEPS_ALONE = 4
"""While no sequence decodes, a step reads as many positions as this many steps compute."""

_SHARE = 0.5
"""The share of a step's target that reading may take while any sequence decodes."""

_TRY_AGAIN = 16
"""One of this many restores is done although it does not seem worth its time: disks may have become faster."""


class Restoring:
    """What the scheduler knows of stored blocks. Owned by it.

    Attributes:
        sought_tokens: positions that were not in memory and were looked for in the store.
        restored_tokens: positions that were read.
    """

    def __init__(self, config: SchedulerConfig, times: StepTimes, pool: BlockPool) -> None:
        self._config = config
        self._pool = pool
        self._times = times
        self._refused = 0
        self._saves: list[Save] = []
        self._state_saves: list[Save] = []
        self.sought_tokens = 0
        self.restored_tokens = 0

    @property
    def pending(self) -> bool:
        """Whether anything is to be saved."""
        return bool(self._saves or self._state_saves)

    def sealed(self, seq: Seq, index: int) -> None:
        """Block number `index` of `seq` was sealed: let the next plan save it, if it is new and can be found."""
        keys, size = seq.chain.keys, self._config.block_size
        block = seq.lease.blocks[index]
        if index * size < seq.restore_end or self._pool.key_of(block) != keys[index]:
            return
        self._saves.append(self._save(seq, index, block, seq.tokens))

    def kept(self, seq: Seq, index: int, slot: int, tokens: Sequence[int]) -> None:
        """Checkpoint `slot` holds the state after block number `index` of `seq`: let the next plan save it.

        `tokens` are the sequence's, and right drafts that are not appended to them yet.
        """
        if (index + 1) * self._config.block_size != seq.restore_end:  # else it was read
            self._state_saves.append(self._save(seq, index, slot, tokens))

    def seek(self, seq: Seq) -> tuple[int, tuple[bytes, ...]]:
        """How many leading blocks of a waiting sequence are in memory, and the keys of those that could be stored."""
        seq.sought = True
        if seq.request.fresh_prompt:
            return 0, ()
        keys, known = seq.chain.keys, len(seq.tokens)
        present = self._pool.quote(keys, known).cached
        lacking = tuple(keys[present : (known - 1) // self._config.block_size])
        self.sought_tokens += len(lacking) * self._config.block_size
        return present, lacking

    def take_saves(self) -> tuple[tuple[Save, ...], tuple[Save, ...]]:
        """Take the blocks and the states to save, for the plan that is being made."""
        saves = tuple(self._saves), tuple(self._state_saves)
        self._saves.clear()
        self._state_saves.clear()
        return saves

    def forget(self) -> None:
        """Forget what was to be saved: it is gone."""
        self._saves.clear()
        self._state_saves.clear()

    def begin(self, seq: Seq) -> None:
        """`seq` was admitted: restore it as far as its blocks are stored, if that is worth the time."""
        size = self._config.block_size
        end = min(seq.stored, (len(seq.tokens) - 1) // size) * size  # a position is left to compute
        if end > seq.computed and self._is_worth_it(seq.computed, end - seq.computed):
            seq.restore_end = end

    def blocks_a_step(self, running: Iterable[Seq]) -> int:
        """How many blocks a step may read, all sequences together."""
        config = self._config
        most = max(1, config.max_num_batched_tokens // config.block_size)
        if not any(decodes(seq) for seq in running):
            return _STEPS_ALONE * most
        block = self._times.reading(config.block_size)
        if not (config.step_target_ms and block):
            return most
        affordable = _SHARE * config.step_seconds / block
        return max(1, min(most, int(affordable)))

    def learn(
        self, plan: StepPlan, result: StepResult, results: Sequence[RowResult | None]
    ) -> tuple[StepPlan, StepResult]:
        """Learn from what was read and how long it took. Returns what the step computed, and how long that took."""
        size, count = self._config.block_size, 0
        for row, of_row in zip(plan.rows, results, strict=True):
            if row.stored:
                count += row.count if of_row is None else of_row.restored * size
        self.restored_tokens += count
        self._times.learn_reading(count, result.restoring)
        computed = tuple(row for row in plan.rows if not row.stored)
        return replace(plan, rows=computed), replace(result, seconds=result.seconds - result.restoring)

    def _save(self, seq: Seq, index: int, place: int, tokens: Sequence[int]) -> Save:
        keys, size = seq.chain.keys, self._config.block_size
        parent = keys[index - 1] if index else seq.chain.root
        return Save(place, keys[index], parent, index, tuple(tokens[index * size : (index + 1) * size]))

    def _is_worth_it(self, start: int, count: int) -> bool:
        computing = self._times.of(chunk_of(start, count, self._times.window))
        if not computing or self._times.reading(count) < computing:
            return True
        self._refused += 1
        return self._refused % _TRY_AGAIN == 0
