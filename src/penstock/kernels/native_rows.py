"""The row-wise operations in compiled code (norms, activations, rotation), behind the signatures of their references.

Decides how tensors are handed over as addresses; the arithmetic is in `native/norm.h`, `activation.h` and `rope.h`.
Takes float32 and bfloat16 on the CPU. A row's bits depend on that row alone. In bfloat16, results differ from the
references only in rounding points: everything is float32 until the result is rounded, once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.native import Cpu, required

__all__ = [
    "ACTIVATIONS",
    "ACTIVATION_CODES",
    "add_rms_norm",
    "clamped_swiglu_and_mul",
    "element",
    "gelu",
    "gelu_and_mul",
    "gelu_new",
    "gelu_new_and_mul",
    "layer_norm",
    "optional_rows",
    "relu",
    "rms_norm",
    "rotate",
    "rotated_width",
    "rotation",
    "rows",
    "silu_and_mul",
    "vector_of",
]

ACTIVATION_CODES = {
    "silu_and_mul": 0,
    "gelu_new": 1,
    "gelu": 2,
    "relu": 3,
    "gelu_new_and_mul": 4,
    "clamped_swiglu_and_mul": 5,
    "gelu_and_mul": 6,
}
"""Codes of the activations of `kernels.activation` in the compiled kernels (`native/linear_call.h`)."""

_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1}


def element(name: str, x: Tensor) -> int:
    """The code of the dtype of `x`.

    Raises:
        ValueError: `x` is not float32 or bfloat16, or not on the CPU; the message has `name`.
    """
    if not x.is_cpu or x.dtype not in _ELEMENTS:
        raise ValueError(f"{name} must be float32 or bfloat16 on the CPU, not {x.dtype} on {x.device}")
    return _ELEMENTS[x.dtype]


def rows(name: str, x: Tensor) -> Any:
    """The compiled `Rows` of `x`: the first dimension may be strided, the others must be contiguous.

    Raises:
        ValueError: the dtype, device or layout does not fit; the message has `name`.
    """
    code = element(name, x)
    if len(x) and not x[0].is_contiguous():
        raise ValueError(f"each row of {name} must be contiguous")
    return required().Rows(x.data_ptr(), x.stride(0), code)


def optional_rows(name: str, x: Tensor | None) -> Any:
    """`rows`, or None for None."""
    return None if x is None else rows(name, x)


def vector_of(name: str, x: Tensor | None, width: int) -> Any:
    """The compiled `Vector` of a contiguous `[width]`; None for None.

    Raises:
        ValueError: the shape, dtype, device or layout does not fit; the message has `name`.
    """
    if x is None:
        return None
    if x.shape != (width,) or not x.is_contiguous():
        raise ValueError(f"{name} must be [{width}] and contiguous, not {tuple(x.shape)}")
    return required().Vector(x.data_ptr(), element(name, x))


def rotation(cos: Tensor, sin: Tensor, rotary_dim: int) -> Any:
    """The compiled `Rotation` of tables that the caller has checked (`rotated_width`)."""
    return required().Rotation(cos=cos.data_ptr(), sin=sin.data_ptr(), num_positions=len(cos), rotary_dim=rotary_dim)


def rms_norm(cpu: Cpu, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.norm.rms_norm_reference`: `[..., H]` to `[..., H]`."""
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty(flat.shape, dtype=x.dtype)
    _norm(cpu.rms_norm, flat, None, weight, None, eps, out)
    return out.view(x.shape)


def layer_norm(cpu: Cpu, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See `kernels.norm.layer_norm_reference`: `[..., H]` to `[..., H]`."""
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty(flat.shape, dtype=x.dtype)
    _norm(cpu.layer_norm, flat, None, weight, bias, eps, out)
    return out.view(x.shape)


def add_rms_norm(cpu: Cpu, stream: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Add `residual` to `stream` in place, then normalise the sum.

    Args:
        cpu: runs the kernel.
        stream: `[T, H]`; in float32, sums over all layers lose no more than float32 rounding.
        residual: `[T, H]`.
        weight: `[H]`.
        eps: keeps rows of zeros finite.
        dtype: dtype of the result.

    Returns:
        `[T, H]`.
    """
    if residual.shape != stream.shape:
        raise ValueError(f"residual must be {tuple(stream.shape)} like stream, not {tuple(residual.shape)}")
    out = torch.empty(stream.shape, dtype=dtype)
    _norm(cpu.rms_norm, stream, residual, weight, None, eps, out)
    return out


def silu_and_mul(cpu: Cpu, gate_up: Tensor) -> Tensor:
    """See `kernels.activation.silu_and_mul_reference`: `[T, 2 * F]` to `[T, F]`."""
    return _of_gated(cpu.silu_and_mul, gate_up)


def gelu_new_and_mul(cpu: Cpu, gate_up: Tensor) -> Tensor:
    """See `kernels.activation.gelu_new_and_mul_reference`: `[T, 2 * F]` to `[T, F]`."""
    return _of_gated(cpu.gelu_new_and_mul, gate_up)


def gelu_and_mul(cpu: Cpu, gate_up: Tensor) -> Tensor:
    """See `kernels.activation.gelu_and_mul_reference`: `[T, 2 * F]` to `[T, F]`."""
    return _of_gated(cpu.gelu_and_mul, gate_up)


def clamped_swiglu_and_mul(cpu: Cpu, gate_up: Tensor) -> Tensor:
    """See `kernels.activation.clamped_swiglu_and_mul_reference`: `[T, 2 * F]` to `[T, F]`."""
    return _of_gated(cpu.clamped_swiglu_and_mul, gate_up)


def gelu_new(cpu: Cpu, x: Tensor) -> Tensor:
    """See `kernels.activation.gelu_new_reference`."""
    return _of_each(cpu.gelu_new, x)


def gelu(cpu: Cpu, x: Tensor) -> Tensor:
    """See `kernels.activation.gelu_reference`."""
    return _of_each(cpu.gelu, x)


def relu(cpu: Cpu, x: Tensor) -> Tensor:
    """See `kernels.activation.relu_reference`."""
    return _of_each(cpu.relu, x)


ACTIVATIONS: dict[str, Callable[[Cpu, Tensor], Tensor]] = {
    each.__name__: each
    for each in (silu_and_mul, gelu_new_and_mul, gelu_and_mul, clamped_swiglu_and_mul, gelu_new, gelu, relu)
}
"""Keyed by the names in `kernels.activation`."""


def rotate(cpu: Cpu, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `kernels.rope.rotate_reference`: rotates the first R elements of heads `[T, heads, D]`."""
    count, heads, dim = x.shape
    rotary_dim = rotated_width(cos, sin, count, dim)
    out = torch.empty(x.shape, dtype=x.dtype)
    cpu.rotate_and_store(
        tokens=count,
        head_dim=dim,
        queries=required().Queries(x=rows("x", x), out=rows("out", out), heads=heads),
        stored=None,
        rotation=rotation(cos, sin, rotary_dim),
        positions=0,
        norms=None,
    )
    return out


def rotated_width(cos: Tensor, sin: Tensor, count: int, dim: int) -> int:
    """R, the number of elements that tables `[count, R/2]` rotate in a head of `dim` elements.

    Raises:
        ValueError: the tables have another shape or dtype, are not contiguous, or rotate more than a head.
    """
    plain = all(table.dtype == torch.float32 and table.is_contiguous() for table in (cos, sin))
    if not plain or cos.dim() != 2 or cos.shape != sin.shape or len(cos) != count or not 0 < 2 * cos.shape[1] <= dim:
        raise ValueError(
            f"cos must be [{count}, R/2] float32 and contiguous, R at most {dim}, and sin like it, "
            f"not {tuple(cos.shape)} {cos.dtype} and {tuple(sin.shape)} {sin.dtype}"
        )
    return 2 * cos.shape[1]


def _of_gated(kernel: Callable[..., None], gate_up: Tensor) -> Tensor:
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up must have an even number of columns, not {gate_up.shape[-1]}")
    out = torch.empty((len(gate_up), gate_up.shape[-1] // 2), dtype=gate_up.dtype)
    kernel(rows=len(out), width=out.shape[1], x=rows("gate_up", gate_up), out=rows("out", out))
    return out


def _of_each(kernel: Callable[..., None], x: Tensor) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty(flat.shape, dtype=x.dtype)
    kernel(rows=len(flat), width=flat.shape[1], x=rows("x", flat), out=rows("out", out))
    return out.view(x.shape)


def _norm(
    kernel: Callable[..., None],
    stream: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    out: Tensor,
) -> None:
    count, width = stream.shape
    kernel(
        rows=count,
        width=width,
        weight=vector_of("weight", weight, width),
        bias=vector_of("bias", bias, width),
        stream=rows("stream", stream),
        residual=optional_rows("residual", residual),
        eps=eps,
        out=rows("out", out),
    )
