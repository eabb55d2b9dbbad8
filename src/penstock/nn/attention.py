"""The attention half of a transformer layer: projections around `attend`, with and without rotary positions.

Decides how queries, keys and values are projected, normed and rotated. Does not know where keys and values are kept,
nor which rows belong together: that is `attend`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.rope import rotate
from penstock.nn.causal_lm import Attend
from penstock.nn.layers import Linear, RMSNorm

__all__ = ["Heads", "PlainAttention", "RotaryAttention"]


@dataclass(frozen=True, slots=True)
class Heads:
    """How a fused projection is cut: `queries` heads, `keys` key heads, as many value heads, each `dim` wide."""

    queries: int
    keys: int
    dim: int

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[T, (Hq + 2 Hkv) * D]` to views `[T, Hq, D]`, `[T, Hkv, D]`, `[T, Hkv, D]`."""
        q, k, v = qkv.view(len(qkv), -1, self.dim).split((self.queries, self.keys, self.keys), dim=1)
        return q, k, v


@dataclass(frozen=True, slots=True, eq=False)
class PlainAttention:
    """Attention without positions of its own (GPT-2 adds them to the embeddings)."""

    heads: Heads
    qkv: Linear
    output: Linear

    def __call__(self, x: Tensor, residual: Tensor, layer: int, attend: Attend) -> Tensor:
        """`[T, H]` to `[T, H]`, added to `residual`."""
        q, k, v = self.heads.split(self.qkv(x))
        return self.output(attend(layer, q, k, v).flatten(1), residual)  # [T, Hq, D] -> [T, Hq * D] -> [T, H]


@dataclass(frozen=True, slots=True, eq=False)
class RotaryAttention:
    """Attention whose queries and keys are rotated by position, and in some families normed per head before that."""

    heads: Heads
    qkv: Linear
    output: Linear
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None

    def __call__(
        self, x: Tensor, residual: Tensor, layer: int, rotation: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """`[T, H]` to `[T, H]`, added to `residual`; `rotation`: cosines and sines of the rows, `[T, D/2]` each."""
        q, k, v = self.heads.split(self.qkv(x))
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        cos, sin = rotation
        out = attend(layer, rotate(q, cos, sin), rotate(k, cos, sin), v)  # [T, Hq, D]
        return self.output(out.flatten(1), residual)  # [T, Hq * D] -> [T, H]
