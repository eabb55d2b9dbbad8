"""How a checkpoint stores a layer's experts, and reading one of them.

Decides the order of rows within an expert. Does not know how its numbers or blocks are used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.weights.source import StoredBlocks, TensorSource, rows_joined

__all__ = ["StoredExperts"]

_EXPERT = "{expert}"


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """Experts of the same shape, each made of the same parts; the fields are those of `WeightLoader.take_stack`."""

    parts: tuple[tuple[str, tuple[int, int]], ...]
    experts: int
    transposed: bool = False
    alternates: bool = False

    @property
    def rows(self) -> int:
        """Number of outputs of an expert."""
        return sum(outputs for _, (outputs, _) in self.parts)

    @property
    def inputs(self) -> int:
        """Number of inputs of an expert."""
        return self.parts[0][1][1]

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every stored tensor by name, with its required shape."""
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in self.parts:
            stored = shape[::-1] if self.transposed else shape
            if _EXPERT in name:
                found |= {name.replace(_EXPERT, str(expert)): stored for expert in range(self.experts)}
            else:
                found[name] = (self.experts, *stored)
        return found

    def each_part(self) -> list[StoredExperts]:
        """One `StoredExperts` per part."""
        return [replace(self, parts=(part,)) for part in self.parts]

    def read_into(self, source: TensorSource, expert: int, out: Tensor) -> None:
        """Fill `out` `[N, K]` with the numbers of one expert; raises as `TensorSource.read_into`."""
        start = 0
        for name, (rows, _) in self.parts:
            self._read_part(source, name, expert, out[start : start + rows])
            start += rows

    def _read_part(self, source: TensorSource, name: str, expert: int, out: Tensor) -> None:
        if out.is_meta:  # planned, not loaded
            return
        as_stored = not self.transposed and not self.alternates
        stored = out if as_stored else torch.empty(out.shape[::-1] if self.transposed else out.shape, dtype=out.dtype)
        if _EXPERT in name:
            source.read_into(name.replace(_EXPERT, str(expert)), stored)
        else:
            source.read_slice_into(name, expert, stored)
        if not as_stored:
            rows = stored.t() if self.transposed else stored
            out.copy_(_apart(rows) if self.alternates else rows)

    def read_blocks(self, source: TensorSource, expert: int) -> StoredBlocks:
        """The blocks of one expert; all parts must be of one kind. Raises as `TensorSource.read_blocks`."""
        blocks = [
            source.read_blocks(name.replace(_EXPERT, str(expert)))
            if _EXPERT in name
            else source.read_slice_blocks(name, expert)
            for name, _ in self.parts
        ]
        data = [_apart(part.data) if self.alternates else part.data for part in blocks]
        return StoredBlocks(blocks[0].kind, rows_joined(data))


def _apart(rows: Tensor) -> Tensor:
    """De-interleave rows: the even rows, then the odd ones."""
    return rows_joined((rows[::2], rows[1::2]))
