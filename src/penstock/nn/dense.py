"""Attention over one contiguous sequence, written to be read: the golden that paged attention is compared with.

Decides how keys and values of a single sequence are kept; does not know blocks, slots or batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["DenseAttention"]


class DenseAttention:
    """An `Attend` for one sequence; owned by whoever decodes that sequence, and good for no other.

    Keeps the keys and values it was given, so that calling a model again with the next tokens continues the sequence.
    Rows of a call are consecutive positions, following those of the calls before.
    """

    def __init__(self) -> None:
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append and attend; see `Attend`. Computed in float32 and rounded once at the end."""
        keys = _append(self._keys, layer, k)  # [L, Hkv, D]
        values = _append(self._values, layer, v)  # [L, Hkv, D]
        tokens, heads, head_dim = q.shape
        grouped = q.float().reshape(tokens, keys.shape[1], -1, head_dim)  # [T, Hkv, G, D], G queries a key head
        scores = torch.einsum("thgd,lhd->hgtl", grouped, keys.float()) * head_dim**-0.5  # [Hkv, G, T, L]
        scores = scores.masked_fill(_future(tokens, len(keys), q.device), float("-inf"))
        out = torch.einsum("hgtl,lhd->thgd", scores.softmax(dim=-1), values.float())  # [T, Hkv, G, D]
        return out.reshape(tokens, heads, head_dim).to(q.dtype).contiguous()


def _append(memory: dict[int, Tensor], layer: int, new: Tensor) -> Tensor:
    memory[layer] = torch.cat((memory[layer], new)) if layer in memory else new.clone()
    return memory[layer]


def _future(tokens: int, length: int, device: torch.device) -> Tensor:
    """`[T, L]`: true where a key lies after the query; the last query is the last key's own position."""
    queries = torch.arange(length - tokens, length, device=device)
    return torch.arange(length, device=device) > queries[:, None]
