"""Drafts with a predictor of the second token: one further layer that reads what the model computed.

The layer comes with the model, or is an EAGLE-3 head trained for it; see `nn.program.Predictor`.

It has a KV store of its own and the model's block tables, as a draft model has. But its input cannot be computed again:
the model's hidden states are there only in the step that computes them. So it follows a sequence from the first
position or not at all. In each step it computes every position that the step computed and whose next token is known by
now. A sequence whose prompt was cached without it, or read from files, has no guesses.

Position `p` holds the token at `p + 1`, beside the hidden state at `p`. Guesses after the first use the predictor's own
output as the hidden state, which is less accurate with every further token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from penstock.contract.plan import Admit, GuessWork, Row, RowResult
from penstock.contract.ports import Clock
from penstock.exec.draft_model import DraftModel, last_places, silently
from penstock.exec.kv_store import KVStore
from penstock.exec.runner import paged_attend
from penstock.kernels.backend import Backend
from penstock.nn.causal_lm import CausalLM
from penstock.nn.program import Predictor

__all__ = ["PredictingDrafter"]


class PredictingDrafter(DraftModel):
    """Guesses with a predictor. Owned by a runner. Its tables are `DraftModel`'s, less each sequence's first token.

    Args:
        model: computes `own.program`.
        own: the predictor.
        dtype: dtype of its activations.
        kv: its own KV store, with as many blocks as the model's, of the same number of positions.
        max_num_seqs: number of slots.
        max_model_len: most tokens of a sequence.
        vocab_size: width of the model's logits.
        backend: the model's backend.
        clock: measures the time that guessing takes.
    """

    reads_hidden = True
    _first = 1

    def __init__(
        self,
        model: CausalLM,
        own: Predictor,
        dtype: torch.dtype,
        kv: KVStore,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        backend: Backend,
        clock: Clock,
    ) -> None:
        super().__init__(model, kv, max_num_seqs, max_model_len, vocab_size, backend, clock)
        self._own, self._dtype = own, dtype
        self.reads_taps = 0 if own.joined is None else own.joined.inputs
        vocabulary = own.vocabulary
        self._vocabulary = None if vocabulary is None else vocabulary.to(kv.device)

    def admit(self, admit: Admit) -> None:
        """Follow a sequence if all of its computed positions were followed."""
        size = self.kv.block_size
        cached, fresh = admit.blocks[: admit.computed // size], admit.blocks[admit.computed // size :]
        self._whole[list(fresh)] = False
        known = admit.computed % size == 0 and bool(self._whole[list(cached)].all())
        if admit.embedding is not None or len(admit.tokens) < 2 or not (admit.followed and known):
            return
        prompt = admit.prompt_tokens if admit.prompt_tokens < 0 else admit.prompt_tokens - 1
        shifted = replace(silently(admit), tokens=admit.tokens[1:], prompt_tokens=prompt, computed=0)
        self._tables.admit(shifted)
        self._tables.fall_back(admit.slot, admit.computed)  # perhaps as many as there are known next tokens
        self._noted[admit.slot] = len(cached)
        self._guesses[admit.slot] = ()

    def advance(self, row: Row) -> None:
        """The model computes `row`: earlier contents of its new blocks become invalid, followed or not."""
        self._whole[list(row.new_blocks)] = False
        if row.slot in self._guesses:
            self._tables.extend(row.slot, row.new_blocks)

    def follow(
        self, rows: Sequence[Row], results: Sequence[RowResult], hidden: Mapping[int, Tensor]
    ) -> tuple[tuple[RowResult, ...], GuessWork]:
        """Compute the positions of `rows` that are final, and guess where ordered. See `DraftModel.follow`.

        Args:
            rows: all rows that were computed, or read from the store.
            results: the results of the rows that have one, in the order of the rows.
            hidden: by slot `[positions of the row, H]`, or taps; for a row that waited, only its last position.
        """
        began = self._clock.now()
        said = {result.slot: result for result in results}
        computed = [own for row in rows if (own := self._final(row, said.get(row.slot), hidden)) is not None]
        orders = {row.slot: row for row in rows if row.guesses and not _failed(said.get(row.slot))}
        passes, positions = self._pass_through(computed, hidden, orders) if computed else (0, 0)
        told = tuple(self._said(result) if result.slot in self._guesses else result for result in results)
        return told, GuessWork(self._clock.now() - began, passes, positions)

    def _final(self, row: Row, result: RowResult | None, hidden: Mapping[int, Tensor]) -> Row | None:
        """The positions of `row` whose next token is known; None if there are none. Forgets a sequence with a gap."""
        slot, tables = row.slot, self._tables
        if slot not in self._guesses:
            return None
        self._guesses[slot] = ()
        if tables.computed(slot) != row.start or slot not in hidden:
            self.release(slot)
            return None
        drawn = () if result is None or not row.sample else result.tokens
        for token in drawn:
            tables.append(slot, token.id)
        count = min(row.start + row.count, tables.num_tokens(slot)) - row.start
        return Row(slot, row.start, count, (), sample=row.start + count == tables.num_tokens(slot)) if count else None

    def _pass_through(
        self, rows: list[Row], hidden: Mapping[int, Tensor], orders: Mapping[int, Row]
    ) -> tuple[int, int]:
        """Compute `rows`, and guess for `orders`. Returns the passes it took and their positions."""
        given = self._joined(torch.cat([hidden[row.slot][: row.count] for row in rows]))
        known = {row.slot: self._tables.num_tokens(row.slot) for row in rows}
        wanted = {slot: row.guesses for slot, row in orders.items()}
        passes = positions = 0
        while rows:
            for row in rows:
                self._tables.advance(row)
            out, onward = self._predict(rows, given)
            passes, positions = passes + 1, positions + len(given)
            drawing = [at for at, row in enumerate(rows) if row.sample and wanted.get(row.slot)]
            places = last_places(rows, drawing)
            before = [rows[at].slot for at in drawing]
            rows = self._draw([rows[at] for at in drawing], out, places) if drawing else []
            for row in rows:
                wanted[row.slot] -= 1
            rows = [row for row in rows if wanted[row.slot]]
            if rows:
                given = onward[[places[before.index(row.slot)] for row in rows]]
        for slot, count in known.items():
            self._tables.take_back(slot, count)
            self._tables.fall_back(slot, min(self._tables.computed(slot), count))
            self._note_whole(slot)
        return passes, positions

    def _joined(self, read: Tensor) -> Tensor:
        """The hidden states `[T, H]` made from what was read from the model's step."""
        own = self._own
        if own.joined is None:
            return read
        return self._backend.linear(read.to(self._dtype), own.joined, own.joined_bias, out_dtype=torch.float32)

    def _predict(self, rows: Sequence[Row], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """One pass over the positions of `rows`, row after row, which have the hidden states `hidden` `[T, H]`.

        Returns:
            What the predictor's head reads, and the hidden states for the next positions, `[T, H]` each.
        """
        batch = self._tables.batch(rows, self.kv.device)
        attend = paged_attend(self.kv, batch, self._backend)
        width = hidden.shape[1]
        pair = hidden.new_empty((len(hidden), 2 * width), dtype=torch.float32)
        pair[:, :width] = self._backend.embedding(batch.token_ids, self._own.table, torch.float32)
        pair[:, width:] = hidden
        if self._own.program.taps is None:
            out = self._model.forward_given(pair, batch.positions, attend)
            return out, out
        onward = pair.new_empty((len(hidden), width))
        return self._model.forward_given(pair, batch.positions, attend, onward), onward

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits `[S, V]` as wide as the model's: tokens that the predictor does not know are ruled out."""
        if self._vocabulary is None:
            return super()._logits(hidden)
        known = self._model.logits(hidden)
        logits = known.new_full((len(known), self._vocab_size), -torch.inf)
        logits[:, self._vocabulary] = known
        return logits


def _failed(result: RowResult | None) -> bool:
    return result is None or bool(result.failure) or result.waits
