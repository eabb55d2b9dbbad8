"""Attention over one contiguous sequence, written for clarity: the golden reference for paged attention.

Decides how keys and values of a single sequence are kept; does not know blocks, slots or batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.contract.model import StateSpec
from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.state_runs import FROM_ZERO, StateRuns

__all__ = ["DenseAttention"]


class DenseAttention:
    """An `Attend` for a single sequence, owned by the code that decodes that sequence.

    Keeps the keys and values it was given, and recurrent state, so that calling a model again with the next tokens
    continues the sequence. The rows of a call are consecutive positions, which follow the positions of earlier calls.
    """

    def __init__(self) -> None:
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._states: dict[int, Tensor] = {}

    def __call__(
        self,
        cache: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Append and attend; see `Attend`. Computed in float32 and rounded once at the end."""
        if k is not None and v is not None:
            self._keys[cache], self._values[cache] = _append(self._keys, cache, k), _append(self._values, cache, v)
        keys, values = self._keys[cache], self._values[cache]  # [L, Hkv, D]
        tokens, heads, head_dim = q.shape
        grouped = q.float().reshape(tokens, keys.shape[1], -1, head_dim)  # [T, Hkv, G, D], G queries per key head
        scores = torch.einsum("thgd,lhd->hgtl", grouped, keys.float()) * spec.scale  # [Hkv, G, T, L]
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        scores = scores.masked_fill(_unseen(tokens, len(keys), spec, q.device), float("-inf"))
        if sinks is not None:  # one extra score per head, with no value
            of_heads = sinks.float().view(keys.shape[1], -1, 1, 1).expand(-1, -1, tokens, -1)  # [Hkv, G, T, 1]
            scores = torch.cat((scores, of_heads), dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(keys)]
        out = torch.einsum("hgtl,lhd->thgd", weights, values.float())  # [T, Hkv, G, Dv]
        return out.reshape(tokens, heads, -1).to(q.dtype).contiguous()

    def carried(self, state: int, spec: StateSpec, tokens: int) -> tuple[Tensor, StateRuns]:
        """See `Attend`."""
        source = 0 if state in self._states else FROM_ZERO
        place = self._states.setdefault(state, torch.zeros(1, *spec.shape))
        return place, StateRuns.of([(tokens, source, 0)])


def _append(memory: dict[int, Tensor], cache: int, new: Tensor) -> Tensor:
    return torch.cat((memory[cache], new)) if cache in memory else new.clone()


def _unseen(tokens: int, length: int, spec: AttentionSpec, device: torch.device) -> Tensor:
    """`[T, L]`: true where the query does not see the key; the last query is at the last key's position."""
    queries = torch.arange(length - tokens, length, device=device)[:, None]
    keys = torch.arange(length, device=device)
    unseen = keys > queries + (length if spec.ahead is None else spec.ahead)
    return unseen if spec.window is None else unseen | (keys <= queries - spec.window)
