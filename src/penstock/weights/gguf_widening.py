"""Blocks in a wider kind that says the same: for parts of one weight that a file has in kinds of different widths.

Decides which kinds hold which others. Nothing is rounded: a code of fewer bits is a code of more, with the scales and
minima of its block as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from penstock.weights.gguf_blocks import block_bytes
from penstock.weights.source import StoredBlocks

__all__ = ["common_kind", "widened"]


def _q4_k_as_q5_k(blocks: Tensor) -> Tensor:
    """`[d, dmin, 12 bytes of scales | 128 of codes]`: the fifth bits, all 0, go between."""
    return torch.cat((blocks[:, :16], blocks.new_zeros(len(blocks), 32), blocks[:, 16:]), dim=1)


def _q4_1_as_q5_1(blocks: Tensor) -> Tensor:
    """`[d, m | 16 bytes of codes]`."""
    return torch.cat((blocks[:, :4], blocks.new_zeros(len(blocks), 4), blocks[:, 4:]), dim=1)


def _as_q8_0(blocks: Tensor, codes: Tensor) -> Tensor:
    """Scale and signed codes `[B, 32]`."""
    return torch.cat((blocks[:, :2], codes.to(torch.int8).view(torch.uint8)), dim=1)


def _nibbles(packed: Tensor) -> Tensor:
    """`[B, 16]` bytes to `[B, 32]` codes, those in the low halves first."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _q4_0_as_q8_0(blocks: Tensor) -> Tensor:
    return _as_q8_0(blocks, _nibbles(blocks[:, 2:]).int() - 8)


def _q5_0_as_q8_0(blocks: Tensor) -> Tensor:
    fifth = (blocks[:, 2:6, None] >> torch.arange(8, dtype=torch.uint8)) & 1  # [B, 4, 8]
    return _as_q8_0(blocks, (_nibbles(blocks[:, 6:]) | fifth.flatten(1) << 4).int() - 16)


_WIDENED: Mapping[tuple[str, str], Callable[[Tensor], Tensor]] = {
    ("Q4_0", "Q8_0"): _q4_0_as_q8_0,
    ("Q5_0", "Q8_0"): _q5_0_as_q8_0,
    ("Q4_1", "Q5_1"): _q4_1_as_q5_1,
    ("Q4_K", "Q5_K"): _q4_k_as_q5_k,
}
"""By kind, and what it becomes: uint8 `[B, bytes of a block]` each."""


def common_kind(kinds: Iterable[str]) -> str:
    """The narrowest kind that holds blocks of all these without loss; "" for none."""
    found = set(kinds)
    if len(found) == 1:
        return found.pop()
    fitting = [wider for wider in ("Q5_1", "Q5_K", "Q8_0") if all(k == wider or (k, wider) in _WIDENED for k in found)]
    return fitting[0] if fitting else ""


def widened(blocks: StoredBlocks, kind: str) -> StoredBlocks:
    """The same numbers in blocks of `kind`, which is what `common_kind` says of theirs and others'."""
    if blocks.kind == kind or blocks.data.is_meta:
        return StoredBlocks(kind, blocks.data)
    rows = len(blocks.data)
    made = _WIDENED[blocks.kind, kind](blocks.data.reshape(-1, block_bytes(blocks.kind)))
    return StoredBlocks(kind, made.view(rows, -1))
