"""The feed-forward halves of a transformer layer.

Decides how projections and activation are joined; does not know which family uses which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.activation import silu_and_mul
from penstock.kernels.packed_linear import gates, packed_gated_linear
from penstock.kernels.packed_weight import PackedWeight
from penstock.nn.layers import Linear
from penstock.nn.parameters import Parameters

__all__ = ["GatedMLP", "PlainMLP"]


@dataclass(frozen=True, slots=True, eq=False)
class GatedMLP:
    """SwiGLU: `down(silu(gate(x)) * up(x))`; `gate_up` holds the gate's F rows, then those of `up`."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """`[T, H]` to `[T, H]`, added to `residual`."""
        return self.down(self._gated(x), residual)  # [T, H] -> [T, F] -> [T, H]

    def _gated(self, x: Tensor) -> Tensor:
        weight = self.gate_up.weight
        if isinstance(weight, PackedWeight) and gates(weight):
            return packed_gated_linear(x, weight, self.gate_up.bias)
        return silu_and_mul(self.gate_up(x))  # [T, H] -> [T, 2F] -> [T, F]

    @classmethod
    def bind(cls, parameters: Parameters, name: str, hidden: int, inner: int, *, bias: bool) -> GatedMLP:
        """Take `gate_proj`, `up_proj` and `down_proj` under `name`."""
        parts = {f"{name}.gate_proj": inner, f"{name}.up_proj": inner}
        return cls(
            gate_up=Linear.bind_fused(parameters, parts, hidden, bias=bias),
            down=Linear.bind(parameters, f"{name}.down_proj", hidden, inner, bias=bias),
        )


@dataclass(frozen=True, slots=True, eq=False)
class PlainMLP:
    """`down(activation(up(x)))`."""

    up: Linear
    activation: Callable[[Tensor], Tensor]
    down: Linear

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """`[T, H]` to `[T, H]`, added to `residual`."""
        return self.down(self.activation(self.up(x)), residual)  # [T, H] -> [T, F] -> [T, H]
