"""Activation functions, and the gated form that modern MLPs use.

Decides the formulas; does not know which model uses which. Computed in float32; gated forms round the activated gate
before the product, except the clamped one. Written in terms of `exp`, `tanh` and `erf` because torch's fused `silu` and
`gelu` use another code path for the last few elements of an array. The last bit of those elements may differ, so a row
would depend on its place in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = [
    "ACTIVATIONS",
    "clamped_swiglu_and_mul_reference",
    "gelu_and_mul_reference",
    "gelu_new_and_mul_reference",
    "gelu_new_reference",
    "gelu_reference",
    "relu_reference",
    "silu_and_mul_reference",
]


_SWIGLU_LIMIT, _SWIGLU_SLOPE = 7.0, 1.702


def silu_and_mul_reference(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up`, where `silu(x) = x / (1 + exp(-x))` (SwiGLU: Shazeer 2020, section 2).

    `silu(gate)` is rounded to the dtype of `gate_up` before the product, as in the models' own code.

    Args:
        gate_up: `[T, 2 * F]`: the gate's F columns, then those of the up projection.

    Returns:
        `[T, F]` in the dtype of `gate_up`.
    """
    gate, up = gate_up.chunk(2, dim=-1)  # [T, F] each
    wide = gate.float()
    return (wide / (-wide).exp_().add_(1)).to(gate_up.dtype) * up


def gelu_new_reference(x: Tensor) -> Tensor:
    """Tanh-approximated GELU: `x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))` (Hendrycks and Gimpel 2016)."""
    wide = x.float()
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * (wide * wide * wide))
    return (0.5 * wide * (1 + inner.tanh())).to(x.dtype)


def gelu_new_and_mul_reference(gate_up: Tensor) -> Tensor:
    """`gelu_new(gate) * up` (GeGLU: Shazeer 2020, section 2): `[T, 2 * F]` to `[T, F]`; rounded like SwiGLU."""
    gate, up = gate_up.chunk(2, dim=-1)  # [T, F] each
    return gelu_new_reference(gate) * up


def clamped_swiglu_and_mul_reference(gate_up: Tensor) -> Tensor:
    """`g * sigmoid(1.702 g) * (u + 1)`, `g` being the gate clamped to at most 7, and `u` up clamped to `[-7, 7]`.

    Used by the experts of gpt-oss (`GptOssExperts` of transformers). `[T, 2 * F]` to `[T, F]`; computed in float32 and
    rounded once.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)  # [T, F] each
    gate, up = gate.clamp(max=_SWIGLU_LIMIT), up.clamp(-_SWIGLU_LIMIT, _SWIGLU_LIMIT)
    return (gate / ((-_SWIGLU_SLOPE * gate).exp_().add_(1)) * (up + 1)).to(gate_up.dtype)


def gelu_reference(x: Tensor) -> Tensor:
    """Exact GELU: `x/2 * (1 + erf(x / sqrt(2)))` (Hendrycks and Gimpel 2016)."""
    wide = x.float()
    return (0.5 * wide * (1 + (wide * math.sqrt(0.5)).erf())).to(x.dtype)


def gelu_and_mul_reference(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up` (GeGLU: Shazeer 2020, section 2): `[T, 2 * F]` to `[T, F]`; rounded like SwiGLU."""
    gate, up = gate_up.chunk(2, dim=-1)  # [T, F] each
    return gelu_reference(gate) * up


def relu_reference(x: Tensor) -> Tensor:
    """`max(x, 0)`."""
    return torch.nn.functional.relu(x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu_and_mul": silu_and_mul_reference,
    "gelu_new_and_mul": gelu_new_and_mul_reference,
    "gelu_and_mul": gelu_and_mul_reference,
    "clamped_swiglu_and_mul": clamped_swiglu_and_mul_reference,
    "gelu_new": gelu_new_reference,
    "gelu": gelu_reference,
    "relu": relu_reference,
}
"""Keyed by name."""
