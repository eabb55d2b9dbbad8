"""Row-by-row CUDA kernels in Triton: norms, activations, rotation, and writing to the KV cache, one launch each.

The torch references need four to eight launches for each, and on a GPU a decode step is mostly launches. Results are
rounded at the same points as in the references in `norm`, `activation` and `rope`.

Invariant: a row's bits depend on that row alone. Reductions have a fixed shape for each width, a product and a sum are
not contracted into one fused operation (`EXACT`), and kernels may make the same assumptions about every row's address.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.row_pieces import empty_with_room

__all__ = ["ACTIVATIONS", "EXACT", "activate", "rms_norm", "rotate", "tanh", "write_kv"]

EXACT = {"enable_fp_fusion": False}
"""Options that every kernel is compiled with."""

ACTIVATIONS = frozenset(
    {
        "silu_and_mul",
        "gelu_new_and_mul",
        "gelu_and_mul",
        "clamped_swiglu_and_mul",
        "gelu_new",
        "gelu",
    }
)
"""The members of `activation.ACTIVATIONS` that `activate` supports."""

_ALIGNMENT = 16  # bytes; Triton compiles another kernel for pointers that lack it
_COLUMNS = 1024  # per program of `_activate`


@triton.jit
def _rms_norm(x, weight, out, eps, row_stride, head_stride, width, SIZE: tl.constexpr, ROUNDS: tl.constexpr):
    row, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    at = tl.arange(0, SIZE)
    inside = at < width
    wide = tl.load(x + row * row_stride + head * head_stride + at, mask=inside, other=0.0).to(tl.float32)
    unit = wide / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    factors = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if ROUNDS:
        unit = unit.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + (row * heads + head) * width + at, (unit * factors).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `norm.rms_norm_reference`, for `x` `[T, H]` or `[T, heads, H]`, whose rows may be strided."""
    x = _aligned(x)
    heads, width = (x.shape[1] if x.dim() == 3 else 1), x.shape[-1]
    out = empty_with_room(x, tuple(x.shape))
    size = triton.next_power_of_2(width)
    if len(x):
        _rms_norm[len(x), heads](
            x,
            weight,
            out,
            eps,
            x.stride(0),
            x.stride(1) if x.dim() == 3 else width,
            width,
            SIZE=size,
            ROUNDS=weight.dtype == x.dtype,
            num_warps=min(max(size // 256, 1), 8),
            **EXACT,
        )
    return out


@triton.jit
def tanh(x):
    """Compute tanh without an exponential that overflows."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -size, size)


@triton.jit
def _activated(x, KIND: tl.constexpr):
    if KIND == "silu":
        result = x / (tl.exp(-x) + 1.0)
    elif KIND == "gelu_new":
        result = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * (x * x * x))))
    else:
        tl.static_assert(KIND == "gelu")
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return result


@triton.jit
def _activate(x, out, row_stride, width, KIND: tl.constexpr, GATED: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = at < width
    kind = out.dtype.element_ty
    gate = tl.load(x + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x + row * row_stride + width + at, mask=inside, other=0.0).to(tl.float32)
        if KIND == "clamped_swiglu":
            gate = tl.minimum(gate, 7.0)
            up = tl.minimum(tl.maximum(up, -7.0), 7.0)
            result = gate / (tl.exp(-1.702 * gate) + 1.0) * (up + 1.0)
        else:
            result = _activated(gate, KIND).to(kind).to(tl.float32) * up
    else:
        result = _activated(gate, KIND)
    tl.store(out + row * width + at, result.to(kind), mask=inside)


def activate(x: Tensor, activation: str) -> Tensor:
    """Apply one of `ACTIVATIONS` to `x` `[T, F]`, or `[T, 2 * F]` if it is gated; returns `[T, F]`."""
    gated = activation.endswith("_and_mul")
    width = x.shape[1] // 2 if gated else x.shape[1]
    out = empty_with_room(x, (len(x), width))
    if x.stride(1) != 1:
        x = x.contiguous()
    if len(x):
        grid = len(x), triton.cdiv(width, _COLUMNS)
        kind = activation.removesuffix("_and_mul")
        _activate[grid](x, out, x.stride(0), width, KIND=kind, GATED=gated, SIZE=_COLUMNS, **EXACT)
    return out


@triton.jit
def _rotate(x, cos, sin, row_stride, heads, width, half, HEADS: tl.constexpr, HALF: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (at < half)
    place = x + row * row_stride + head * width + at
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + row * half + at, mask=at < half, other=0.0)
    s = tl.load(sin + row * half + at, mask=at < half, other=0.0)
    tl.store(place, (first * c - second * s).to(x.dtype.element_ty), mask=inside)
    tl.store(place + half, (second * c + first * s).to(x.dtype.element_ty), mask=inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `rope.rotate_reference`; in place, so heads must lie side by side. Returns `x`.

    Raises:
        ValueError: the heads do not lie side by side.
    """
    rows, heads, width = x.shape
    half = cos.shape[1]
    if (heads > 1 and x.stride(1) != width) or x.stride(2) != 1:
        raise ValueError(f"heads of {width} that are rotated in place have strides {x.stride()}")
    if rows:
        together = min(triton.next_power_of_2(heads), 8)
        _rotate[rows, triton.cdiv(heads, together)](
            x,
            cos.contiguous(),
            sin.contiguous(),
            x.stride(0),
            heads,
            width,
            half,
            HEADS=together,
            HALF=triton.next_power_of_2(half),
            **EXACT,
        )
    return x


@triton.jit
def _write_kv(k, v, k_cache, v_cache, slots, k_stride, v_stride, k_width, v_width, K: tl.constexpr, V: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot >= 0:
        at = tl.arange(0, K)
        kept = tl.load(k + row * k_stride + at, mask=at < k_width, other=0.0)
        tl.store(k_cache + slot * k_width + at, kept.to(k_cache.dtype.element_ty), mask=at < k_width)
        at = tl.arange(0, V)
        kept = tl.load(v + row * v_stride + at, mask=at < v_width, other=0.0)
        tl.store(v_cache + slot * v_width + at, kept.to(v_cache.dtype.element_ty), mask=at < v_width)


def write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, write_slots: Tensor) -> None:
    """See `paged_attention.write_kv_reference`; skips tokens with a negative slot. Caches must be contiguous."""
    k, v = (each.flatten(1) for each in (k, v))  # [T, Hkv * D], views of rows whose heads lie side by side
    if len(k):
        sizes = triton.next_power_of_2(k.shape[1]), triton.next_power_of_2(v.shape[1])
        _write_kv[(len(k),)](
            k,
            v,
            k_cache,
            v_cache,
            write_slots,
            k.stride(0),
            v.stride(0),
            k.shape[1],
            v.shape[1],
            K=sizes[0],
            V=sizes[1],
            **EXACT,
        )


def _aligned(x: Tensor) -> Tensor:
    """`x`, or a copy if it is misaligned: whichever rows of a larger tensor `x` has, the kernel is the same."""
    if x.stride(-1) != 1 or (x.data_ptr() % _ALIGNMENT and not x.is_meta):
        return x.clone(memory_format=torch.contiguous_format)
    return x
