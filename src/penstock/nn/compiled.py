"""Layers as one compiled call, for the families that describe theirs so: when that may be, and how a step enters it.

Decides both for all of them alike. Does not know what a family's layers are: it tells `NativeDecoder` itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from penstock.kernels import native
from penstock.kernels.embedding import embedding
from penstock.kernels.native_decoder import NativeDecoder, Projection
from penstock.kernels.packed_weight import ELEMENTS, PackedWeight
from penstock.nn.causal_lm import PagedAttend
from penstock.nn.layers import Embedding, Linear

__all__ = ["compiles", "embedded", "projection", "run_compiled"]


def compiles(dtype: torch.dtype, head_dim: int, linears: Iterable[Linear]) -> bool:
    """Whether compiled kernels do all that layers of these projections do; else they run one by one."""
    if not native.available() or dtype not in ELEMENTS or head_dim > native.MAX_HEAD_DIM:
        return False
    return all(isinstance(linear.weight, PackedWeight) for linear in linears)


def projection(linear: Linear) -> Projection:
    """A projection of layers that compile."""
    weight = linear.weight
    assert isinstance(weight, PackedWeight)
    return weight, linear.bias


def embedded(indices: Tensor, table: Embedding) -> Tensor:
    """Rows of a table as a stream: `[T]` int64 to `[T, H]` float32, contiguous, ours to use up."""
    return embedding(indices, table.weight, torch.float32).float()


def run_compiled(
    compiled: NativeDecoder, stream: Tensor, positions: Tensor, attend: PagedAttend, out_dtype: torch.dtype
) -> Tensor:
    """All layers and the last norm; see `NativeDecoder.run`."""
    return compiled.run(
        stream,
        positions,
        attend.write_slots,
        attend.keys,
        attend.values,
        attend.q_start,
        attend.kv_len,
        attend.block_table,
        attend.scale,
        out_dtype,
    )
