"""Paged attention on CUDA with torch's memory-efficient kernel, in few launches.

Decides how the rows of a step are grouped into calls: all rows with one query in one call, padded to the longest; every
other row in its own call. The kernel reads a row's keys in order, in blocks of fixed size, and keeps a running maximum,
sum and weighted value (Rabe and Staats, "Self-attention does not need O(n^2) memory", 2021). So a query's bits depend
on its own row alone: more queries, more rows, and masked keys after its own change nothing. The kernel does not support
soft-capped scores; those go to the reference, without that guarantee.

Masks are the same for all layers with the same spec, and every copy to the device blocks. So masks are computed once
per step, not once per layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.paged_attention import paged_attention_reference
from penstock.kernels.step_cache import StepCache

__all__ = ["CudaAttention"]

_WIDTH = 8
"""The kernel needs head widths that are a multiple of this; others are padded with zeros."""

_QUERIES = 16
"""The number of queries per call is padded to a multiple of this with zeros: if the kernel's last block of 64 has only
one query, its result is wrong (torch 2.11 on an H200)."""

_KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class _Group(NamedTuple):
    """Rows that attend in one call.

    Attributes:
        tokens: `[n]`, indices of their queries in the step; or None for all tokens of the step, in order.
        queries: number of queries per row.
        table: `[R, M]` int64, block ids; 0 for blocks that no query sees.
        unseen: `[R, L]`, for the L positions in M blocks: true if no query of the row sees the position.
        bias: `[R, 1, C, L]` in the dtype of queries, 0 where a query sees the position, else -inf; C is `queries`.
    """

    tokens: Tensor | None
    queries: int
    table: Tensor
    unseen: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class CudaAttention:
    """Attention for one backend; caches the groups and masks of the last step.

    Attributes:
        groups: the groups of that step, by spec and query dtype.
    """

    groups: StepCache[list[_Group]] = field(default_factory=StepCache)

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        q_start: Tensor,
        kv_len: Tensor,
        block_table: Tensor,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `paged_attention.paged_attention_reference`."""
        if spec.softcap is not None:
            return paged_attention_reference(q, k_cache, v_cache, q_start, kv_len, block_table, spec, sinks)
        out = q.new_empty((*q.shape[:2], v_cache.shape[-1]))
        make = partial(_grouped, q.dtype, k_cache.shape[1], q_start, kv_len, block_table, spec)
        for group in self.groups.get(block_table, (spec, q.dtype), make):
            if group.tokens is None:
                out = _attend(q, k_cache, v_cache, group, spec.scale, sinks)
            else:
                out[group.tokens] = _attend(q[group.tokens], k_cache, v_cache, group, spec.scale, sinks)
        return out


def _grouped(
    dtype: torch.dtype, block_size: int, q_start: Tensor, kv_len: Tensor, block_table: Tensor, spec: AttentionSpec
) -> list[_Group]:
    """Group the rows: all rows with one query together, every other row by itself."""
    bounds = q_start.tolist()
    counts = [end - begin for begin, end in pairwise(bounds)]
    single = [row for row, count in enumerate(counts) if count == 1]
    chosen = ([single] if single else []) + [[row] for row, count in enumerate(counts) if count > 1]
    groups = []
    for rows in chosen:
        first, queries = bounds[rows[0]], counts[rows[0]]
        tokens = [bounds[row] for row in rows] if queries == 1 else list(range(first, first + queries))
        at = None if len(tokens) == bounds[-1] else torch.tensor(tokens, device=block_table.device)
        groups.append(_group(dtype, block_size, rows, at, queries, kv_len, block_table, spec))
    return groups


def _group(
    dtype: torch.dtype,
    block_size: int,
    rows: list[int],
    tokens: Tensor | None,
    queries: int,
    kv_len: Tensor,
    block_table: Tensor,
    spec: AttentionSpec,
) -> _Group:
    device = block_table.device
    ends = kv_len[rows].long()  # [R], on the host
    blocks = -(-int(ends.max()) // block_size)
    ends = ends.to(device)[:, None, None]  # [R, 1, 1]
    at = torch.arange(blocks * block_size, device=device)  # [L]
    positions = ends - queries + torch.arange(queries, device=device)[:, None]  # [R, C, 1]
    seen = (at < ends).expand(-1, queries, -1) if spec.ahead is None else at <= positions + spec.ahead
    seen = seen & (at < ends)
    if spec.window is not None:
        seen = seen & (at > positions - spec.window)
    unseen = ~seen.any(1)  # [R, L]
    table = (block_table if len(rows) == len(block_table) else block_table[rows])[:, :blocks].long()
    table = table.masked_fill(unseen.unflatten(1, (blocks, -1)).all(-1), 0)  # may belong to others, or not exist
    bias = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)
    return _Group(tokens, queries, table, unseen, bias[:, None])


def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, group: _Group, scale: float, sinks: Tensor | None) -> Tensor:
    """Attend with a group's queries `[n, Hq, D]`, row after row: `[n, Hq, Dv]` in the same dtype."""
    rows, heads, kv_heads, width = len(group.table), q.shape[1], k_cache.shape[2], v_cache.shape[3]
    k, v = (_gathered(cache, group, q.dtype) for cache in (k_cache, v_cache))  # [R, Hkv, L, D]
    grouped = q.view(rows, group.queries, kv_heads, heads // kv_heads, -1).permute(0, 2, 3, 1, 4)  # [R, Hkv, G, C, D]
    bias = group.bias
    if sinks is not None:  # prepend a key and value of zeros, whose score is the sink
        k, v = functional.pad(k, (0, 0, 1, 0)), functional.pad(v, (0, 0, 1, 0))
    if group.queries == 1:  # treat the query heads of one key head as its queries
        asked = _widened(grouped[:, :, :, 0])  # [R, Hkv, G, D]
        if sinks is not None:
            of_heads = sinks.to(q.dtype).view(1, kv_heads, -1, 1).expand(rows, -1, -1, -1)
            bias = torch.cat((of_heads, bias.expand(-1, kv_heads, heads // kv_heads, -1)), dim=-1)
        mixed = _mix(asked, k, v, bias, scale)[:, :, :, None]  # [R, Hkv, G, 1, Dv]
    else:
        asked = _widened(grouped[0])  # [Hkv, G, C, D]
        k, v = (each[0][:, None].expand(-1, heads // kv_heads, -1, -1) for each in (k, v))
        if sinks is not None:
            of_heads = sinks.to(q.dtype).view(kv_heads, -1, 1, 1).expand(-1, -1, group.queries, -1)
            bias = torch.cat((of_heads, bias.expand(kv_heads, heads // kv_heads, -1, -1)), dim=-1)
        mixed = _mix(asked, k, v, bias, scale)[None]  # [1, Hkv, G, C, Dv]
    return mixed[..., :width].permute(0, 3, 1, 2, 4).reshape(-1, heads, width)


def _gathered(cache: Tensor, group: _Group, dtype: torch.dtype) -> Tensor:
    """The group's positions `[R, Hkv, L, D]`; zeros where no query sees, because a weight of 0 times NaN is NaN."""
    held = cache[group.table].flatten(1, 2).to(dtype)  # [R, L, Hkv, D], a copy
    held = held.masked_fill_(group.unseen[:, :, None, None], 0.0)
    return _widened(held.transpose(1, 2))


def _mix(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    queries = q.shape[-2]
    lacking = -queries % _QUERIES
    if lacking:
        q = functional.pad(q, (0, 0, 0, lacking))
        bias = bias if bias.shape[-2] == 1 else functional.pad(bias, (0, 0, 0, lacking))
    with sdpa_kernel(_KERNELS):
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)[..., :queries, :]


def _widened(x: Tensor) -> Tensor:
    """Pad each head of `x` with zeros to a width that the kernel supports."""
    lacking = -x.shape[-1] % _WIDTH
    return functional.pad(x, (0, lacking)) if lacking else x
