"""Paged attention: attention over keys and values in blocks of a shared cache, found through block tables.

Decides how the queries of a step attend to the cached keys and values of their own sequence. Knows slots of positions,
not sequences: it does not know which sequence owns a block, or what the block holds beyond `kv_len`.

Invariants: a row reads the cache only at positions below its `kv_len` that one of its queries sees; whatever else its
blocks hold, NaN included, cannot reach the output (blocks are reused without being cleared), and blocks that all its
windows have left may belong to other sequences, or not exist. Sums are float32. Grouped queries: query head `h` reads
key-value head `h // (Hq / Hkv)` (Ainslie et al., "GQA", 2023).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.attention_spec import AttentionSpec

__all__ = ["paged_attention_reference", "write_kv_reference"]


def write_kv_reference(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, write_slots: Tensor) -> None:
    """Store new keys and values in the caches, in place.

    Args:
        k_cache: `[num_blocks, block_size, Hkv, D]`, contiguous.
        v_cache: of the same shape; for a latent cache, `[num_blocks, block_size, 1, Dv]`, a view of the end of the
            keys.
        k: `[T, Hkv, D]`, converted to the cache's dtype.
        v: of the same shape; for a latent cache, `[T, 1, Dv]`.
        write_slots: `[T]` int64, `block * block_size + offset` of each token; all different.
    """
    k_cache.flatten(0, 1).index_copy_(0, write_slots, k.to(k_cache.dtype))
    v_cache.flatten(0, 1).index_copy_(0, write_slots, v.to(v_cache.dtype))


def paged_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_start: Tensor,
    kv_len: Tensor,
    block_table: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of ragged rows; the rows' own keys and values must already be in the caches.

    Query `i` of row `r` is at position `kv_len[r] - count[r] + i`, where `count[r] = q_start[r + 1] - q_start[r]`. It
    sees the positions of its window up to its own, and as many later ones as the spec allows.

    Args:
        q: `[T, Hq, D]`.
        k_cache: `[num_blocks, block_size, Hkv, D]`.
        v_cache: `[num_blocks, block_size, Hkv, Dv]`; Dv may differ from D.
        q_start: `[R + 1]` ascending from 0 to T; on the host, to avoid waiting for a device.
        kv_len: `[R]`, the number of positions in each row's sequence, this step's included; on the host.
        block_table: `[R, M]` block ids; entries beyond `kv_len` may be any valid id, and entries that the windows of
            all the row's queries have left may be any number.
        spec: how scores are scaled, capped and masked before softmax.
        sinks: `[Hq]` float32, one extra score per head that takes part in its softmax and contributes no value (the
            attention sinks of gpt-oss; Xiao et al., "Efficient streaming language models", 2023). Neither scaled nor
            capped. None for no sinks.

    Returns:
        `[T, Hq, Dv]`, contiguous, in the dtype of `q`.
    """
    bounds = q_start.tolist()
    lengths = kv_len.tolist()
    counts = [end - begin for begin, end in pairwise(bounds)]
    starts = torch.tensor([spec.window_start(length - each) for length, each in zip(lengths, counts, strict=True)])
    out = torch.empty((*q.shape[:2], v_cache.shape[-1]), dtype=q.dtype, device=q.device)
    single = [row for row, count in enumerate(counts) if count == 1]
    if single:
        at = torch.tensor([bounds[row] for row in single], device=q.device)
        rows = torch.tensor(single)
        table = block_table[rows.to(block_table.device)]
        out[at] = _attend_single(q[at], k_cache, v_cache, kv_len[rows], starts[rows], table, spec, sinks).to(q.dtype)
    for row, (first, last) in enumerate(pairwise(bounds)):
        if last - first > 1:
            own = slice(row, row + 1)
            k, v = (_gather(cache, block_table[own], starts[own], lengths[row])[0] for cache in (k_cache, v_cache))
            out[first:last] = _attend_chunk(q[first:last], k, v, spec, sinks).to(q.dtype)
    return out


def _gather(cache: Tensor, block_table: Tensor, starts: Tensor, length: int) -> Tensor:
    """The first `length` positions of each row of `block_table`, as float32 `[R, length, Hkv, D]`.

    Positions before `starts` `[R]` are 0: their blocks may belong to another sequence by now, and a weight of 0 times
    its NaN would be NaN.
    """
    size = cache.shape[1]
    left = torch.arange(-(-length // size)) < starts[:, None] // size  # [R, M]
    table = block_table[:, : left.shape[1]].masked_fill(left.to(block_table.device), 0)
    held = cache[table.long()].flatten(1, 2)[:, :length].float()
    before = (torch.arange(length) < starts[:, None]).to(cache.device)  # [R, length]
    return held.masked_fill_(before[:, :, None, None], 0.0)


def _attend_single(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_len: Tensor,
    starts: Tensor,
    block_table: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None,
) -> Tensor:
    """One query per row, `[R, Hq, D]`, all rows in one call, padded to the longest `L`; `[R, Hq, Dv]` float32."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    longest = int(kv_len.max())
    k = _gather(k_cache, block_table, starts, longest)  # [R, L, Hkv, D]
    v = _gather(v_cache, block_table, starts, longest)
    at = torch.arange(longest)
    seen = ((at >= starts[:, None]) & (at < kv_len[:, None])).to(q.device)  # [R, L]
    grouped = q.float().view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)  # [R, Hkv, G, D]
    of_heads = None if sinks is None else sinks.view(num_kv_heads, -1, 1)
    weights = _weights(grouped @ k.permute(0, 2, 3, 1), seen[:, None, None, :], spec, of_heads)  # [R, Hkv, G, L]
    # A weight of 0 does not mask a NaN that an earlier owner left in the block: 0 * NaN is NaN.
    v.masked_fill_(~seen[:, :, None, None], 0.0)
    return (weights @ v.transpose(1, 2)).view(num_rows, num_heads, -1)


def _attend_chunk(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    """The last `C` positions of one sequence, `[C, Hq, D]`, against all its `[L, Hkv, D]`; `[C, Hq, Dv]` float32."""
    count, num_heads, head_dim = q.shape
    length, num_kv_heads, _ = k.shape
    groups = num_heads // num_kv_heads
    grouped = q.float().view(count, num_kv_heads, groups, head_dim).permute(1, 2, 0, 3)  # [Hkv, G, C, D]
    keys = k.transpose(0, 1)[:, None].expand(-1, groups, -1, -1)  # [Hkv, G, L, D]
    values = v.transpose(0, 1)[:, None].expand(-1, groups, -1, -1)
    positions = torch.arange(length - count, length, device=q.device)[:, None]
    at = torch.arange(length, device=q.device)
    seen = at < length if spec.ahead is None else at <= positions + spec.ahead  # [L] or [C, L]
    if spec.window is not None:
        seen = seen & (at > positions - spec.window)
    seen = seen.expand(count, length)
    if spec.softcap is None and sinks is None:
        mixed = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=seen, scale=spec.scale)
    else:
        of_heads = None if sinks is None else sinks.view(num_kv_heads, -1, 1, 1)
        mixed = _weights(grouped @ keys.transpose(2, 3), seen, spec, of_heads) @ values
    return mixed.permute(2, 0, 1, 3).reshape(count, num_heads, -1)


def _weights(products: Tensor, seen: Tensor, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    """Softmax weights `[..., L]` of products `[..., L]`; `seen` is broadcast to `[..., L]`, `sinks` to `[..., 1]`."""
    scores = products * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), dim=-1).softmax(-1)[..., :-1]
