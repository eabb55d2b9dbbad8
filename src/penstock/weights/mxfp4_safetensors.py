"""MXFP4 in safetensors files: a tensor of 4-bit numbers and a tensor of their scales, read as one.

Decides how the two become GGUF blocks. `NAME_blocks`, U8 `[..., K / 32, 16]`, packs two neighbouring numbers per byte,
the first in the low nibble; `NAME_scales`, U8 `[..., K / 32]`, holds one exponent per 32 numbers (gpt-oss; Open Compute
Project, Microscaling Formats, version 1.0). A GGUF block puts the exponent before the numbers, and the first 16 numbers
in the low nibbles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.contract.errors import ModelFileError
from penstock.weights.gguf_blocks import block_bytes, block_parts
from penstock.weights.safetensors_files import SafetensorsSource, StoredTensor
from penstock.weights.source import (
    PIECE_ELEMENTS,
    StoredBlocks,
    TensorSource,
    convert_into,
    open_binary,
    read_bytes,
)

__all__ = ["Mxfp4Source", "Mxfp4Tensor"]

_KIND = "MXFP4"
_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP, _HALF = 32, 16


@dataclass(frozen=True, slots=True)
class Mxfp4Tensor:
    """Where the two parts of a tensor are stored."""

    blocks: StoredTensor
    scales: StoredTensor

    @property
    def path(self) -> Path:
        """The file of the numbers."""
        return self.blocks.path

    @property
    def dtype(self) -> str:
        """GGUF's name of the block format."""
        return _KIND

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded tensor."""
        return (*self.scales.shape[:-1], self.scales.shape[-1] * _GROUP)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return 2 * self.blocks.bytes

    @property
    def bytes(self) -> int:
        """Total size of both parts in bytes."""
        return self.blocks.bytes + self.scales.bytes

    def slice(self, index: int) -> Mxfp4Tensor:
        """One slice along the first dimension."""
        return Mxfp4Tensor(self.blocks.slice(index), self.scales.slice(index))


class Mxfp4Source(TensorSource):
    """A safetensors checkpoint in which each pair of numbers and scales is one tensor, under the name of the numbers.

    Args:
        plain: the checkpoint.

    Attributes:
        stored: where each tensor is stored, by name.
    """

    def __init__(self, plain: SafetensorsSource) -> None:
        self._plain = plain
        self._pairs = _pairs(plain.stored)
        hidden = {name.removesuffix(_BLOCKS) + _SCALES for name in self._pairs}
        self.stored: Mapping[str, StoredTensor | Mxfp4Tensor] = {
            name: self._pairs.get(name, tensor) for name, tensor in plain.stored.items() if name not in hidden
        }

    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self.stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._pairs[name].shape if name in self._pairs else self._plain.shape(name)

    def stored_kind(self, name: str) -> str:
        """See `TensorSource.stored_kind`."""
        return _KIND if name in self._pairs else ""

    def read_into(self, name: str, out: Tensor) -> None:
        """Fill `out` with a tensor's numbers."""
        if name in self._pairs:
            _read_numbers(name, self._pairs[name], out)
        else:
            self._plain.read_into(name, out)

    def read_slice_into(self, name: str, index: int, out: Tensor) -> None:
        """See `TensorSource.read_slice_into`; reads only the slice."""
        if name in self._pairs:
            _read_numbers(name, self._pairs[name].slice(index), out)
        else:
            self._plain.read_slice_into(name, index, out)

    def read_blocks(self, name: str) -> StoredBlocks:
        """See `TensorSource.read_blocks`."""
        return StoredBlocks(_KIND, _read_blocks(name, self._pair(name)))

    def read_slice_blocks(self, name: str, index: int) -> StoredBlocks:
        """See `TensorSource.read_slice_blocks`; reads only the slice."""
        return StoredBlocks(_KIND, _read_blocks(name, self._pair(name).slice(index)))

    def _pair(self, name: str) -> Mxfp4Tensor:
        if name not in self._pairs:
            raise ModelFileError("", name, "is not stored in quantised blocks")
        return self._pairs[name]


def _pairs(stored: Mapping[str, StoredTensor]) -> dict[str, Mxfp4Tensor]:
    """The pairs of numbers and scales, by the name of the numbers."""
    found = {}
    for name, blocks in stored.items():
        scales = stored.get(name.removesuffix(_BLOCKS) + _SCALES) if name.endswith(_BLOCKS) else None
        if scales is None or not blocks.dtype == scales.dtype == "U8":
            continue
        if len(scales.shape) < 2 or blocks.shape != (*scales.shape, _HALF) or not blocks.bytes:
            raise ModelFileError(
                str(blocks.path),
                name,
                f"has shape {blocks.shape}; scales of shape {scales.shape} belong to {(*scales.shape, _HALF)}",
            )
        found[name] = Mxfp4Tensor(blocks, scales)
    return found


def _read_blocks(name: str, tensor: Mxfp4Tensor) -> Tensor:
    """The blocks in GGUF's layout, uint8 `[N, bytes per row]`."""
    blocks, scales = (_read(name, part) for part in (tensor.blocks, tensor.scales))
    return _as_gguf(blocks.view(-1, _HALF), scales).view(-1, tensor.scales.shape[-1] * block_bytes(_KIND))


def _read_numbers(name: str, tensor: Mxfp4Tensor, out: Tensor) -> None:
    if tuple(out.shape) != tensor.shape:
        raise ModelFileError(str(tensor.path), name, f"has shape {tensor.shape}, expected {tuple(out.shape)}")
    blocks, scales = (_read(name, part) for part in (tensor.blocks, tensor.scales))
    blocks, flat, step = blocks.view(-1, _HALF), out.view(-1), PIECE_ELEMENTS // _GROUP
    for start in range(0, len(blocks), step):
        piece = _as_gguf(blocks[start : start + step], scales[start : start + step])
        numbers = block_parts(piece, _KIND).numbers().view(-1)
        convert_into(numbers, flat[start * _GROUP :][: len(numbers)], tensor.path, name)


def _as_gguf(blocks: Tensor, scales: Tensor) -> Tensor:
    """Convert uint8 `[B, 16]` numbers and `[B]` scales to GGUF blocks `[B, 17]`."""
    codes = torch.stack((blocks & 15, blocks >> 4), dim=2).flatten(1)  # [B, 32], neighbours together
    return torch.cat((scales[:, None], codes[:, :_HALF] | codes[:, _HALF:] << 4), dim=1)


def _read(name: str, part: StoredTensor) -> Tensor:
    """The bytes of one part, flat."""
    data = torch.empty(part.bytes, dtype=torch.uint8)
    with open_binary(part.path) as stream:
        stream.seek(part.offset)
        read_bytes(stream, part.path, name, data)
    return data
