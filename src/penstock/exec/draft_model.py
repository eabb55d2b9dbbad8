"""The draft model: a small model that follows the sequences of a large one and guesses their next tokens.

It has a KV store of its own, with as many blocks of the same size, and the same block tables: preemption, shared
prefixes and wrong drafts need nothing new. It keeps track of what it has computed: position by position, and block by
whole block where sequences share blocks. Whatever it lacks (a prompt that was cached, a process that was lost) it
computes before it guesses. Its tokens are chosen as the large model's are, with the sequence's parameters and the
random number of the same place, so the two agree more often than if it guessed the most likely token.

Decides nothing: plans say which sequences it follows and how much it guesses. Its guesses affect only time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.contract.plan import Admit, GuessWork, Row, RowResult
from penstock.contract.ports import Clock
from penstock.exec.batch import SlotTables
from penstock.exec.kv_store import KVStore
from penstock.exec.runner import paged_attend
from penstock.exec.sampler import sample
from penstock.kernels.backend import Backend
from penstock.nn.causal_lm import CausalLM
from penstock.sampling import RowViews

__all__ = ["DraftModel", "last_places", "silently"]

_REPORTED = ("logprobs", "logprobs_mode", "prompt_logprobs")
"""Parameters that only say what is reported about a token."""


class DraftModel:
    """Guesses with a small model. Owned by a runner; not thread-safe. The caller sets torch's inference mode.

    Args:
        model: has the large model's vocabulary; its logits may be wider or narrower.
        kv: its own KV store, with as many blocks as the large model's, of the same number of positions.
        max_num_seqs: number of slots.
        max_model_len: most tokens of a sequence.
        vocab_size: width of the large model's logits; guessed ids lie below it.
        backend: the large model's backend, whose threads it shares.
        clock: measures the time that guessing takes.

    Attributes:
        reads_hidden: whether `follow` reads what the large model computed.
        reads_taps: see `RowGuesser`.
    """

    reads_hidden = False
    reads_taps = 0
    _first = 0
    """Tokens of each sequence that the tables lack."""

    def __init__(
        self,
        model: CausalLM,
        kv: KVStore,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        backend: Backend,
        clock: Clock,
    ) -> None:
        self.kv = kv
        self._model = model
        self._sizes = max_num_seqs, max_model_len, kv.block_size
        self._vocab_size = vocab_size
        self._backend = backend
        self._clock = clock
        self._whole = np.zeros(kv.num_blocks, dtype=np.bool_)  # blocks of which every position is computed
        self._begin()

    def admit(self, admit: Admit) -> None:
        """Admit a sequence that will draw tokens. Leading cached blocks count as far as this model computed them."""
        if admit.embedding is not None:
            return
        size = self.kv.block_size
        cached = list(admit.blocks[: admit.computed // size])
        lacking = np.flatnonzero(~self._whole[cached])
        blocks = int(lacking[0]) if len(lacking) else len(cached)
        computed = min(blocks * size, len(admit.tokens) - 1)
        self._tables.admit(replace(silently(admit), computed=computed))
        self._noted[admit.slot] = blocks
        self._guesses[admit.slot] = ()

    def release(self, slot: int) -> None:
        """Forget the sequence in `slot`, if it was one that draws tokens."""
        if slot in self._guesses:
            self._tables.release(slot)
            del self._guesses[slot], self._noted[slot]

    def advance(self, row: Row) -> None:
        """The large model computes `row`: earlier contents of the blocks of its positions are no longer valid."""
        if row.slot in self._guesses:
            self._tables.extend(row.slot, row.new_blocks)
            size = self.kv.block_size
            written = self._tables.block_ids(row.slot, row.start // size, -(-(row.start + row.count) // size))
            self._whole[written] = False

    def reset(self) -> None:
        """Forget every sequence; keys and values stay."""
        self._begin()

    @contextmanager
    def borrowed(self, block: int) -> Iterator[None]:
        """Inside the `with`, it may follow other sequences, which may use `block`; afterwards its state is restored."""
        kept = self._tables, self._guesses, self._noted
        whole = self._whole[block]
        self._begin()
        try:
            with self.kv.borrowed_block(block):
                yield
        finally:
            self._tables, self._guesses, self._noted = kept
            self._whole[block] = whole

    def follow(
        self,
        rows: Sequence[Row],
        results: Sequence[RowResult],
        hidden: Mapping[int, Tensor],  # noqa: ARG002
    ) -> tuple[tuple[RowResult, ...], GuessWork]:
        """Note what rows drew, catch up where ordered, and guess.

        Args:
            rows: all rows that were computed.
            results: the results of the rows that have one, in the order of the rows.
            hidden: not read.

        Returns:
            The results, with guesses and this model's lag for sampling rows, and what guessing took.
        """
        began = self._clock.now()
        by_slot = {row.slot: row for row in rows if row.sample}
        orders = []
        for result in results:
            row = by_slot.get(result.slot)
            if row is None:
                continue
            self._take(result)
            if row.follow and not result.failure and not result.waits:
                orders.append(row)
        passes, positions = self._guess(orders) if orders else (0, 0)
        said = tuple(self._said(result) if result.slot in by_slot else result for result in results)
        return said, GuessWork(self._clock.now() - began, passes, positions)

    def _begin(self) -> None:
        self._tables = SlotTables(*self._sizes)
        self._guesses: dict[int, tuple[int, ...]] = {}  # by slot: guesses after the last token that was drawn
        self._noted: dict[int, int] = {}  # by slot: number of leading blocks known to be whole

    def _take(self, result: RowResult) -> None:
        """Add what was drawn. Tokens that were guessed have been computed already, except the last one."""
        slot, tables = result.slot, self._tables
        known, computed, right = tables.num_tokens(slot), tables.computed(slot), 0
        for token, guess in zip(result.tokens, self._guesses[slot], strict=False):
            if token.id != guess:
                break
            right += 1
        for token in result.tokens:
            tables.append(slot, token.id)
        self._guesses[slot] = ()
        tables.fall_back(slot, min(computed, known + right, tables.num_tokens(slot) - 1))

    def _said(self, result: RowResult) -> RowResult:
        slot, tables = result.slot, self._tables
        lag = max(0, tables.num_tokens(slot) - tables.computed(slot))
        return result._replace(guess=self._guesses[slot], lag=lag)

    def _guess(self, orders: Sequence[Row]) -> tuple[int, int]:
        """Catch up with the sequences of `orders` and guess. Returns the passes it took and their positions."""
        rows = [self._catching_up(row) for row in orders]
        wanted = {row.slot: row.guesses for row in orders}
        known = {row.slot: self._tables.num_tokens(row.slot) for row in orders}
        passes = positions = 0
        while rows:
            for row in rows:
                self._tables.advance(row)
            hidden = self._forward(rows)
            passes, positions = passes + 1, positions + sum([row.count for row in rows])
            drawing = [at for at, row in enumerate(rows) if row.sample and wanted[row.slot]]
            rows = self._draw([rows[at] for at in drawing], hidden, last_places(rows, drawing)) if drawing else []
            for row in rows:
                wanted[row.slot] -= 1
            rows = [row for row in rows if wanted[row.slot]]
        for slot, count in known.items():
            self._tables.take_back(slot, count)
            self._note_whole(slot)
        return passes, positions

    def _catching_up(self, order: Row) -> Row:
        """The row of lacking positions, as many as may be computed; it draws if none is left after it."""
        start = self._tables.computed(order.slot)
        lag = self._tables.num_tokens(order.slot) - start
        count = min(lag, order.follow)
        return Row(order.slot, start, count, (), sample=count == lag)

    def _forward(self, rows: Sequence[Row]) -> Tensor:
        batch = self._tables.batch(rows, self.kv.device)
        attend = paged_attend(self.kv, batch, self._backend)
        return self._model.forward(batch.token_ids, batch.positions, attend)  # [T, H]

    def _draw(self, rows: Sequence[Row], hidden: Tensor, places: Sequence[int]) -> list[Row]:
        """Choose the next token of each of `rows` from `hidden` at `places`. Returns the rows that have one."""
        slots = [row.slot for row in rows]
        samplings, positions = self._tables.next_draws(rows)
        positions = [self._first + position for position in positions]

        def row_views(chosen: Sequence[int]) -> RowViews:
            return self._tables.views([slots[at] for at in chosen])

        logits = self._logits(hidden if len(places) == len(hidden) else hidden[places])
        sampled = sample(logits, samplings, positions, row_views, self._backend.choose)
        following = []
        for row, token, failed in zip(rows, sampled.tokens, sampled.failed, strict=True):
            if not failed:
                self._tables.append(row.slot, token)
                self._guesses[row.slot] += (token,)
                following.append(Row(row.slot, row.start + row.count, 1, (), sample=True))
        return following

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits `[S, V]` as wide as the large model's: extra tokens are cut off, missing ones ruled out."""
        logits, width = self._model.logits(hidden), self._vocab_size
        if logits.shape[1] > width:
            return logits[:, :width].contiguous()
        return pad(logits, (0, width - logits.shape[1]), value=-torch.inf) if logits.shape[1] < width else logits

    def _note_whole(self, slot: int) -> None:
        """Note which blocks are computed from drawn tokens and not from guesses."""
        end = min(self._tables.computed(slot), self._tables.num_tokens(slot) - 1) // self.kv.block_size
        if end > self._noted[slot]:
            self._whole[self._tables.block_ids(slot, self._noted[slot], end)] = True
            self._noted[slot] = end


def silently(admit: Admit) -> Admit:
    """A sequence whose tokens are chosen in the same way, but with nothing reported and no grammar."""
    spec = admit.sampling
    for name in _REPORTED:
        spec = spec.without(name)
    return replace(admit, sampling=spec, thinking=None, grammar=None)


def last_places(rows: Sequence[Row], chosen: Sequence[int]) -> list[int]:
    """The indices of the last positions of the `chosen` rows in the batch of all `rows`."""
    ends = np.cumsum([row.count for row in rows])
    return [int(ends[at]) - 1 for at in chosen]
