"""Binding: a model takes its weights by name, and none may be left over.

Checks that a checkpoint and a model agree exactly: every tensor is taken once, with the expected shape, or explicitly
ignored. Knows neither formats nor families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch

from penstock.contract.errors import ModelFileError
from penstock.kernels.dense_weight import DenseWeight
from penstock.kernels.experts import StackedWeight
from penstock.kernels.fused_weight import FusedWeight
from penstock.kernels.linear import Weight
from penstock.kernels.native import Cpu
from penstock.kernels.packed_stack import FusedStack, PackedStack
from penstock.weights.headers_only import META
from penstock.weights.packing import BFLOAT16_KINDS, Packer, WeightFormat
from penstock.weights.planned_packing import PlannedPacker
from penstock.weights.row_parts import RowPart, RowParts
from penstock.weights.source import StoredBlocks, TensorSource, rows_joined
from penstock.weights.stored_experts import StoredExperts

__all__ = ["Binder"]

_NAMED_LEFTOVERS = 5


def _unseen(_: int) -> None:
    """Ignore progress."""


class Binder:
    """Hands a model its tensors; owned by the code that loads the model, from construction to `finish`.

    Tensors are fresh and belong to the caller. Only one is filled at a time, so loading needs little more memory than
    the weights themselves.

    Args:
        source: where tensors come from.
        dtype: dtype of every tensor taken.
        device: device of every tensor taken; torch's `meta`, with a `HeadersOnly` source, for tensors without memory.
        file: the model's path as the operator gave it, for messages.
        progress: called with the number of elements of each tensor read (`tqdm.update` fits).
        weight_format: format of projections and embeddings.
        cpu: kernels whose threads pack weights; None to pack on the calling thread.
        predicts: see `WeightLoader.predicts`.

    Attributes:
        bytes: memory of all tensors taken so far.
        formats: formats of the projections and embeddings taken so far, in order of appearance: names of dtypes, and
            of block kinds for blocks kept as stored.
        mixed: expert weights whose block kind differs from expert to expert: the first tensor's name, and the kinds.
            Such weights become plain numbers, which rounds them in a bfloat16 model.
        left_out: for parts of the checkpoint that are not computed, the number of tensors by name prefix.
    """

    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device | str,
        file: str,
        progress: Callable[[int], object] = _unseen,
        weight_format: WeightFormat = WeightFormat.DENSE,
        cpu: Cpu | None = None,
        *,
        predicts: bool = False,
    ) -> None:
        self._source = RowParts(source)
        self.predicts = predicts
        self.dtype = dtype
        self.device = torch.device(device)
        self.bytes = 0
        self.formats: dict[str, None] = {}
        self.mixed: list[str] = []
        self.left_out: dict[str, int] = {}
        self._file = file
        self._progress = progress
        packer = PlannedPacker if self.device == META else Packer
        self._packer = packer(weight_format, file, cpu)
        self._names = set(source.names())
        self._left = set(self._names)

    @property
    def packing_bytes(self) -> int:
        """Peak temporary memory, in bytes, of packing any one weight; computed for a planned model only."""
        return self._packer.packing_bytes + self._source.whole_bytes

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of this name, taken or not."""
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor in the checkpoint; does not take the tensor."""
        return self._source.shape(name)

    def split_rows(
        self, name: str, shape: tuple[int, int], parts: Mapping[str, tuple[torch.Tensor, tuple[int, ...]]]
    ) -> None:
        """See `WeightLoader.split_rows`; each part must then be taken like any other tensor.

        Raises:
            ModelFileError: as for `take`.
        """
        self._claim(name, shape)
        self._source.parts |= {part: RowPart(name, rows, its_shape) for part, (rows, its_shape) in parts.items()}
        self._names |= parts.keys()
        self._left |= parts.keys()

    def differ(self, first: str, second: str) -> bool:
        """Whether two tensors of the checkpoint differ in shape or numbers; does not take either."""
        shape = self._source.shape(first)
        if shape != self._source.shape(second):
            return True
        numbers = [torch.empty(shape, dtype=self.dtype) for _ in range(2)]
        for name, out in zip((first, second), numbers, strict=True):
            self._source.read_into(name, out)
        return not torch.equal(*numbers)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Take a tensor of exactly this shape, contiguous, in `dtype` (default: the binder's), on the binder's device.

        Raises:
            ModelFileError: it is missing, has a different shape, was taken before, or cannot be read.
        """
        self._claim(name, shape)
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self._fill(name, out)
        self.bytes += out.nbytes
        return out

    def take_fused(self, parts: Sequence[tuple[str, tuple[int, ...]]]) -> torch.Tensor:
        """Take several tensors, stacked along the first dimension: `[N1, K], [N2, K], ...` to `[N1 + N2 + ..., K]`.

        Each part is read directly into its place, without a second copy.

        Raises:
            ModelFileError: as for `take`, for any of the parts.
            ValueError: there are no parts, or they differ in more than the first dimension.
        """
        tails = {shape[1:] for _, shape in parts}
        if len(tails) != 1 or any(not shape for _, shape in parts):
            raise ValueError(f"parts to fuse must agree in all dimensions but the first, got {parts}")
        for name, shape in parts:
            self._claim(name, shape)
        out = self._stacked(parts, self.dtype)
        self.bytes += out.nbytes
        return out

    def take_linear(self, parts: Sequence[tuple[str, tuple[int, int]]], *, transposed: bool = False) -> Weight:
        """Take the weight of a projection, parts `[N1, K], [N2, K], ...` stacked, in the binder's weight format.

        Args:
            parts: name and shape of each part, outputs first.
            transposed: whether the checkpoint stores them inputs first.

        Raises:
            ModelFileError: as for `take`, or the numbers do not fit the format.
        """
        for name, (outputs, inputs) in parts:
            self._claim(name, (inputs, outputs) if transposed else (outputs, inputs))
        weight = self._linear(parts, self._packer.weight, transposed=transposed)
        self.bytes += weight.nbytes
        return weight

    def take_table(self, name: str, shape: tuple[int, int]) -> Weight:
        """Take an embedding table `[V, H]`, in a format that also works for projections; raises as `take_linear`."""
        self._claim(name, shape)
        if self._packer.weight_format is WeightFormat.INT4:
            weight: Weight = self._packer.table(self._stacked([(name, shape)], torch.float32), name)
            self.formats["int8"] = None
        else:
            weight = self._linear([(name, shape)], self._packer.table)
        self.bytes += weight.nbytes
        return weight

    def take_router(self, name: str, shape: tuple[int, int]) -> Weight:
        """Take a router's weight `[E, H]`, in the binder's dtype whatever the weight format.

        Raises:
            ModelFileError: as for `take`.
        """
        self._claim(name, shape)
        numbers = self._stacked([(name, shape)], self.dtype)
        dense = self._packer.weight_format is WeightFormat.DENSE
        weight: Weight = DenseWeight(numbers) if dense else self._packer.plain(numbers, name)
        self.bytes += weight.nbytes
        return weight

    def take_stack(
        self,
        experts: int,
        parts: Sequence[tuple[str, tuple[int, int]]],
        *,
        transposed: bool = False,
        alternates: bool = False,
    ) -> StackedWeight:
        """Take a layer's expert weights `[E, N1 + N2 + ..., K]`, in the binder's format; reads one expert at a time.

        Args:
            experts: E.
            parts: name and shape `[N1, K], [N2, K], ...` of the parts of one expert, stacked in this order. A name
                with `{expert}` stands for E tensors, numbered from 0 to E - 1; a name without it is one tensor
                `[E, N, K]`.
            transposed: whether files store each expert inputs first.
            alternates: whether the rows of a part interleave two halves (gate and up projections of gpt-oss); the
                stack has one half after the other.

        Raises:
            ModelFileError: as for `take`, or the numbers do not fit the format.
        """
        stored = StoredExperts(tuple(parts), experts, transposed, alternates)
        for name, shape in stored.tensors.items():
            self._claim(name, shape)
        stack = self._stack(stored)
        self.bytes += stack.nbytes
        return stack

    def _stack(self, stored: StoredExperts) -> StackedWeight:
        weight_format = self._packer.weight_format
        if weight_format is WeightFormat.DENSE:
            self.formats[str(self.dtype).removeprefix("torch.")] = None
            out = torch.empty((stored.experts, stored.rows, stored.inputs), dtype=self.dtype, device=self.device)
            for expert in range(stored.experts):
                self._fill_expert(stored, expert, out[expert])
            return out
        parts = stored.each_part()
        kinds = [frozenset(self._kinds(part.tensors, transposed=part.transposed)) for part in parts]
        if weight_format is WeightFormat.STORED and len(set(kinds)) > 1:
            return FusedStack(tuple(self._packed_stack(part) for part in parts))
        return self._packed_stack(stored)

    def _packed_stack(self, stored: StoredExperts) -> PackedStack:
        names, weight_format = list(stored.tensors), self._packer.weight_format
        quantised = weight_format in (WeightFormat.INT8, WeightFormat.INT4)
        dtype = torch.float32 if quantised else self.dtype
        weight_of: Callable[[int], torch.Tensor | StoredBlocks]
        if self._stays_blocks(names, transposed=stored.transposed):
            weight_of = partial(self._expert_blocks, stored)
        else:
            self.formats[weight_format.value if quantised else str(dtype).removeprefix("torch.")] = None
            weight_of = partial(self._expert_numbers, stored, dtype=dtype)
        return self._packer.stack(stored.experts, weight_of, stored.rows, stored.inputs, names[0])

    def _expert_numbers(self, stored: StoredExperts, expert: int, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty((stored.rows, stored.inputs), dtype=dtype, device=self.device)
        self._fill_expert(stored, expert, out)
        return out

    def _fill_expert(self, stored: StoredExperts, expert: int, out: torch.Tensor) -> None:
        stored.read_into(self._source, expert, out)
        self._progress(out.numel())

    def _expert_blocks(self, stored: StoredExperts, expert: int) -> StoredBlocks:
        self._progress(stored.rows * stored.inputs)
        return stored.read_blocks(self._source, expert)

    def _stays_blocks(self, names: Sequence[str], *, transposed: bool) -> bool:
        """Whether these tensors, as one weight, stay in the file's blocks; records the kind, or mixed kinds."""
        if self._packer.weight_format is not WeightFormat.STORED:
            return False
        kinds = self._kinds(names, transposed=transposed)
        if len(kinds) > 1:
            self.mixed.append(f"{names[0]} ({', '.join(sorted(kind or 'plain' for kind in kinds))})")
        if kinds == {""} or len(kinds) > 1:
            return False
        self.formats[kinds.pop()] = None
        return True

    def admit(self, names: Iterable[str]) -> None:
        """Add tensors that the source gained after construction; each may be taken, again if it was taken before."""
        self._names.update(names)
        self._left.update(names)

    def kept_kinds(self, names: Iterable[str], *, transposed: bool = False) -> set[str]:
        """The kinds of blocks that these tensors, as one weight, are kept in; empty if they become plain numbers."""
        if self._packer.weight_format is not WeightFormat.STORED:
            return set()
        return self._kinds(names, transposed=transposed) - {""}

    def _kinds(self, names: Iterable[str], *, transposed: bool = False) -> set[str]:
        """The block kinds that these tensors may stay in; "" for tensors that are, or must become, plain numbers."""
        if transposed:  # blocks run along the stored rows, which are not the inputs
            return {""}
        kinds = {self._source.stored_kind(name) for name in names}
        plain = BFLOAT16_KINDS if self.dtype == torch.float32 else frozenset[str]()
        return {"" if kind in plain else kind for kind in kinds}

    def _linear(
        self,
        parts: Sequence[tuple[str, tuple[int, int]]],
        pack: Callable[[torch.Tensor, str], Weight],
        *,
        transposed: bool = False,
    ) -> Weight:
        weight_format = self._packer.weight_format
        if weight_format is WeightFormat.DENSE:
            self.formats[str(self.dtype).removeprefix("torch.")] = None
            return DenseWeight(self._numbers(parts, transposed, self.dtype))
        first = parts[0][0]
        rows, inputs = sum(outputs for _, (outputs, _) in parts), parts[0][1][1]
        names = [name for name, _ in parts]
        if weight_format is WeightFormat.STORED and len(self._kinds(names, transposed=transposed)) > 1:
            return FusedWeight(tuple(self._linear([part], pack, transposed=transposed) for part in parts))
        if self._stays_blocks(names, transposed=transposed):
            blocks = [self._source.read_blocks(name) for name in names]
            self._progress(rows * inputs)
            data = rows_joined([part.data for part in blocks])
            return self._packer.blocks(StoredBlocks(blocks[0].kind, data), rows, inputs, first)
        if weight_format in (WeightFormat.INT8, WeightFormat.INT4):
            self.formats[weight_format.value] = None
            return pack(self._numbers(parts, transposed, torch.float32), first)
        self.formats[str(self.dtype).removeprefix("torch.")] = None
        return pack(self._numbers(parts, transposed, self.dtype), first)

    def _numbers(
        self, parts: Sequence[tuple[str, tuple[int, int]]], transposed: bool, dtype: torch.dtype
    ) -> torch.Tensor:
        """The parts' numbers stacked, outputs first."""
        if not transposed:
            return self._stacked(parts, dtype)
        columns = [(name, (inputs, outputs)) for name, (outputs, inputs) in parts]
        return rows_joined([self._stacked([part], dtype).t() for part in columns]).contiguous()

    def _stacked(self, parts: Sequence[tuple[str, tuple[int, ...]]], dtype: torch.dtype) -> torch.Tensor:
        rows = sum(shape[0] for _, shape in parts)
        out = torch.empty((rows, *parts[0][1][1:]), dtype=dtype, device=self.device)
        start = 0
        for name, shape in parts:
            self._fill(name, out[start : start + shape[0]])
            start += shape[0]
        return out

    def ignore(self, name: str) -> None:
        """Mark a tensor that the model does not need (a buffer it computes itself); no error if it is missing."""
        self._left.discard(name)

    def leave_out(self, part: str) -> None:
        """Mark a part of the checkpoint that the model does not compute: tensors whose names begin with `part`."""
        names = {name for name in self._left if name.startswith(part)}
        self._left -= names
        if names:
            self.left_out[part] = len(names)

    def finish(self) -> None:
        """Check that every tensor of the checkpoint was taken or ignored, or has no effect (`TensorSource.spare`).

        Raises:
            ModelFileError: some are left over, so the checkpoint is not the model that its settings describe.
        """
        self._left = {name for name in self._left if not self._source.spare(name)}
        if not self._left:
            return
        some = ", ".join(sorted(self._left)[:_NAMED_LEFTOVERS])
        more = len(self._left) - _NAMED_LEFTOVERS
        listed = f"{some} and {more} more" if more > 0 else some
        raise ModelFileError(
            self._file, "", f"{len(self._left)} tensors of the checkpoint have no place in the model: {listed}"
        )

    def _claim(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._names:
            raise ModelFileError(self._file, name, f"the model needs this tensor, of shape {shape}; there is none")
        if name not in self._left:
            raise ModelFileError(self._file, name, "is taken twice")
        found = self._source.shape(name)
        if found != shape:
            raise ModelFileError(self._file, name, f"has shape {found}, but the model needs {shape}")
        self._left.discard(name)

    def _fill(self, name: str, out: torch.Tensor) -> None:
        self._source.read_into(name, out)
        self._progress(out.numel())
