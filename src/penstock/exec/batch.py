"""The slot tables, and how a plan's rows become tensors.

Decides the layout of a step's batch. Does not know the model, the KV memory or how tokens are chosen. Keeps what plans
leave out: the tokens of each sequence (a plan brings them once, at admission; sampled tokens are added here) and its
block table.

Invariants, asserted because a plan that breaks them is a bug of ours: a slot is free at admission and taken when used;
a row starts where the last one ended, and stays within the known tokens and its blocks; a row samples exactly when it
reaches the last known token, and never in a slot whose sequence is embedded. Drafts lie behind the known tokens and do
not count as known until they are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.contract.plan import Admit, Row
from penstock.contract.sampling import SamplingSpec
from penstock.exec.sampler import RowSampling
from penstock.sampling import RowViews

__all__ = ["ForwardBatch", "SlotTables"]

_SILENT = RowSampling.of(SamplingSpec((("temperature", 0),)), 0)
"""Placeholder for the sampling of an embedded sequence, which chooses no tokens."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step for the model: ragged rows laid end to end, prefill and decode alike, no padding.

    Attributes:
        token_ids: `[T]` int64.
        positions: `[T]` int64, of each token in its sequence.
        write_slots: `[T]` int64, where each token's keys and values go: `block * block_size + offset`.
        q_start: `[R + 1]` int32 on the host; row `r` has the tokens `q_start[r]` to `q_start[r + 1]`.
        kv_len: `[R]` int32 on the host, positions that each sequence has computed after this step.
        block_table: `[R, M]` int32, as wide as the longest row needs.
    """

    token_ids: Tensor
    positions: Tensor
    write_slots: Tensor
    q_start: Tensor
    kv_len: Tensor
    block_table: Tensor


class _Form:
    """The memory of a batch of `tokens` tokens in `rows` rows, and tensors that view it.

    Rewritten in each step of this form. With a small model even small calls matter, because its weights evict
    everything else from the CPU caches; so whatever can be kept from step to step is kept. The data that a device reads
    is one piece of memory, which goes there in one copy.
    """

    def __init__(self, rows: int, tokens: int, width: int) -> None:
        self.shape = rows, tokens, width
        size = 3 * 8 * tokens + 4 * rows * width  # bytes
        self._memory = torch.empty(size, dtype=torch.uint8)  # not pinned: a copy is done when its call returns
        shown = self._shown(self._memory)
        self.token_ids, self.positions, self.write_slots, self.block_table = (each.numpy() for each in shown)
        self.q_start = np.arange(rows + 1, dtype=np.int32)  # for rows of one token each
        self.kv_len = np.empty(rows, dtype=np.int32)
        self._host = torch.from_numpy(self.q_start), torch.from_numpy(self.kv_len)
        self._batch = self._of(shown)

    def batch(self, device: torch.device) -> ForwardBatch:
        """The current contents, on `device`; the parts that the host reads stay on the host."""
        if device == self._memory.device:
            return self._batch
        return self._of(self._shown(self._memory.to(device, non_blocking=True)))

    def _shown(self, memory: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Token ids, positions, write slots and the block table in `memory`."""
        rows, tokens, width = self.shape
        token_ids, positions, write_slots = memory[: 24 * tokens].view(torch.int64).view(3, tokens)
        return token_ids, positions, write_slots, memory[24 * tokens :].view(torch.int32).view(rows, width)

    def _of(self, shown: tuple[Tensor, Tensor, Tensor, Tensor]) -> ForwardBatch:
        return ForwardBatch(*shown[:3], *self._host, shown[3])


class SlotTables:
    """What the runner knows about the sequence in each slot. Owned by the runner; only plans and samples change it.

    Uses rows of preallocated arrays, so that a decode row costs the same whatever its context.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self._block_size = block_size
        self._tokens = np.zeros((max_num_seqs, max_model_len), dtype=np.int64)
        self._blocks = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self._places = np.zeros((max_num_seqs, max_model_len), dtype=np.int64)  # block * block_size + offset
        self._num_tokens = [0] * max_num_seqs
        self._prompt_tokens = [0] * max_num_seqs
        self._num_blocks = [0] * max_num_seqs
        self._computed = [0] * max_num_seqs
        self._admitted = [0] * max_num_seqs  # positions computed at admission
        self._samplings: dict[int, RowSampling] = {}
        self._scored: set[int] = set()
        self._form = _Form(0, 0, 0)

    @property
    def scores_prompts(self) -> bool:
        """Whether the prompt of any sequence is scored."""
        return bool(self._scored)

    @property
    def taken(self) -> frozenset[int]:
        """The slots that hold a sequence."""
        return frozenset(self._samplings)

    def release(self, slot: int) -> None:
        """Forget the sequence in `slot`."""
        assert slot in self._samplings, f"slot {slot} is released but holds nothing"
        del self._samplings[slot]
        self._scored.discard(slot)

    def admit(self, admit: Admit) -> None:
        """Admit a sequence."""
        slot = admit.slot
        assert slot not in self._samplings, f"slot {slot} is given to {admit.seq_id} but is taken"
        assert 0 <= admit.computed < len(admit.tokens) <= self._tokens.shape[1], admit.seq_id
        self._tokens[slot, : len(admit.tokens)] = admit.tokens
        self._num_tokens[slot] = len(admit.tokens)
        self._prompt_tokens[slot] = len(admit.tokens) if admit.prompt_tokens < 0 else admit.prompt_tokens
        self._num_blocks[slot] = 0
        self._append_blocks(slot, admit.blocks)
        self._computed[slot] = self._admitted[slot] = admit.computed
        sampling = _SILENT if admit.embedding is not None else RowSampling.of(admit.sampling, admit.choice)
        self._samplings[slot] = sampling
        if sampling.prompt_top >= 0:
            self._scored.add(slot)

    def advance(self, row: Row) -> None:
        """Note that `row` is being computed: its new blocks and drafts, and where the next row of its slot starts."""
        slot, end = row.slot, row.start + row.count
        known = end - len(row.drafts)
        assert slot in self._samplings, f"slot {slot} has a row but holds nothing"
        assert row.count >= 1, f"slot {slot}: a row of {row.count} positions"
        assert row.start == self._computed[slot], f"slot {slot}: row at {row.start}, computed {self._computed[slot]}"
        assert known <= self._num_tokens[slot], f"slot {slot}: row ends at {known} of {self._num_tokens[slot]} tokens"
        samples = known == self._num_tokens[slot] and self._samplings[slot] is not _SILENT
        assert row.sample == samples, f"slot {slot}: samples at {known}"
        self.extend(slot, row.new_blocks)
        assert end <= self._num_blocks[slot] * self._block_size, f"slot {slot}: no block for position {end - 1}"
        self._computed[slot] = known
        if row.drafts:
            assert samples, f"slot {slot}: drafts of a row that does not sample"
            assert end <= self._tokens.shape[1], f"slot {slot}: drafts beyond the context"
            self._tokens[slot, known:end] = row.drafts

    def append(self, slot: int, token: int) -> None:
        """Add a sampled token to the sequence in `slot`; it is computed by the next row, unless it was drafted."""
        at = self._num_tokens[slot]
        if at < self._tokens.shape[1]:  # a token past the end of the context is never computed
            self._tokens[slot, at] = token
        self._num_tokens[slot] = at + 1

    def num_tokens(self, slot: int) -> int:
        """How many tokens of the sequence in `slot` are known."""
        return self._num_tokens[slot]

    def computed(self, slot: int) -> int:
        """Where the next row of `slot` starts."""
        return self._computed[slot]

    def take_back(self, slot: int, count: int) -> None:
        """Forget all tokens of the sequence in `slot` after the first `count`."""
        self._num_tokens[slot] = count

    def extend(self, slot: int, blocks: tuple[int, ...]) -> None:
        """Append blocks to the table of the sequence in `slot`."""
        if blocks:  # seldom
            self._append_blocks(slot, blocks)

    def confirm_draft(self, slot: int) -> None:
        """Note that the newest token was drafted, so its position has been computed."""
        self._computed[slot] += 1

    def put_off_draw(self, slot: int) -> None:
        """Note that the draw in `slot` waits: the next row starts at its last known position again."""
        self._computed[slot] -= 1

    def blocks(self, row: Row) -> list[int]:
        """The blocks that hold the positions of `row`, which fills them."""
        first, end = row.start // self._block_size, (row.start + row.count) // self._block_size
        return self.block_ids(row.slot, first, end).tolist()

    def block_ids(self, slot: int, first: int, end: int) -> npt.NDArray[np.int32]:
        """Entries `[first, end)` of the table of the sequence in `slot`."""
        return self._blocks[slot, first:end]

    def fall_back(self, slot: int, computed: int) -> None:
        """Note that a row got only as far as `computed`: the next row of its slot starts there."""
        self._computed[slot] = computed

    def fall_back_to_admission(self, slot: int) -> None:
        """Discard what was read since the admission of the sequence in `slot`."""
        self._computed[slot] = self._admitted[slot]

    def next_draws(self, rows: Sequence[Row]) -> tuple[list[RowSampling], list[int]]:
        """How the sequence of each of `rows` chooses its next token, and the position of that token."""
        return [self._samplings[row.slot] for row in rows], [self._num_tokens[row.slot] for row in rows]

    def sampling(self, slot: int) -> RowSampling:
        """How the sequence in `slot` chooses its tokens."""
        return self._samplings[slot]

    def prompt_targets(self, row: Row) -> list[int]:
        """The tokens of the prompt that the positions of `row` predict."""
        end = min(row.start + row.count + 1, self._prompt_tokens[row.slot])
        return self._tokens[row.slot, row.start + 1 : end].tolist()

    def views(self, slots: Sequence[int]) -> RowViews:
        """What sampling stages may see of the sequences in `slots`."""
        samplings = [self._samplings[slot] for slot in slots]
        ends = [self._num_tokens[slot] for slot in slots]
        return RowViews(
            tokens=torch.from_numpy(self._tokens[slots, : max(ends)]),
            prompt_ends=torch.tensor([self._prompt_tokens[slot] for slot in slots])[:, None],
            ends=torch.tensor(ends)[:, None],
            specs=[sampling.spec for sampling in samplings],
            choices=[sampling.choice for sampling in samplings],
        )

    def batch(self, rows: Sequence[Row], device: torch.device) -> ForwardBatch:
        """The tensors for `rows` (at least one, each already passed to `advance`); valid until the next call."""
        slots, starts, counts = np.array([(row.slot, row.start, row.count) for row in rows]).T
        tokens, longest = sum([row.count for row in rows]), max([row.start + row.count for row in rows])
        form = self._form_of(len(rows), tokens, -(-longest // self._block_size))
        slot_of, positions = slots, starts  # [T]
        if tokens > len(rows):  # not just one token a row
            q_start = np.concatenate(([0], counts.cumsum()))
            slot_of = slots.repeat(counts)
            positions = (starts - q_start[:-1]).repeat(counts) + np.arange(tokens)
            form.q_start[:] = q_start
        at = slot_of * self._tokens.shape[1] + positions
        self._tokens.reshape(-1).take(at, out=form.token_ids, mode="clip")  # "raise" would make a copy
        self._places.reshape(-1).take(at, out=form.write_slots, mode="clip")
        form.positions[:] = positions
        form.kv_len[:] = starts + counts
        self._blocks[:, : form.shape[2]].take(slots, axis=0, out=form.block_table, mode="clip")
        return form.batch(device)

    def _form_of(self, rows: int, tokens: int, width: int) -> _Form:
        if self._form.shape != (rows, tokens, width):
            self._form = _Form(rows, tokens, width)
        return self._form

    def _append_blocks(self, slot: int, blocks: tuple[int, ...]) -> None:
        have, size = self._num_blocks[slot], self._block_size
        self._blocks[slot, have : have + len(blocks)] = blocks
        places = (np.array(blocks, dtype=np.int64)[:, None] * size + np.arange(size)).ravel()
        of_slot = self._places[slot, have * size :]  # may end within the last block
        of_slot[: len(places)] = places[: len(of_slot)]
        self._num_blocks[slot] = have + len(blocks)
