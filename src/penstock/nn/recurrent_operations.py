"""Operations of hybrid models that carry state from token to token; part of the closed set of `nn.operations`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.recurrence import RecurrenceRule
from penstock.nn.register import Register

__all__ = ["GatedNorm", "Recurrence", "ShortConvolution"]


@dataclass(frozen=True, slots=True, eq=False)
class ShortConvolution:
    """`out = gate_out * f(conv(gate_in * x))`, causal, one filter per channel; see `kernels.short_convolution`.

    Attributes:
        weight: `[L, C]` float32.
        bias: `[C]` float32, or None.
        state: index into `Program.states`; that state has shape `(L - 1, C)`.
        silu: whether f is SiLU; else it is the identity.
        gate_in: as wide as `x`, or None.
        gate_out: as wide as `x`, or None.
    """

    out: Register
    x: Register
    weight: Tensor
    bias: Tensor | None
    state: int
    silu: bool = False
    gate_in: Register | None = None
    gate_out: Register | None = None

    def __str__(self) -> str:
        x = str(self.x) if self.gate_in is None else f"{self.gate_in} * {self.x}"
        bias, silu = "" if self.bias is None else ", bias", ", silu" if self.silu else ""
        text = f"short_convolution({x}, w{list(self.weight.shape)}{bias}{silu}, state {self.state})"
        return self.out.line(text if self.gate_out is None else f"{self.gate_out} * {text}")


@dataclass(frozen=True, slots=True, eq=False)
class Recurrence:
    """A recurrence over tokens with one state per head; see `kernels.recurrence`.

    Attributes:
        out: `[T, value_heads * value_dim]`.
        q: `[T, key_heads * key_dim]`.
        k: `[T, key_heads * key_dim]`.
        v: `[T, value_heads * value_dim]`.
        a: `[T, value_heads]`.
        b: `[T, value_heads]` for the delta rule, None for a scan.
        state: index into `Program.states`; that state has shape `rule.state_shape`.
    """

    out: Register
    q: Register
    k: Register
    v: Register
    a: Register
    b: Register | None
    state: int
    rule: RecurrenceRule

    def __str__(self) -> str:
        operands = ", ".join(str(each) for each in (self.q, self.k, self.v, self.a, self.b) if each is not None)
        return self.out.line(f"recurrence({operands}, {self.rule}, state {self.state})")


@dataclass(frozen=True, slots=True, eq=False)
class GatedNorm:
    """`out = norm(x) * silu(gate)`, or `norm(x * silu(gate))` if `gate_first`.

    See `kernels.recurrence.gated_norm_reference`.

    Attributes:
        weight: `[group]` or as wide as `x`, float32.
        group: number of columns normed together.
    """

    out: Register
    x: Register
    gate: Register
    weight: Tensor
    eps: float
    group: int
    gate_first: bool

    def __str__(self) -> str:
        inside = f"{self.x} * silu({self.gate})" if self.gate_first else str(self.x)
        norm = f"rms_norm_groups({inside}, w[{len(self.weight)}], {self.group} each, eps {self.eps:g})"
        return self.out.line(norm if self.gate_first else f"{norm} * silu({self.gate})")
