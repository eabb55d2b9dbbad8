"""Recurrent state of every running sequence, and checkpoints: memory allocated once, and which place is read next.

Decides where a state lies: one place for each slot, then one for each checkpoint, then the spare places, the same in
all states of a model. Does not know what a checkpoint or a spare place holds: plans say so. Invariant: from the first
row after admission on, a slot's place holds the state after all positions that its rows have computed, drafts included;
if drafts were wrong, the next row says which spare place holds the state to continue from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.contract.errors import ConfigError
from penstock.contract.model import StateSpec
from penstock.contract.plan import Admit, Row
from penstock.exec.places import BytePlaces, copy_place, fill_place, rows_of_bytes
from penstock.kernels.state_runs import FROM_ZERO, StateRuns
from penstock.kernels.weight_memory import large_block

__all__ = ["StateMemory", "StateStore", "share_memory", "state_bytes"]

_HOST = torch.device("cpu")

_MOST_DRAFTS = 32
"""Spare places for drafts, beside those that sequences continue from: the most drafts that a row has."""


def state_bytes(specs: Sequence[StateSpec]) -> int:
    """Bytes of one sequence's state, and of one checkpoint."""
    return sum(4 * math.prod(spec.shape) for spec in specs)


class StateMemory(NamedTuple):
    """How the memory budget of a model with recurrent state is divided.

    Attributes:
        num_seqs: sequences that run at once.
        checkpoints: states that are kept.
        spares: states before drafts.
        kv_bytes: what is left for keys and values.
    """

    num_seqs: int
    checkpoints: int
    spares: int
    kv_bytes: int


def share_memory(
    budget: int, each: int, position_bytes: int, max_num_seqs: int, interval: int, *, drafts: bool = True
) -> StateMemory:
    """Divide a budget among running states, checkpoints, states before drafts, and keys and values.

    The order is: as many sequences as wanted, up to a quarter of the budget; then spare places for one long guess and
    one for each sequence, up to a tenth of the rest; then one checkpoint for each interval of the keys and values and
    two for each sequence's end, up to half of the rest.

    Args:
        budget: in bytes.
        each: bytes of one state.
        position_bytes: bytes of the keys and values of one position.
        max_num_seqs: sequences that the operator wants at once.
        interval: positions between checkpoints; 0 for checkpoints only at ends.
        drafts: whether rows may have drafts.
    """
    num_seqs = min(max_num_seqs, max(1, budget // 4 // each))
    left = max(0, budget - num_seqs * each)
    spares = min(_MOST_DRAFTS + num_seqs, left // 10 // each) if drafts else 0
    left -= spares * each
    positions = left // position_bytes
    checkpoints = min(2 * num_seqs + (positions // interval if interval else 0), left // 2 // each)
    return StateMemory(num_seqs, checkpoints, spares, left - checkpoints * each)


class StateStore:
    """The states of a model, in places. Owned by the runner.

    Args:
        specs: the spec of each state.
        num_slots: sequences that run at once.
        num_checkpoints: states that are kept.
        device: where the states lie.
        num_spares: states before drafts.

    Attributes:
        states: for each spec, `[num_slots + num_checkpoints + num_spares, *shape]` float32, undefined until written;
            the operating system allocates the memory as places are first used.

    Raises:
        ConfigError: the system does not have that much memory.
    """

    def __init__(
        self,
        specs: Sequence[StateSpec],
        num_slots: int,
        num_checkpoints: int,
        device: torch.device,
        num_spares: int = 0,
    ) -> None:
        self._num_slots = num_slots
        self._first_spare = num_slots + num_checkpoints
        self._sources: dict[int, int] = {}  # place to read, by slot whose state is not in its own yet
        places = num_slots + num_checkpoints + num_spares
        self.states = tuple(_tensor((places, *spec.shape), device) for spec in specs)

    def fill_with_nan(self) -> None:
        """Fill everything with NaN, for tests that nothing is read before it is written."""
        for state in self.states:
            state.fill_(float("nan"))

    def admit(self, admit: Admit) -> None:
        """Admit a sequence, at its first position or after a checkpoint."""
        assert (admit.checkpoint >= 0) == (admit.computed > 0), f"{admit.seq_id}: a hit restores a checkpoint"
        self._sources[admit.slot] = self._num_slots + admit.checkpoint if admit.computed else FROM_ZERO

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one state, as `copy_checkpoint` gives them."""
        return sum(rows.shape[1] for rows in self._rows)

    def copy_checkpoint(self, slot: int, content: memoryview) -> None:
        """Copy all bytes of the state in a checkpoint slot into `content` on the host."""
        copy_place(self._rows, self._num_slots + slot, content)

    def content(self, slot: int) -> bytes:
        """All bytes of the state in a checkpoint slot, as `copy_checkpoint` writes them."""
        content = bytearray(self.checkpoint_bytes)
        self.copy_checkpoint(slot, memoryview(content))
        return bytes(content)

    def begin_reading(self, slot: int) -> None:
        """Copy the initial state of the sequence in `slot` to the slot's own place, before reading from a store.

        Reading may take several steps, in which the checkpoint may be overwritten, and it may fail in the end.
        """
        source = self._sources.get(slot, slot)
        if source not in (slot, FROM_ZERO):
            for state in self.states:
                state[slot] = state[source]
            del self._sources[slot]

    def fill(self, row: Row, content: memoryview) -> None:
        """Set the state at the end of `row`, which reads from a store, to `content`, as `copy_checkpoint` wrote it."""
        for place in (row.slot, *(self._num_slots + kept.slot for kept in row.checkpoints)):
            fill_place(self._rows, place, content)
        self._sources.pop(row.slot, None)

    @cached_property
    def _rows(self) -> BytePlaces:
        return rows_of_bytes(self.states)

    def reset(self) -> None:
        """Forget every sequence; checkpoints stay."""
        self._sources.clear()

    def keep(self, row: Row) -> None:
        """Keep the state where `row` says, and in its slot's place; the row's only position was computed before."""
        source = self._source(row)
        places = (row.slot, *(self._num_slots + kept.slot for kept in row.checkpoints))
        self.copy_place(source, [place for place in places if place != source])

    def copy_place(self, source: int, targets: Sequence[int]) -> None:
        """Copy the state in a place to others."""
        for place in targets:
            for state in self.states:
                state[place] = state[source]

    def runs(self, rows: Sequence[Row]) -> StateRuns:
        """The runs of a step that computes `rows`."""
        runs: list[tuple[int, int, int]] = []
        for row in rows:
            at, place = row.start, self._source(row)
            for position, target in self._kept_in(row):
                runs.append((position - at, place, target))
                at, place = position, target
            runs.append((row.start + row.count - at, place, row.slot))
        return StateRuns.of(runs)

    def _source(self, row: Row) -> int:
        """The place from which the state of a row's sequence continues."""
        source = self._sources.pop(row.slot, row.slot)
        return source if row.resume < 0 else self._first_spare + row.resume

    def _kept_in(self, row: Row) -> list[tuple[int, int]]:
        """Pairs of a position up to which the state of `row` is kept, and the place that keeps it; in order."""
        kept = [(kept.position, self._num_slots + kept.slot) for kept in row.checkpoints]
        if row.spares:
            known = row.start + row.count - len(row.drafts)
            kept += enumerate([self._first_spare + spare for spare in row.spares], start=known)
            kept.sort()
        return kept


def _tensor(shape: tuple[int, ...], device: torch.device) -> Tensor:
    if device != _HOST:
        return torch.empty(shape, dtype=torch.float32, device=device)
    try:
        return large_block(max(1, 4 * math.prod(shape))).view(torch.float32).view(shape)
    except OSError as error:
        raise ConfigError("max_num_seqs", f"the system does not give memory for state: {error.strerror}") from error
