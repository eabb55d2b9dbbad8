"""Attention over keys and values in blocks, on CUDA: by torch's memory-efficient kernel, in few launches.

Decides in which calls the rows of a step attend: those of one query in one call, padded to the longest, each of the
others in a call of its own. The kernel goes through a row's keys in order, in blocks of a fixed number, and keeps a
maximum, a sum and a mixture as it goes (Rabe and Staats, "Self-attention does not need O(n^2) memory", 2021). So a
query's bits depend on its own row alone: further queries, rows and masked keys behind its own change nothing. That does
not hold where scores are soft-capped, which the kernel does not know: there the reference attends.

What a step's rows see is the same in all layers, and every copy to the device waits for it: so it is worked out once a
step, not once a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.paged_attention import paged_attention_reference

__all__ = ["CudaAttention"]

_WIDTH = 8
"""Heads are as wide as a multiple of this for the kernel; narrower ones are filled up with zeros."""

_QUERIES = 16
"""Queries of a call are a multiple of this, the last ones zeros: where the kernel's last block of 64 has but one, that
one comes out wrong (torch 2.11 on an H200)."""

_KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class _Group(NamedTuple):
    """Rows that attend in one call.

    Attributes:
        tokens: `[n]`, where their queries are in the step; or None for all of its tokens, in order.
        queries: of each row.
        table: `[R, M]` int64, block ids; of blocks that no query sees, 0.
        unseen: `[R, L]`, L positions in M blocks: those that no query of the row sees.
        bias: `[R, 1, C, L]` in the dtype of queries, 0 for what a query sees and -inf for all else; C is 1 or the
            count of queries.
    """

    tokens: Tensor | None
    queries: int
    table: Tensor
    unseen: Tensor
    bias: Tensor


@dataclass(slots=True)
class CudaAttention:
    """Attends for one backend; remembers what the rows of the last step see.

    Attributes:
        step: the block table of that step, by which it is known again: every step has a table of its own.
        groups: by what becomes of scores.
    """

    step: Tensor | None = None
    groups: dict[tuple[AttentionSpec, torch.dtype], tuple[_Group, ...]] | None = None

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
        for group in self._groups(q.dtype, k_cache.shape[1], q_start, kv_len, block_table, spec):
            if group.tokens is None:
                out = _attend(q, k_cache, v_cache, group, spec.scale, sinks)
            else:
                out[group.tokens] = _attend(q[group.tokens], k_cache, v_cache, group, spec.scale, sinks)
        return out

    def _groups(
        self,
        dtype: torch.dtype,
        block_size: int,
        q_start: Tensor,
        kv_len: Tensor,
        block_table: Tensor,
        spec: AttentionSpec,
    ) -> tuple[_Group, ...]:
        if self.step is not block_table or self.groups is None:
            self.step, self.groups = block_table, {}
        if (spec, dtype) not in self.groups:
            self.groups[spec, dtype] = tuple(_grouped(dtype, block_size, q_start, kv_len, block_table, spec))
        return self.groups[spec, dtype]


def _grouped(
    dtype: torch.dtype, block_size: int, q_start: Tensor, kv_len: Tensor, block_table: Tensor, spec: AttentionSpec
) -> list[_Group]:
    """The rows in groups: those of one query, and each of the others."""
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
    table = table.masked_fill(unseen.unflatten(1, (blocks, -1)).all(-1), 0)  # others' by now, or not there at all
    bias = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)
    return _Group(tokens, queries, table, unseen, bias[:, None])


def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, group: _Group, scale: float, sinks: Tensor | None) -> Tensor:
    """`[n, Hq, D]` of a group's queries, row after row: `[n, Hq, Dv]` in the same dtype."""
    rows, heads, kv_heads, width = len(group.table), q.shape[1], k_cache.shape[2], v_cache.shape[3]
    k, v = (_gathered(cache, group, q.dtype) for cache in (k_cache, v_cache))  # [R, Hkv, L, D]
    grouped = q.view(rows, group.queries, kv_heads, heads // kv_heads, -1).permute(0, 2, 3, 1, 4)  # [R, Hkv, G, C, D]
    bias = group.bias
    if sinks is not None:  # a key of zeros before all others, which scores what the sink says and has a value of zeros
        k, v = functional.pad(k, (0, 0, 1, 0)), functional.pad(v, (0, 0, 1, 0))
    if group.queries == 1:  # query heads of one key head as its queries
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
    """The group's positions `[R, Hkv, L, D]`; 0 where no query looks: weights of 0 do not silence another's NaN."""
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
    """`x` with so many zeros behind each head that the kernel takes it."""
    lacking = -x.shape[-1] % _WIDTH
    return functional.pad(x, (0, lacking)) if lacking else x
