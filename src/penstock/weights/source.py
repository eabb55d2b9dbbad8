"""The port through which models receive weights, and reading stored numbers into tensors.

Decides how bytes become numbers of the requested dtype: read straight into the tensor if the stored dtype matches,
converted in pieces otherwise, so that memory beyond the tensor itself stays within a few MiB. Knows no file format.

Invariants: files are read, never mapped, so a tensor already handed out does not depend on its file, and a truncated
file raises an error instead of a signal. Stored numbers are little-endian in both formats, and this machine must be
little-endian too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import torch

from penstock.contract.errors import ModelFileError

__all__ = [
    "PIECE_ELEMENTS",
    "StoredBlocks",
    "TensorSource",
    "convert_into",
    "is_decent_name",
    "open_binary",
    "read_bytes",
    "read_elements",
    "rows_joined",
]

_MAX_NAME = 256

PIECE_ELEMENTS = 1 << 19
"""Elements converted per piece: 2 MiB in float32."""


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A matrix as quantised blocks, in the byte layout of the file.

    Attributes:
        kind: the name of the block format, such as `Q4_K`.
        data: uint8 `[N, bytes per row]`, contiguous; rows in Hugging Face order, outputs first.
    """

    kind: str
    data: torch.Tensor


def rows_joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate matrices of equal width along the rows, `[N1 + N2 + ..., K]`; `meta` tensors are supported.

    `torch.cat` on `meta` tensors would load torch's compiler: 1.5 s, and 70 MiB that are never freed.
    """
    if len(parts) == 1:
        return parts[0]
    rows = sum(len(part) for part in parts)
    out = torch.empty((rows, *parts[0].shape[1:]), dtype=parts[0].dtype, device=parts[0].device)
    return out if out.is_meta else torch.cat(list(parts), out=out)


class TensorSource(Protocol):
    """Named tensors in files, under Hugging Face names and in Hugging Face orientation."""

    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor.

        Raises:
            ModelFileError: there is no such tensor.
        """
        ...

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out`, a contiguous tensor of this shape, converting to its dtype and device.

        Raises:
            ModelFileError: there is no such tensor, it holds integers where `out` holds weights or the reverse, `out`
                has a different shape, the file is shorter than when it was opened, or a finite number does not fit the
                dtype.
        """
        ...

    def stored_kind(self, name: str) -> str:  # noqa: ARG002 - a format without blocks has none under any name
        """The kind of the tensor's quantised blocks; "" where it is stored as plain numbers."""
        return ""

    def read_blocks(self, name: str) -> StoredBlocks:
        """A quantised tensor's blocks, without dequantising.

        Raises:
            ModelFileError: the tensor has no blocks, or the file is shorter than when it was opened.
        """
        raise ModelFileError("", name, "is not stored in quantised blocks")

    def read_slice_into(self, name: str, index: int, out: torch.Tensor) -> None:
        """Fill `out` with one slice along the first dimension of a tensor; otherwise like `read_into`.

        Raises:
            ModelFileError: as for `read_into`, or the tensor's rows are not stored in Hugging Face order.
        """
        whole = torch.empty(self.shape(name), dtype=out.dtype, device=out.device)
        self.read_into(name, whole)
        out.copy_(whole[index])

    def read_slice_blocks(self, name: str, index: int) -> StoredBlocks:
        """The blocks of one slice along the first dimension of a quantised tensor; raises as `read_blocks` does."""
        raise ModelFileError("", f"{name}[{index}]", "is not stored in quantised blocks")

    def spare(self, name: str) -> bool:  # noqa: ARG002 - mostly every tensor counts
        """Whether a model with no place for the tensor computes the same results without it."""
        return False

    def rounded(self) -> Mapping[str, int]:
        """Tensors that reading rounded because no wider form was requested: their number, by a description."""
        return {}

    def unheeded(self) -> Sequence[str]:
        """Checkpoint settings that ask for rounding activations, keys or values, which is not implemented."""
        return ()

    def read(self, name: str, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """A fresh, contiguous tensor that the caller owns; raises as `read_into` does."""
        out = torch.empty(self.shape(name), dtype=dtype, device=device)
        self.read_into(name, out)
        return out


def is_decent_name(name: str) -> bool:
    """Whether a name found in a file is safe to show: errors and logs must not contain control characters."""
    return len(name) <= _MAX_NAME and name.isprintable()


def open_binary(path: Path) -> BinaryIO:
    """Open a model's file, unbuffered.

    Raises:
        ModelFileError: it cannot be opened.
    """
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise ModelFileError(str(path), "", f"cannot be read: {error.strerror or error}") from error


def read_bytes(stream: BinaryIO, path: Path, name: str, destination: torch.Tensor) -> None:
    """Fill `destination` (contiguous, on the CPU) with the next bytes of `stream`.

    Raises:
        ModelFileError: the stream ends too early.
    """
    if destination.numel() == 0:
        return
    view = memoryview(destination.view(-1).view(torch.uint8).numpy())
    done = 0
    while done < len(view):
        count = stream.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            raise ModelFileError(str(path), name, f"the file ends {len(view) - done} bytes too early")
        done += count


def read_elements(path: Path, name: str, offset: int, stored: torch.dtype, out: torch.Tensor) -> None:
    """Fill `out` (contiguous) with the `out.numel()` numbers of type `stored` that begin at byte `offset` of the file.

    Raises:
        ModelFileError: the file is too short, or a finite number does not fit `out`'s dtype.
    """
    flat = out.view(-1)
    with open_binary(path) as stream:
        stream.seek(offset)
        if out.dtype == stored and out.is_cpu:
            read_bytes(stream, path, name, flat)
            return
        piece = torch.empty(min(PIECE_ELEMENTS, flat.numel()), dtype=stored)
        for start in range(0, flat.numel(), PIECE_ELEMENTS):
            part = piece[: min(PIECE_ELEMENTS, flat.numel() - start)]
            read_bytes(stream, path, name, part)
            convert_into(part, flat[start : start + part.numel()], path, name)


def convert_into(piece: torch.Tensor, out: torch.Tensor, path: Path, name: str) -> None:
    """Copy `piece` into `out`, which has the same shape, converting to its dtype.

    Raises:
        ModelFileError: a finite number is beyond the range of `out`'s dtype and would silently become infinite.
    """
    out.copy_(piece)
    if (
        piece.numel() == 0
        or not piece.is_floating_point()
        or torch.finfo(out.dtype).max >= torch.finfo(piece.dtype).max
    ):
        return
    infinite = torch.isinf(out)
    if bool(infinite.any()) and bool((infinite & torch.isfinite(piece).to(out.device)).any()):
        worst = piece[torch.isfinite(piece)].abs().max().item()
        raise ModelFileError(
            str(path), name, f"a number of size {worst:g} is beyond the range of {out.dtype}; use a wider dtype"
        )
