"""The row-wise operations in compiled code: norms, activations, rotation; behind the signatures of their references.

Decides how tensors are handed over as addresses; the arithmetic is in `native/norm.h`, `activation.h` and `rope.h`.
Takes float32 and bfloat16 on the CPU. A row's bits depend on that row alone. Differs from the references in bfloat16 by
rounding points only: everything is float32 until the result is rounded, once.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from penstock.kernels import native

__all__ = [
    "add_rms_norm",
    "element",
    "gelu",
    "gelu_new",
    "gelu_new_and_mul",
    "layer_norm",
    "relu",
    "required",
    "rms_norm",
    "rotate",
    "rotated_width",
    "rows",
    "silu_and_mul",
]

_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1}


def required() -> ModuleType:
    """The compiled kernels.

    Raises:
        RuntimeError: this installation has none.
    """
    if native.module is None:
        raise RuntimeError("this installation of penstock has no compiled kernels")
    return native.module


def element(name: str, x: Tensor) -> int:
    """The code of the dtype of `x`.

    Raises:
        ValueError: naming the argument: not float32 or bfloat16, or not on the CPU.
    """
    if x.device.type != "cpu" or x.dtype not in _ELEMENTS:
        raise ValueError(f"{name} must be float32 or bfloat16 on the CPU, not {x.dtype} on {x.device}")
    return _ELEMENTS[x.dtype]


def rows(name: str, x: Tensor) -> tuple[int, int, int]:
    """Address, stride and dtype code of `x`, whose first dimension may be strided but the others may not.

    Raises:
        ValueError: naming the argument.
    """
    code = element(name, x)
    if len(x) and not x[0].is_contiguous():
        raise ValueError(f"each row of {name} must be contiguous")
    return x.data_ptr(), x.stride(0), code


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`penstock.kernels.norm.rms_norm`: `[..., H]` to `[..., H]`."""
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty(flat.shape, dtype=x.dtype)
    _norm("rms_norm", flat, None, weight, None, eps, out)
    return out.view(x.shape)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`penstock.kernels.norm.layer_norm`: `[..., H]` to `[..., H]`."""
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty(flat.shape, dtype=x.dtype)
    _norm("layer_norm", flat, None, weight, bias, eps, out)
    return out.view(x.shape)


def add_rms_norm(stream: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Add `residual` to `stream` in place, then normalise the sum.

    Args:
        stream: `[T, H]`; float32 keeps the sums of all layers exact to its own rounding.
        residual: `[T, H]`.
        weight: `[H]`.
        eps: keeps rows of zeros finite.
        dtype: of the result.

    Returns:
        `[T, H]`.
    """
    if residual.shape != stream.shape:
        raise ValueError(f"residual must be {tuple(stream.shape)} like stream, not {tuple(residual.shape)}")
    out = torch.empty(stream.shape, dtype=dtype)
    _norm("rms_norm", stream, residual, weight, None, eps, out)
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`penstock.kernels.activation.silu_and_mul`: `[T, 2 * F]` to `[T, F]`."""
    return _of_gated("silu_and_mul", gate_up)


def gelu_new_and_mul(gate_up: Tensor) -> Tensor:
    """`penstock.kernels.activation.gelu_new_and_mul`: `[T, 2 * F]` to `[T, F]`."""
    return _of_gated("gelu_new_and_mul", gate_up)


def gelu_new(x: Tensor) -> Tensor:
    """`penstock.kernels.activation.gelu_new`."""
    return _of_each("gelu_new", x)


def gelu(x: Tensor) -> Tensor:
    """`penstock.kernels.activation.gelu`."""
    return _of_each("gelu", x)


def relu(x: Tensor) -> Tensor:
    """`penstock.kernels.activation.relu`."""
    return _of_each("relu", x)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`penstock.kernels.rope.rotate`: the first R of each of `[T, heads, D]` by `[T, R/2]` float32."""
    count, heads, dim = x.shape
    rotary_dim = rotated_width(cos, sin, count, dim)
    out = torch.empty(x.shape, dtype=x.dtype)
    absent = (0, 0, 0)
    required().rotate_and_store(
        *(count, heads, 1, dim, *rows("x", x), *rows("out", out), *absent, *absent),
        *(0, 0, 0, False, 0, 0, 0, 0, count, cos.data_ptr(), sin.data_ptr(), 0, 0, 0, 0, 0.0, rotary_dim),
    )
    return out


def rotated_width(cos: Tensor, sin: Tensor, count: int, dim: int) -> int:
    """How many elements of a head of `dim` the tables `[count, R/2]` rotate: R.

    Raises:
        ValueError: the tables are not such, or rotate more than a head.
    """
    plain = all(table.dtype == torch.float32 and table.is_contiguous() for table in (cos, sin))
    if not plain or cos.dim() != 2 or cos.shape != sin.shape or len(cos) != count or not 0 < 2 * cos.shape[1] <= dim:
        raise ValueError(
            f"cos must be [{count}, R/2] float32 and contiguous, R at most {dim}, and sin like it, "
            f"not {tuple(cos.shape)} {cos.dtype} and {tuple(sin.shape)} {sin.dtype}"
        )
    return 2 * cos.shape[1]


def _of_gated(kernel: str, gate_up: Tensor) -> Tensor:
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up must have an even number of columns, not {gate_up.shape[-1]}")
    out = torch.empty((len(gate_up), gate_up.shape[-1] // 2), dtype=gate_up.dtype)
    getattr(required(), kernel)(*out.shape, *rows("gate_up", gate_up), *rows("out", out))
    return out


def _of_each(kernel: str, x: Tensor) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty(flat.shape, dtype=x.dtype)
    getattr(required(), kernel)(*flat.shape, *rows("x", flat), *rows("out", out))
    return out.view(x.shape)


def _norm(
    kernel: str, stream: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor
) -> None:
    width = stream.shape[-1]
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and (vector.shape != (width,) or not vector.is_contiguous()):
            raise ValueError(f"{name} must be [{width}] and contiguous, not {tuple(vector.shape)}")
    added = (0, 0, 0) if residual is None else rows("residual", residual)
    shift = (0, 0) if bias is None else (bias.data_ptr(), element("bias", bias))
    scale = (weight.data_ptr(), element("weight", weight))
    getattr(required(), kernel)(*stream.shape, *rows("stream", stream), *added, *scale, *shift, eps, *rows("out", out))
