"""Tensors of a GGUF file under Hugging Face names, in Hugging Face orientation, dequantised as they are read.

Decides where stored rows go. Block formats come from `gguf_blocks`; names, arrangements and settings from the family's
dialect. Memory beyond the requested tensor stays within a few MiB, or one row if that is more.

Invariant: every tensor of an opened file has a name here or is part of the config.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.contract.errors import ModelFileError
from penstock.weights.gguf_blocks import FLOAT_TYPES, decode
from penstock.weights.gguf_dialect import Arrangement, FindDialect
from penstock.weights.gguf_header import GgufHeader, GgufTensor
from penstock.weights.gguf_keys import GgufKeys
from penstock.weights.gguf_split import read_gguf
from penstock.weights.source import (
    PIECE_ELEMENTS,
    StoredBlocks,
    TensorSource,
    convert_into,
    open_binary,
    read_bytes,
    read_elements,
)

__all__ = ["GgufSource", "interleaved_rows", "open_gguf", "read_numbers"]

_BY_HEADS = (Arrangement.INTERLEAVED_QUERY, Arrangement.INTERLEAVED_KEY)
_IN_ORDER = (Arrangement.SAME, Arrangement.FLAT, Arrangement.FILTERS, Arrangement.ROW)
_COMPUTED = (Arrangement.MINUS_ONE, Arrangement.DECAY)


class GgufSource(TensorSource):
    """The tensors of one GGUF file, or of all parts of a split file, read on demand.

    Attributes:
        header: the file's header.
        config: its settings, under Hugging Face's keys.
        stored: where each tensor is stored, by its Hugging Face name.
    """

    def __init__(
        self, header: GgufHeader, config: dict[str, Any], tensors: dict[str, tuple[GgufTensor, Arrangement]]
    ) -> None:
        self.header = header
        self.config = config
        self.stored = {name: tensor for name, (tensor, _) in tensors.items()}
        self._arrangements = {name: arrangement for name, (_, arrangement) in tensors.items()}

    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self.stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor in Hugging Face orientation."""
        if name not in self.stored:
            raise ModelFileError(str(self.header.path), name, "the file has no such tensor")
        tensor = self.stored[name]
        match self._arrangements[name]:
            case Arrangement.TRANSPOSED:
                return tensor.shape[::-1]
            case Arrangement.FLAT | Arrangement.DECAY:
                return (tensor.elements,)
            case Arrangement.FILTERS:
                return tensor.shape[0], 1, tensor.shape[1]
            case Arrangement.ROW:
                return 1, tensor.elements
        return tensor.shape

    def stored_kind(self, name: str) -> str:
        """See `TensorSource.stored_kind`."""
        kind = self.stored[name].kind.name if name in self.stored else ""
        return "" if kind in FLOAT_TYPES else kind

    def read_blocks(self, name: str) -> StoredBlocks:
        """See `TensorSource.read_blocks`; rows are put in Hugging Face order, blocks are unchanged."""
        if not self.stored_kind(name):
            raise ModelFileError(str(self.header.path), name, "is not stored in quantised blocks")
        tensor = self.stored[name]
        blocks = _read_blocks(tensor)
        if self._arrangements[name] not in _BY_HEADS:
            return blocks
        placed = torch.empty_like(blocks.data)
        placed[self._row_order(tensor, self._arrangements[name])] = blocks.data
        return StoredBlocks(tensor.kind.name, placed)

    def read_slice_blocks(self, name: str, index: int) -> StoredBlocks:
        """See `TensorSource.read_slice_blocks`; reads only the slice."""
        if not self.stored_kind(name):
            raise ModelFileError(str(self.header.path), name, "is not stored in quantised blocks")
        return _read_blocks(self._slice(name, index))

    def read_slice_into(self, name: str, index: int, out: torch.Tensor) -> None:
        """See `TensorSource.read_slice_into`; reads only the slice."""
        part = self._slice(name, index)
        if tuple(out.shape) != part.shape:
            raise ModelFileError(
                str(self.header.path), name, f"has slices of shape {part.shape}, expected {tuple(out.shape)}"
            )
        read_numbers(part, out.view(-1))

    def _slice(self, name: str, index: int) -> GgufTensor:
        whole = self.stored[name]
        if self._arrangements[name] is not Arrangement.SAME or len(whole.shape) < 2:
            raise ModelFileError(str(self.header.path), name, "cannot be read slice by slice")
        count = whole.bytes // whole.shape[0]
        return replace(whole, shape=whole.shape[1:], offset=whole.offset + index * count, bytes=count)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` with a tensor's numbers."""
        wanted = self.shape(name)
        tensor, arrangement = self.stored[name], self._arrangements[name]
        path = tensor.path
        if tuple(out.shape) != wanted:
            raise ModelFileError(str(path), name, f"has shape {wanted}, expected {tuple(out.shape)}")
        if arrangement in _IN_ORDER:
            read_numbers(tensor, out.view(-1))
        elif arrangement is Arrangement.TRANSPOSED:
            for start, rows in _row_pieces(tensor):
                convert_into(rows.T, out[:, start : start + len(rows)], path, name)
        elif arrangement in _COMPUTED:
            numbers = torch.empty(wanted)  # float32: near 1, a narrower type would lose the difference from 1
            read_numbers(tensor, numbers)
            if arrangement is Arrangement.DECAY and not bool((numbers < 0).all()):
                raise ModelFileError(str(path), tensor.name, "must be below 0 throughout")
            computed = torch.log(-numbers) if arrangement is Arrangement.DECAY else numbers - 1.0
            convert_into(computed, out, path, name)
        else:
            order = self._row_order(tensor, arrangement).to(out.device)
            for start, rows in _row_pieces(tensor):
                placed = torch.empty_like(rows, dtype=out.dtype, device=out.device)
                convert_into(rows, placed, path, name)
                out.view(tensor.shape[0], -1)[order[start : start + len(rows)]] = placed

    def _row_order(self, tensor: GgufTensor, arrangement: Arrangement) -> torch.Tensor:
        """Where each stored row goes: `[rows]`, int64."""
        query = arrangement is Arrangement.INTERLEAVED_QUERY
        return interleaved_rows(tensor.shape[0], self.config["num_attention_heads" if query else "num_key_value_heads"])


def interleaved_rows(rows: int, heads: int) -> torch.Tensor:
    """Where each stored row of queries or keys goes, `[rows]` int64, if they are interleaved.

    Stored rows of a head alternate between the two halves of Hugging Face's rotary embedding (`permute` in
    llama.cpp's conversion); the inverse puts row `2i + j` at `j * D / 2 + i`.
    """
    order = torch.arange(rows).view(heads, 2, -1)  # [H, 2, D/2]
    return order.transpose(1, 2).reshape(-1)


def read_numbers(tensor: GgufTensor, flat: torch.Tensor) -> None:
    """Read elements that are already in order: directly for float types, decoded piece by piece for blocks."""
    path, kind = tensor.path, tensor.kind
    if kind.name in FLOAT_TYPES:
        read_elements(path, tensor.name, tensor.offset, FLOAT_TYPES[kind.name], flat)
        return
    for start, numbers in _pieces(tensor, kind.elements):
        numbers = numbers.view(-1)
        convert_into(numbers, flat[start * kind.elements :][: len(numbers)], path, tensor.name)


def _read_blocks(tensor: GgufTensor) -> StoredBlocks:
    data = torch.empty(tensor.shape[0], tensor.bytes // tensor.shape[0], dtype=torch.uint8)
    with open_binary(tensor.path) as stream:
        stream.seek(tensor.offset)
        read_bytes(stream, tensor.path, tensor.name, data.view(-1))
    return StoredBlocks(tensor.kind.name, data)


def _row_pieces(tensor: GgufTensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield rows of a matrix (or elements of a vector) in order: index of the first, and `[rows, row size]`."""
    return _pieces(tensor, tensor.shape[-1] if len(tensor.shape) > 1 else 1)


def _pieces(tensor: GgufTensor, width: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the tensor as rows of `width` elements, a few MiB at a time: the first row's index, and `[rows, width]`."""
    kind = tensor.kind
    rows, row_bytes = tensor.elements // width, width // kind.elements * kind.bytes
    step = max(1, min(rows, PIECE_ELEMENTS // width))
    raw = torch.empty(step * row_bytes, dtype=torch.uint8)
    with open_binary(tensor.path) as stream:
        stream.seek(tensor.offset)
        for start in range(0, rows, step):
            part = raw[: min(step, rows - start) * row_bytes]
            read_bytes(stream, tensor.path, tensor.name, part)
            yield start, decode(part, kind).view(-1, width)


def open_gguf(path: Path, dialects: FindDialect) -> GgufSource:
    """Open a GGUF file: check its header, translate its settings and names.

    Args:
        path: the file, or any part of a split file.
        dialects: finds the dialect of the file's architecture.

    Raises:
        ModelFileError: the file is malformed, or holds something that is not understood.
    """
    header = read_gguf(path)
    file = str(path)
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelFileError(file, "general.architecture", f"must be a name, got {reprlib.repr(architecture)}")
    dialect = dialects(architecture, file)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFileError(file, "token_embd.weight", "is missing or no matrix")
    keys = GgufKeys(header, dialect.architecture)
    config = dialect.settings(keys, embedding.shape[0])
    renamed = {}
    for name, tensor in header.tensors.items():
        if name in keys.tensors_read:
            continue
        known = dialect.hugging_face_tensor(name)
        if known is None:
            raise ModelFileError(file, name, f"no tensor of a {architecture} model has this name")
        renamed[known.name] = (tensor, known.arrangement)
        _check_arrangement(file, tensor, known.arrangement, config)
    return GgufSource(header, config, renamed)


def _check_arrangement(file: str, tensor: GgufTensor, arrangement: Arrangement, config: dict[str, Any]) -> None:
    """Raise ModelFileError unless the tensor's shape and type fit its arrangement."""
    if arrangement is Arrangement.TRANSPOSED and len(tensor.shape) != 2:
        raise ModelFileError(file, tensor.name, f"must be a matrix, got shape {tensor.shape}")
    if arrangement is Arrangement.FILTERS and len(tensor.shape) != 2:
        raise ModelFileError(file, tensor.name, f"must be filters [C, L], got shape {tensor.shape}")
    row = tensor.kind.name in FLOAT_TYPES and tensor.elements == tensor.shape[-1]
    if arrangement is Arrangement.ROW and not row:
        raise ModelFileError(file, tensor.name, f"must be one row of plain numbers, got shape {tensor.shape}")
    vector = arrangement is Arrangement.DECAY or len(tensor.shape) == 1
    if arrangement in _COMPUTED and (not vector or tensor.kind.name not in FLOAT_TYPES):
        raise ModelFileError(file, tensor.name, f"must be a vector of plain numbers, got shape {tensor.shape}")
    if arrangement in _BY_HEADS:
        _check_heads(file, tensor, arrangement, config)


def _check_heads(file: str, tensor: GgufTensor, arrangement: Arrangement, config: dict[str, Any]) -> None:
    """Raise ModelFileError unless the tensor's rows are the heads that the settings describe."""
    query = arrangement is Arrangement.INTERLEAVED_QUERY
    heads = config["num_attention_heads" if query else "num_key_value_heads"]
    rows = heads * config["head_dim"]
    if tensor.shape[0] != rows or len(tensor.shape) > 2 or config["head_dim"] % 2:
        raise ModelFileError(
            file, tensor.name, f"has shape {tensor.shape}; {heads} heads of {config['head_dim']} have {rows} rows"
        )
