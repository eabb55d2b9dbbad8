"""Binds in two steps, for a model that several ranks divide: headers first, then one rank's share of the weights.

A family takes its weights as from any binder, but gets weights with sizes and no numbers; only plain tensors, which are
small, are read at once. A program is built from them and divided, and the code that divides it requests the parts that
the rank needs (`linear`, `stack`). Decides how a part of a weight is found in the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.experts import StackedWeight
from penstock.kernels.linear import Weight
from penstock.kernels.native import Cpu
from penstock.weights.bind import Binder
from penstock.weights.headers_only import META, HeadersOnly
from penstock.weights.packing import WeightFormat
from penstock.weights.row_parts import RowPart, RowParts
from penstock.weights.shares import Ranges, SharedTensors, block_inputs
from penstock.weights.source import TensorSource
from penstock.weights.stored_experts import StoredExperts

__all__ = ["DividedBinder"]

_EXPERT = "{expert}"

Parts = Sequence[tuple[str, tuple[int, int]]]


@dataclass(frozen=True, slots=True, eq=False)
class _Taken:
    """How a family took a weight.

    Attributes:
        weight: the weight that it got, without numbers.
        take: takes parts of it in the same way, from the binder that reads.
        stored: the parts' names and orientation, and their number of experts; 0 for a weight that is not a stack.
    """

    weight: Weight | StackedWeight
    take: Callable[[Parts], Weight | StackedWeight]
    stored: StoredExperts


class DividedBinder:
    """Gives a family weights without numbers, and a rank its parts of them; owned by the code that loads the model.

    Args:
        source: as for `Binder`; a `HeadersOnly` source for a share that is planned and not loaded.
        dtype: as for `Binder`.
        device: as for `Binder`, for the tensors that are loaded.
        file: as for `Binder`.
        progress: as for `Binder`.
        weight_format: as for `Binder`.
        cpu: as for `Binder`.

    Attributes:
        predicts: False: the part of a model that predicts a second token is not divided.
    """

    predicts = False

    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device | str,
        file: str,
        progress: Callable[[int], object] = lambda count: None,  # noqa: ARG005
        weight_format: WeightFormat = WeightFormat.DENSE,
        cpu: Cpu | None = None,
    ) -> None:
        self._rows = RowParts(source)
        self._shares = SharedTensors(self._rows)
        self._headers = Binder(HeadersOnly(source), dtype, META, file, weight_format=weight_format)
        self.loaded = Binder(self._shares, dtype, device, file, progress, weight_format, cpu)
        """The binder that reads numbers; it counts the bytes and formats of everything read so far."""
        self._taken: dict[int, _Taken] = {}
        self._cut: dict[tuple[int, Ranges | None, Ranges | None], Weight | StackedWeight] = {}

    @property
    def dtype(self) -> torch.dtype:
        """See `WeightLoader.dtype`."""
        return self.loaded.dtype

    @property
    def device(self) -> torch.device:
        """See `WeightLoader.device`; the device of plain tensors."""
        return self.loaded.device

    @property
    def packing_bytes(self) -> int:
        """See `Binder.packing_bytes`, for a planned share: a whole matrix is in memory while a part of it is packed."""
        return self.loaded.packing_bytes + self._headers.packing_bytes

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """See `WeightLoader.take`."""
        return self.loaded.take(name, shape, dtype)

    def take_fused(self, parts: Sequence[tuple[str, tuple[int, ...]]]) -> Tensor:
        """See `WeightLoader.take_fused`."""
        return self.loaded.take_fused(parts)

    def take_linear(self, parts: Parts, *, transposed: bool = False) -> Weight:
        """See `WeightLoader.take_linear`."""
        weight = self._headers.take_linear(parts, transposed=transposed)

        def take(own: Parts) -> Weight:
            return self.loaded.take_linear(own, transposed=transposed)

        return self._noted(weight, take, StoredExperts(tuple(parts), 0, transposed))

    def take_table(self, name: str, shape: tuple[int, int]) -> Weight:
        """See `WeightLoader.take_table`."""
        return self._noted_alone(self._headers.take_table(name, shape), self.loaded.take_table, name, shape)

    def take_router(self, name: str, shape: tuple[int, int]) -> Weight:
        """See `WeightLoader.take_router`."""
        return self._noted_alone(self._headers.take_router(name, shape), self.loaded.take_router, name, shape)

    def take_stack(
        self, experts: int, parts: Parts, *, transposed: bool = False, alternates: bool = False
    ) -> StackedWeight:
        """See `WeightLoader.take_stack`."""
        weight = self._headers.take_stack(experts, parts, transposed=transposed, alternates=alternates)

        def take(own: Parts) -> StackedWeight:
            return self.loaded.take_stack(experts, own, transposed=transposed, alternates=alternates)

        stored = StoredExperts(tuple(parts), experts, transposed, alternates)
        self._taken[id(weight)] = _Taken(weight, take, stored)
        self._ignore_all(stored)
        return weight

    def split_rows(
        self, name: str, shape: tuple[int, int], parts: Mapping[str, tuple[Tensor, tuple[int, ...]]]
    ) -> None:
        """See `WeightLoader.split_rows`."""
        self._headers.split_rows(name, shape, parts)
        self.loaded.ignore(name)
        self._rows.parts |= {part: RowPart(name, rows, its_shape) for part, (rows, its_shape) in parts.items()}
        self.loaded.admit(parts)

    def has(self, name: str) -> bool:
        """See `WeightLoader.has`."""
        return self.loaded.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightLoader.shape`."""
        return self.loaded.shape(name)

    def differ(self, first: str, second: str) -> bool:
        """See `WeightLoader.differ`."""
        return self.loaded.differ(first, second)

    def ignore(self, name: str) -> None:
        """See `WeightLoader.ignore`."""
        self.loaded.ignore(name)

    def leave_out(self, part: str) -> None:
        """See `WeightLoader.leave_out`."""
        self.loaded.leave_out(part)

    def finish(self) -> None:
        """See `Binder.finish`; a weight whose parts are read later counts as taken."""
        self.loaded.finish()

    def forget(self) -> None:
        """Free what was kept for reading parts; call this when all parts are read."""
        self._taken.clear()
        self._cut.clear()
        self._shares.forget()

    def linear(self, weight: Weight, outputs: Ranges | None = None, inputs: Ranges | None = None) -> Weight:
        """Read these outputs and inputs of a weight (None for all); a repeated request returns the same part."""
        part: Weight = self._part(weight, outputs, inputs)
        return part

    def stack(
        self, weight: StackedWeight, outputs: Ranges | None = None, inputs: Ranges | None = None
    ) -> StackedWeight:
        """Read these outputs and inputs of every weight of a stack; None for all."""
        part: StackedWeight = self._part(weight, outputs, inputs)
        return part

    def unit(self, weight: Weight | StackedWeight) -> int:
        """Granularity of cuts: the inputs of this weight can be cut at multiples of it."""
        taken = self._taken[id(weight)].stored
        kinds = self.loaded.kept_kinds(taken.tensors if taken.experts else _names(taken), transposed=taken.transposed)
        return max(map(block_inputs, kinds), default=1)

    def _part(self, weight: Weight | StackedWeight, outputs: Ranges | None, inputs: Ranges | None) -> Any:
        key = id(weight), outputs, inputs
        if key not in self._cut:
            taken = self._taken[id(weight)]
            own = [
                self._named(taken.stored, name, rows, shape[0], inputs, shape[1])
                for (name, shape), rows in zip(taken.stored.parts, _by_part(taken.stored, outputs), strict=True)
                if rows != ()
            ]
            self._cut[key] = taken.take(own)
        return self._cut[key]

    def _named(
        self,
        stored: StoredExperts,
        name: str,
        rows: Ranges | None,
        all_rows: int,
        inputs: Ranges | None,
        all_inputs: int,
    ) -> tuple[str, tuple[int, int]]:
        """Name a part of a stored matrix, or of one matrix per expert; returns the name and the part's shape."""
        lying = _interleaved(rows, all_rows) if stored.alternates and rows is not None else rows
        cut = (inputs, lying) if stored.transposed else (lying, inputs)
        each = [name.replace(_EXPERT, str(expert)) for expert in range(stored.experts)] if _EXPERT in name else [name]
        found = [self._shares.part(one, *cut) for one in each]
        self.loaded.admit(found)
        named = found[0] if _EXPERT not in name else name + found[0][len(each[0]) :]
        return named, (_count(rows, all_rows), _count(inputs, all_inputs))

    def _noted_alone(
        self, weight: Weight, take: Callable[[str, tuple[int, int]], Weight], name: str, shape: tuple[int, int]
    ) -> Weight:
        return self._noted(weight, lambda own: take(*own[0]), StoredExperts(((name, shape),), 0))

    def _noted(self, weight: Weight, take: Callable[[Parts], Weight], stored: StoredExperts) -> Weight:
        self._taken[id(weight)] = _Taken(weight, take, stored)
        self._ignore_all(stored)
        return weight

    def _ignore_all(self, stored: StoredExperts) -> None:
        """Count the tensors of a weight as taken."""
        for name in stored.tensors if stored.experts else _names(stored):
            self.loaded.ignore(name)


def _names(stored: StoredExperts) -> Iterable[str]:
    return [name for name, _ in stored.parts]


def _count(ranges: Ranges | None, whole: int) -> int:
    return whole if ranges is None else sum(map(len, ranges))


def _by_part(stored: StoredExperts, outputs: Ranges | None) -> list[Ranges | None]:
    """The rows of each part that are among these outputs of the parts stacked, numbered within the part."""
    if outputs is None:
        return [None] * len(stored.parts)
    sizes = [rows for _, (rows, _) in stored.parts]
    found: list[Ranges | None] = []
    for size, end in zip(sizes, accumulate(sizes), strict=True):
        first = end - size
        met = [range(max(each.start, first) - first, min(each.stop, end) - first) for each in outputs]
        found.append(tuple(each for each in met if len(each)))
    return found


def _interleaved(rows: Ranges, count: int) -> Ranges:
    """Where rows of the first half, and the same rows of the second, are in a matrix that interleaves both halves."""
    half = count // 2
    firsts = [each for each in rows if each.stop <= half]
    assert [range(each.start + half, each.stop + half) for each in firsts] == list(rows[len(firsts) :]), rows
    return tuple(range(2 * each.start, 2 * each.stop) for each in firsts)
