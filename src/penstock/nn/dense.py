"""Attention over one contiguous sequence, written to be read: the golden that paged attention is compared with.

Decides how keys and values of a single sequence are kept; does not know blocks, slots or batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.attention_spec import AttentionSpec

__all__ = ["DenseAttention"]


class DenseAttention:
    """An `Attend` for one sequence; owned by whoever decodes that sequence, and good for no other.

    Keeps the keys and values it was given, so that calling a model again with the next tokens continues the sequence.
    Rows of a call are consecutive positions, following those of the calls before.
    """

    def __init__(self) -> None:
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: AttentionSpec | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Append and attend; see `Attend`. Computed in float32 and rounded once at the end.

        Args:
            layer: index of the layer.
            q: `[T, Hq, D]`.
            k: `[T, Hkv, D]`.
            v: `[T, Hkv, D]`.
            spec: what becomes of scores; None: they are scaled by `1 / sqrt(D)`.
            sinks: `[Hq]`, or None; see `kernels.paged_attention`.
        """
        spec = spec or AttentionSpec(q.shape[-1] ** -0.5)
        keys = _append(self._keys, layer, k)  # [L, Hkv, D]
        values = _append(self._values, layer, v)  # [L, Hkv, D]
        tokens, heads, head_dim = q.shape
        grouped = q.float().reshape(tokens, keys.shape[1], -1, head_dim)  # [T, Hkv, G, D], G queries a key head
        scores = torch.einsum("thgd,lhd->hgtl", grouped, keys.float()) * spec.scale  # [Hkv, G, T, L]
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        scores = scores.masked_fill(_unseen(tokens, len(keys), spec.window, q.device), float("-inf"))
        if sinks is not None:  # one score more for each head, with no value
            of_heads = sinks.float().view(keys.shape[1], -1, 1, 1).expand(-1, -1, tokens, -1)  # [Hkv, G, T, 1]
            scores = torch.cat((scores, of_heads), dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(keys)]
        out = torch.einsum("hgtl,lhd->thgd", weights, values.float())  # [T, Hkv, G, D]
        return out.reshape(tokens, heads, head_dim).to(q.dtype).contiguous()


def _append(memory: dict[int, Tensor], layer: int, new: Tensor) -> Tensor:
    memory[layer] = torch.cat((memory[layer], new)) if layer in memory else new.clone()
    return memory[layer]


def _unseen(tokens: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """`[T, L]`: true where a key lies after the query or before its window; the last query is the last key's own."""
    queries = torch.arange(length - tokens, length, device=device)[:, None]
    keys = torch.arange(length, device=device)
    future = keys > queries
    return future if window is None else future | (keys <= queries - window)
