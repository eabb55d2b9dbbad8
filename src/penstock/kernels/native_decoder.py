"""The whole forward of a decoder as one compiled call.

Decides how weights and a step are handed over as addresses; the order of kernels is in `native/decoder.cpp`. Does not
know how a model is bound or what a step is made of. Differs from the same kernels called one by one in one point: the
stream of hidden states is float32 from the embedding to the last norm.

Invariant: a token's bits depend on its own sequence alone, as with each of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_not

import torch
from torch import Tensor

from penstock.kernels.activation import gelu, gelu_new, relu, silu_and_mul
from penstock.kernels.native_attention import cache_address, vector
from penstock.kernels.native_rows import element, required
from penstock.kernels.norm import layer_norm, rms_norm
from penstock.kernels.packed_weight import ELEMENTS, PackedWeight
from penstock.kernels.scratch import Scratch

__all__ = ["NativeDecoder", "NativeLayer", "Norm", "Projection"]

# What the compiled decoder calls the kernels that it may use in a place.
_NORMS: dict[Callable[..., Tensor], int] = {rms_norm: 0, layer_norm: 1}
_ACTIVATIONS: dict[Callable[..., Tensor], int] = {silu_and_mul: 0, gelu_new: 1, gelu: 2, relu: 3}

_Caches = tuple[list[int], list[int], int, bool, int, int]
"""Addresses of each layer's keys and values, and what is common: dtype code, layout, number and size of blocks."""

_Step = tuple[int, int, int, int, int, int]
"""Addresses of positions, write slots, row starts, context lengths and block table, and the width of the last."""

Projection = tuple[PackedWeight, Tensor | None]
"""A weight, and a bias `[N]` or None."""

Norm = tuple[Tensor, Tensor | None]
"""The weight of a norm, and its bias or None; of RMS norms always None."""


@dataclass(frozen=True, slots=True, eq=False)
class NativeLayer:
    """The tensors of one layer; vectors are bfloat16 or float32.

    Attributes:
        attention_norm: `[H]`.
        qkv: queries, keys and values of all heads, from H inputs.
        q_norm: `[D]`, an RMS norm of each query head; or None.
        k_norm: the same of key heads.
        output: `[H, Hq * D]`.
        mlp_norm: `[H]`.
        gate_up: `[2 * F, H]`, gates first; `[F, H]` where no gates weigh the rest.
        down: `[H, F]`.
    """

    attention_norm: Norm
    qkv: Projection
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Projection
    mlp_norm: Norm
    gate_up: Projection
    down: Projection


class NativeDecoder:
    """Layers and last norm of one model.

    Immutable but for its working memory, of which each thread has its own, and for what it has seen last: caches, and a
    step's tensors, which must not be resized in place.
    """

    def __init__(
        self,
        *,
        hidden: int,
        inner: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        normalise: Callable[..., Tensor],
        activation: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
        layers: Sequence[NativeLayer],
        norm: Norm,
        rotation: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Check and note where everything lies.

        Args:
            hidden: H.
            inner: F, the width of the MLP's inside.
            q_heads: Hq.
            kv_heads: Hkv.
            head_dim: D.
            eps: of every norm.
            normalise: `rms_norm` or `layer_norm` of `kernels.norm`: the kind of all norms but those of heads.
            activation: a function of `kernels.activation`; with `silu_and_mul`, and with no other, there are gates.
            dtype: of queries, keys and values before they are rotated and stored: bfloat16 or float32.
            layers: the tensors of each layer.
            norm: `[H]`, the last one.
            rotation: cosines and sines `[P, D/2]` float32, of all positions; or None: nothing is rotated.

        Raises:
            RuntimeError: this installation has no compiled kernels.
            ValueError: a shape, dtype or kernel does not fit.
        """
        self._hidden, self._kv_heads, self._head_dim = hidden, kv_heads, head_dim
        self._held = (tuple(layers), norm, rotation)  # the plan has their addresses only
        self._scratch = Scratch()
        self._seen: tuple[Sequence[Tensor], Sequence[Tensor], _Caches] | None = None
        self._seen_step: tuple[tuple[Tensor, ...], _Step] | None = None
        self._plan = required().Decoder(
            *(hidden, inner, q_heads, kv_heads, head_dim, eps),
            *(_code("normalise", normalise, _NORMS), _code("activation", activation, _ACTIVATIONS), _element(dtype)),
            *(_norm("norm", norm, hidden), *_tables(rotation, head_dim)),
        )
        for layer in layers:
            self._plan.add_layer(
                _norm("attention_norm", layer.attention_norm, hidden),
                _projection("qkv", layer.qkv),
                _vector("q_norm", layer.q_norm, head_dim),
                _vector("k_norm", layer.k_norm, head_dim),
                _projection("output", layer.output),
                _norm("mlp_norm", layer.mlp_norm, hidden),
                _projection("gate_up", layer.gate_up),
                _projection("down", layer.down),
            )

    def run(
        self,
        stream: Tensor,
        positions: Tensor,
        write_slots: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        q_start: Tensor,
        kv_len: Tensor,
        block_table: Tensor,
        scale: float,
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        """Compute every layer: keys and values are stored, each row attends to its own sequence.

        Args:
            stream: `[T, H]` float32, contiguous: the embeddings. Used up.
            positions: `[T]` int64, for rotation.
            write_slots: `[T]` int64, all different.
            keys: of each layer, natural, packed or int8, as for `native_attention.write_kv`; all layers alike.
            values: of each layer, beside `keys`.
            q_start: `[R + 1]` int32; row `r` has the tokens `q_start[r]` to `q_start[r + 1]`.
            kv_len: `[R]` int32.
            block_table: `[R, M]` int32.
            scale: of scores.
            out_dtype: bfloat16 or float32.

        Returns:
            `[T, H]` in `out_dtype`, after the last norm.

        Raises:
            ValueError: shapes, dtypes, positions, slots or rows do not fit; nothing was written then.
        """
        count, rows = len(positions), len(kv_len)
        if stream.shape != (count, self._hidden) or not stream.is_contiguous():
            raise ValueError(f"stream must be [{count}, {self._hidden}] and contiguous, not {tuple(stream.shape)}")
        step = self._step(positions, write_slots, q_start, kv_len, block_table)
        start = vector("stream", stream.view(-1), torch.float32, stream.numel())
        out = torch.empty(stream.shape, dtype=out_dtype)
        size = self._plan.scratch_bytes(count, rows, max(kv_len.tolist(), default=0))  # a step's tensors are small
        self._plan.run(
            *(count, start, out.data_ptr(), element("out", out), *step[:2], *self._caches(keys, values)),
            *(rows, *step[2:], scale, self._scratch.address_of(size), size),
        )
        return out

    def _step(self, *tensors: Tensor) -> _Step:
        """Where a step's tensors are; looked at anew only when they are others than in the last step."""
        seen = self._seen_step
        if seen is None or any(map(is_not, seen[0], tensors)):
            self._seen_step = seen = tensors, self._look_at_step(*tensors)
        return seen[1]

    def _look_at_step(
        self, positions: Tensor, write_slots: Tensor, q_start: Tensor, kv_len: Tensor, block_table: Tensor
    ) -> _Step:
        count, rows = len(positions), len(kv_len)
        if block_table.dim() != 2 or len(block_table) != rows or not block_table.is_contiguous():
            raise ValueError(f"block_table must be [{rows}, M] and contiguous, not {tuple(block_table.shape)}")
        return (
            vector("positions", positions, torch.int64, count),
            vector("write_slots", write_slots, torch.int64, count),
            vector("q_start", q_start, torch.int32, rows + 1),
            vector("kv_len", kv_len, torch.int32, rows),
            vector("block_table", block_table.view(-1), torch.int32, block_table.numel()),
            block_table.shape[1],
        )

    def _caches(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> _Caches:
        """Where the caches are; looked at anew only when they are others than in the last step."""
        seen = self._seen
        if seen is not None and seen[0] is keys and seen[1] is values:
            return seen[2]
        caches = self._look_at(keys, values)
        self._seen = keys, values, caches
        return caches

    def _look_at(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> _Caches:
        if not len(keys) == len(values) == len(self._held[0]):
            raise ValueError(f"keys and values must be of {len(self._held[0])} layers, not {len(keys)}, {len(values)}")
        each = [cache_address(k, v, self._kv_heads, self._head_dim) for k, v in zip(keys, values, strict=True)]
        if any(cache[2:] != each[0][2:] for cache in each):
            raise ValueError("the caches of all layers must be alike")
        return [cache[0] for cache in each], [cache[1] for cache in each], *each[0][2:]


def _code(name: str, kernel: Callable[..., Tensor], codes: dict[Callable[..., Tensor], int]) -> int:
    if kernel not in codes:
        raise ValueError(f"{name} must be one of {', '.join(each.__name__ for each in codes)}, not {kernel!r}")
    return codes[kernel]


def _element(dtype: torch.dtype) -> int:
    if dtype not in ELEMENTS:
        raise ValueError(f"dtype must be float32 or bfloat16, not {dtype}")
    return ELEMENTS[dtype]


def _norm(name: str, norm: Norm, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    weight, bias = norm
    return _vector(name, weight, width), _vector(f"the bias of {name}", bias, width)


def _vector(name: str, x: Tensor | None, width: int) -> tuple[int, int]:
    if x is None:
        return 0, 0
    if x.shape != (width,) or not x.is_contiguous():
        raise ValueError(f"{name} must be [{width}] and contiguous, not {tuple(x.shape)}")
    return x.data_ptr(), element(name, x)


def _tables(rotation: tuple[Tensor, Tensor] | None, head_dim: int) -> tuple[int, int, int]:
    """Addresses of cosines and sines, and the number of positions that both have."""
    if rotation is None:
        return 0, 0, 0
    cos, sin = rotation
    return _table("cos", cos, head_dim), _table("sin", sin, head_dim), min(len(cos), len(sin))


def _table(name: str, table: Tensor, head_dim: int) -> int:
    fits = table.dim() == 2 and table.shape[1] == head_dim // 2 and table.dtype == torch.float32
    if not fits or not len(table):  # an empty one has no address, which would mean no rotation
        raise ValueError(f"{name} must be [P, {head_dim // 2}] float32, not {tuple(table.shape)} {table.dtype}")
    return vector(name, table.view(-1), torch.float32, table.numel())


def _projection(name: str, projection: Projection) -> tuple[int, int, int, int, int, int]:
    weight, bias = projection
    shift = _vector(f"the bias of {name}", bias, weight.outputs)
    return int(weight.kind), weight.outputs, weight.inputs, weight.data.data_ptr(), *shift
