"""The slot tables, and how a plan's rows become tensors.

Decides the layout of a step's batch. Does not know the model, the KV memory or how tokens are chosen. Keeps what plans
leave out: the tokens of each sequence (a plan brings them once, at admission; sampled ones are added here) and its
block table.

Invariants, asserted because a plan that breaks them is a bug of ours: slots are free when admitted to and taken when
used; rows start where the last one ended, stay within the known tokens and within their blocks; a row samples exactly
when it reaches the last known token, and never in a slot whose sequence is embedded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.contract.plan import Admit, Row
from penstock.contract.sampling import SamplingSpec
from penstock.exec.sampler import Draw
from penstock.sampling import RowViews

__all__ = ["ForwardBatch", "SlotTables"]

_SILENT = Draw.of(SamplingSpec((("temperature", 0),)), 0)
"""Stands for how a sequence chooses tokens that is embedded: it chooses none."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step for the model: ragged rows laid end to end, prefill and decode alike, no padding.

    Attributes:
        token_ids: `[T]` int64.
        positions: `[T]` int64, of each token in its sequence.
        write_slots: `[T]` int64, where its keys and values go: `block * block_size + offset`.
        q_start: `[R + 1]` int32 on the host; row `r` has the tokens `q_start[r]` to `q_start[r + 1]`.
        kv_len: `[R]` int32 on the host, positions that each sequence has computed after this step.
        block_table: `[R, M]` int32, as wide as the longest row needs.
        sample_rows: `[S]` int64, index among the tokens of the last one of each row that samples.
    """

    token_ids: Tensor
    positions: Tensor
    write_slots: Tensor
    q_start: Tensor
    kv_len: Tensor
    block_table: Tensor
    sample_rows: Tensor


class SlotTables:
    """What the runner knows of the sequence in each slot. Owned by the runner; changed by plans and samples only.

    Rows of preallocated arrays, so that a decode row costs the same whatever its context.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self._block_size = block_size
        self._tokens = np.zeros((max_num_seqs, max_model_len), dtype=np.int64)
        self._blocks = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self._num_tokens = [0] * max_num_seqs
        self._prompt_tokens = [0] * max_num_seqs
        self._num_blocks = [0] * max_num_seqs
        self._computed = [0] * max_num_seqs
        self._draws: dict[int, Draw] = {}

    @property
    def taken(self) -> frozenset[int]:
        """The slots that hold a sequence."""
        return frozenset(self._draws)

    def release(self, slot: int) -> None:
        """Forget the sequence in `slot`."""
        assert slot in self._draws, f"slot {slot} is released but holds nothing"
        del self._draws[slot]

    def admit(self, admit: Admit) -> None:
        """Take in a sequence."""
        slot = admit.slot
        assert slot not in self._draws, f"slot {slot} is given to {admit.seq_id} but is taken"
        assert 0 <= admit.computed < len(admit.tokens) <= self._tokens.shape[1], admit.seq_id
        self._tokens[slot, : len(admit.tokens)] = admit.tokens
        self._num_tokens[slot] = len(admit.tokens)
        self._prompt_tokens[slot] = len(admit.tokens) if admit.prompt_tokens < 0 else admit.prompt_tokens
        self._num_blocks[slot] = 0
        self._append_blocks(slot, admit.blocks)
        self._computed[slot] = admit.computed
        self._draws[slot] = _SILENT if admit.embedding is not None else Draw.of(admit.sampling, admit.choice)

    def advance(self, row: Row) -> None:
        """Take note that `row` is computed now: its new blocks, and where the next row of its slot starts."""
        slot, end = row.slot, row.start + row.count
        assert slot in self._draws, f"slot {slot} has a row but holds nothing"
        assert row.count >= 1, f"slot {slot}: a row of {row.count} positions"
        assert row.start == self._computed[slot], f"slot {slot}: row at {row.start}, computed {self._computed[slot]}"
        assert end <= self._num_tokens[slot], f"slot {slot}: row ends at {end} of {self._num_tokens[slot]} tokens"
        samples = end == self._num_tokens[slot] and self._draws[slot] is not _SILENT
        assert row.sample == samples, f"slot {slot}: samples at {end}"
        self._append_blocks(slot, row.new_blocks)
        assert end <= self._num_blocks[slot] * self._block_size, f"slot {slot}: no block for position {end - 1}"
        self._computed[slot] = end

    def append(self, slot: int, token: int) -> None:
        """Add a sampled token to the sequence in `slot`; it is computed by the next row."""
        at = self._num_tokens[slot]
        if at < self._tokens.shape[1]:  # the last token that a context has room for is never computed
            self._tokens[slot, at] = token
        self._num_tokens[slot] = at + 1

    def draw(self, slot: int) -> Draw:
        """How the sequence in `slot` chooses its tokens."""
        return self._draws[slot]

    def prompt_targets(self, row: Row) -> list[int]:
        """The tokens of the prompt that the positions of `row` predict."""
        end = min(row.start + row.count + 1, self._prompt_tokens[row.slot])
        return self._tokens[row.slot, row.start + 1 : end].tolist()

    def views(self, slots: Sequence[int]) -> RowViews:
        """What stages may see of the sequences in `slots`."""
        draws = [self._draws[slot] for slot in slots]
        ends = [self._num_tokens[slot] for slot in slots]
        return RowViews(
            tokens=torch.from_numpy(self._tokens[slots, : max(ends)]),
            prompt_ends=torch.tensor([self._prompt_tokens[slot] for slot in slots])[:, None],
            ends=torch.tensor(ends)[:, None],
            specs=[draw.spec for draw in draws],
            choices=[draw.choice for draw in draws],
        )

    def batch(self, rows: Sequence[Row], device: torch.device) -> ForwardBatch:
        """The tensors for `rows`, at least one, all of them already taken note of."""
        # Every operation counts here: beside a small model, a step of one row is a few milliseconds.
        slots, starts, counts = np.array([(row.slot, row.start, row.count) for row in rows]).T
        q_start = np.zeros(len(rows) + 1, dtype=np.int32)
        counts.cumsum(out=q_start[1:])
        ends = q_start[1:]
        slot_of, positions = slots, starts.copy()  # [T]
        if ends[-1] > len(rows):  # not just one token a row
            slot_of = slots.repeat(counts)
            positions = (starts - ends + counts).repeat(counts) + np.arange(ends[-1])
        block = positions // self._block_size
        write_slots = self._blocks[slot_of, block] * np.int64(self._block_size) + (positions - block * self._block_size)
        kv_len = starts + counts
        width = -(-int(kv_len.max()) // self._block_size)
        return ForwardBatch(
            token_ids=_tensor(self._tokens[slot_of, positions], device),
            positions=_tensor(positions, device),
            write_slots=_tensor(write_slots, device),
            q_start=torch.from_numpy(q_start),
            kv_len=torch.from_numpy(kv_len.astype(np.int32)),
            block_table=_tensor(self._blocks[slots, :width], device),
            sample_rows=_tensor(ends[[row.sample for row in rows]] - np.int64(1), device),
        )

    def _append_blocks(self, slot: int, blocks: tuple[int, ...]) -> None:
        if not blocks:
            return
        have = self._num_blocks[slot]
        self._blocks[slot, have : have + len(blocks)] = blocks
        self._num_blocks[slot] = have + len(blocks)


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)
