"""Paged attention on CUDA in Triton: one kernel for prompts and single tokens, which reads keys and values in place.

Queries are computed in tiles: up to `ROWS` rows of one key head, where a row is the query of one token in one query
head, and the tokens are neighbours in one sequence. A tile walks the positions that its queries see, in order and
`KEYS` at a time, and keeps a running maximum, sum and weighted value for each `SEGMENT` of positions (Dao et al.,
"FlashAttention", 2022); then it merges the segments in order. Either one program computes a whole tile, or one program
computes each segment and `_merge_segments` merges them ("split KV": Dao et al., "Flash-Decoding", 2023); the arithmetic
is the same.

Invariant: a query's bits depend only on its own sequence, up to the positions that it sees. Segments, and the `KEYS`
positions taken at a time, begin at fixed positions; positions that only other queries of the tile see add zeros. A tile
of few rows, as for single tokens, has one warp, and a tile of many has four; a warp has 16 rows either way, so a row is
summed in the same order. As in `paged_attention`, positions that no query of the tile sees are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.row_pieces import empty_with_room
from penstock.kernels.triton_rows import EXACT, tanh

__all__ = ["MAX_HEAD_DIM", "PLACES", "ROWS", "SEGMENT", "Tiles", "attend_tiles", "tiles_of", "why_not"]

ROWS = 64
"""Maximum number of rows in a tile."""

_FEW = 16
"""Rows of a small tile: as many as one warp has."""

KEYS = 64
"""Positions that a tile takes at a time."""

SEGMENT = 256
"""Positions of a segment, which a program may compute on its own; a multiple of `KEYS`."""

MAX_HEAD_DIM = 256

_BUSY = 256
"""Programs that keep a device busy: if whole tiles make this many, segments are not shared out."""

PLACES = tl.constexpr(5)
"""How many numbers describe a tile (see `Tiles`)."""


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """A step's queries, tile by tile.

    Attributes:
        places: `[N, 5]` int32: the first token, number of tokens (0 for a tile that is not computed), row of the block
            table, position of the first token, and length of the sequence.
        table: `[R, M]` int32, block ids.
        segments: maximum number of segments that a tile sees; 1 if one program computes a whole tile.
        rows: rows of each tile that may be in use, at most `ROWS`.
    """

    places: Tensor
    table: Tensor
    segments: int
    rows: int


def why_not(head_dim: int, groups: int, *, latent: bool = False) -> str | None:
    """The reason why torch attends with these heads, `groups` query heads to a key head; None if this kernel does."""
    if latent:
        return "latent caches"
    if head_dim > MAX_HEAD_DIM:
        return f"heads of {head_dim} are wider than {MAX_HEAD_DIM}"
    return f"{groups} query heads to a key head are more than {ROWS}" if groups > ROWS else None


def tiles_of(q_start: Tensor, kv_len: Tensor, table: Tensor, groups: int, kv_heads: int) -> Tiles:
    """Cut ragged rows into tiles; see `paged_attention.paged_attention_reference` for the rows."""
    bounds, lengths = q_start.numpy(), kv_len.numpy()
    counts = np.diff(bounds)
    most = ROWS // groups  # tokens of a tile
    tiles = -(-counts // most)
    row = np.repeat(np.arange(len(counts)), tiles)
    offset = (np.arange(len(row)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * most
    places = np.empty((len(row), PLACES.value), dtype=np.int32)
    places[:, 0] = bounds[row] + offset
    places[:, 1] = np.minimum(counts[row] - offset, most)
    places[:, 2] = row
    places[:, 3] = (lengths - counts)[row] + offset
    places[:, 4] = lengths[row]
    needed = -(-int(lengths.max()) // SEGMENT)
    shared_out = len(row) * kv_heads < _BUSY
    used = groups * int(places[:, 1].max())
    return Tiles(torch.from_numpy(places).to(table.device), table, needed if shared_out else 1, used)


@triton.jit
def _visible(places, tile, AHEAD: tl.constexpr, WINDOW: tl.constexpr):
    """Load a tile's first token, number of tokens, table row, position and length; and the range that it sees."""
    first = tl.load(places + tile * PLACES).to(tl.int64)
    count = tl.load(places + tile * PLACES + 1)
    row = tl.load(places + tile * PLACES + 2).to(tl.int64)
    position = tl.load(places + tile * PLACES + 3)
    length = tl.load(places + tile * PLACES + 4)
    low = position * 0
    if WINDOW > 0:
        low = tl.maximum(position + 1 - WINDOW, 0)
    high = length
    if AHEAD >= 0:
        high = tl.minimum(length, position + count + AHEAD)
    high = tl.where(count > 0, high, low)
    return first, count, row, position, length, low, high


@triton.jit
def _nothing(N_ROWS: tl.constexpr, DV: tl.constexpr):
    """Maximum, sum and weighted values of no positions."""
    top = tl.full((N_ROWS,), float("-inf"), tl.float32)
    return top, tl.zeros((N_ROWS,), tl.float32), tl.zeros((N_ROWS, DV), tl.float32)


@triton.jit
def _merged(top, total, mixed, other_top, other_total, other_mixed):
    """Merge the maxima, sums and weighted values of two sets of positions."""
    new_top = tl.maximum(top, other_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    kept, added = tl.exp(top - base), tl.exp(other_top - base)
    total = total * kept + other_total * added
    mixed = mixed * kept[:, None] + other_mixed * added[:, None]
    return new_top, total, mixed


@triton.jit
def _store(place, inside, top, total, mixed, sinks, head, valid, SINKS: tl.constexpr):
    """Add the sinks to a tile's sums, which cover all positions, and store its output."""
    if SINKS:
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32)
        base = tl.maximum(top, sink)
        kept = tl.exp(top - base)
        total = total * kept + tl.exp(sink - base)
        mixed = mixed * kept[:, None]
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]  # 0 in rows without a query
    tl.store(place, mixed.to(place.dtype.element_ty), mask=inside)


@triton.jit
def _segment_mixed(
    asked,
    k_cache,
    v_cache,
    table,
    low,
    high,
    first_seen,
    end_seen,
    scale,
    softcap,
    k_strides,
    v_strides,
    width,
    value_width,
    BLOCK: tl.constexpr,
    N_ROWS: tl.constexpr,
    N_KEYS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Maximum `[N_ROWS]`, sum, and weighted values `[N_ROWS, DV]` of the positions from `low` to `high`."""
    top, total, mixed = _nothing(N_ROWS, DV)
    d, dv = tl.arange(0, D), tl.arange(0, DV)
    for start in range(low // N_KEYS * N_KEYS, high, N_KEYS):
        at = start + tl.arange(0, N_KEYS)
        inside = (at >= low) & (at < high)
        block = tl.load(table + at // BLOCK, mask=inside, other=0).to(tl.int64)
        place = block * BLOCK + at % BLOCK
        keys = tl.load(
            k_cache + place[None, :] * k_strides + d[:, None], mask=inside[None, :] & (d < width)[:, None], other=0.0
        )
        scores = tl.dot(asked, keys, input_precision="ieee") * scale
        if CAPPED:
            scores = softcap * tanh(scores / softcap)
        seen = inside[None, :] & (at[None, :] >= first_seen[:, None]) & (at[None, :] < end_seen[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp(scores - base[:, None])
        kept = tl.exp(top - base)
        total = total * kept + tl.sum(weights, 1)
        values = tl.load(
            v_cache + place[:, None] * v_strides + dv[None, :],
            mask=inside[:, None] & (dv < value_width)[None, :],
            other=0.0,
        )
        mixed = tl.dot(weights.to(values.dtype), values, mixed * kept[:, None], input_precision="ieee")
        top = new_top
    return top, total, mixed


@triton.jit
def _attend(
    q,
    k_cache,
    v_cache,
    out,
    tops,
    totals,
    mixtures,
    places,
    tables,
    sinks,
    scale,
    softcap,
    q_stride,
    k_strides,
    v_strides,
    table_stride,
    heads,
    width,
    value_width,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    N_ROWS: tl.constexpr,
    N_KEYS: tl.constexpr,
    N_SEGMENT: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    AHEAD: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    USED: tl.constexpr,
    SPLIT: tl.constexpr,
):
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    kv_heads = tl.num_programs(1)
    first, count, row, position, length, low, high = _visible(places, tile, AHEAD, WINDOW)
    m = tl.arange(0, N_ROWS)
    token, head = m // GROUPS, kv_head * GROUPS + m % GROUPS
    valid = token < count
    d, dv = tl.arange(0, D), tl.arange(0, DV)
    asked = tl.load(
        q + (first + token)[:, None] * q_stride + head[:, None] * width + d[None, :],
        mask=valid[:, None] & (d < width)[None, :],
        other=0.0,
    )
    first_seen = tl.zeros((N_ROWS,), tl.int32)
    if WINDOW > 0:
        first_seen = position + token + 1 - WINDOW
    end_seen = tl.zeros((N_ROWS,), tl.int32) + length
    if AHEAD >= 0:
        end_seen = tl.minimum(position + token + 1 + AHEAD, length)
    keys, values, table = k_cache + kv_head * width, v_cache + kv_head * value_width, tables + row * table_stride
    if SPLIT:
        part = tl.program_id(2)
        segment = low // N_SEGMENT + part
        if segment * N_SEGMENT < high:
            top, total, mixed = _segment_mixed(
                asked, keys, values, table,
                tl.maximum(low, segment * N_SEGMENT), tl.minimum(high, (segment + 1) * N_SEGMENT),
                first_seen, end_seen, scale, softcap, k_strides, v_strides, width, value_width,
                BLOCK, N_ROWS, N_KEYS, D, DV, CAPPED,
            )  # fmt: skip
            at = ((tile.to(tl.int64) * kv_heads + kv_head) * tl.num_programs(2) + part) * USED + m
            used = valid & (m < USED)
            tl.store(tops + at, top, mask=used)
            tl.store(totals + at, total, mask=used)
            tl.store(
                mixtures + at[:, None] * value_width + dv[None, :],
                mixed,
                mask=used[:, None] & (dv < value_width)[None, :],
            )
    else:
        top, total, mixed = _nothing(N_ROWS, DV)
        for segment in range(low // N_SEGMENT, tl.cdiv(high, N_SEGMENT)):
            other_top, other_total, other_mixed = _segment_mixed(
                asked, keys, values, table,
                tl.maximum(low, segment * N_SEGMENT), tl.minimum(high, (segment + 1) * N_SEGMENT),
                first_seen, end_seen, scale, softcap, k_strides, v_strides, width, value_width,
                BLOCK, N_ROWS, N_KEYS, D, DV, CAPPED,
            )  # fmt: skip
            top, total, mixed = _merged(top, total, mixed, other_top, other_total, other_mixed)
        place = out + ((first + token)[:, None] * heads + head[:, None]) * value_width + dv[None, :]
        inside = valid[:, None] & (dv < value_width)[None, :]
        _store(place, inside, top, total, mixed, sinks, head, valid, SINKS)


@triton.jit
def _merge_segments(
    out,
    tops,
    totals,
    mixtures,
    places,
    sinks,
    heads,
    value_width,
    parts,
    GROUPS: tl.constexpr,
    N_ROWS: tl.constexpr,
    N_SEGMENT: tl.constexpr,
    DV: tl.constexpr,
    AHEAD: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    USED: tl.constexpr,
):
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    kv_heads = tl.num_programs(1)
    first, count, _, _, _, low, high = _visible(places, tile, AHEAD, WINDOW)
    m, dv = tl.arange(0, N_ROWS), tl.arange(0, DV)
    token, head = m // GROUPS, kv_head * GROUPS + m % GROUPS
    valid = (token < count) & (m < USED)
    inside = valid[:, None] & (dv < value_width)[None, :]
    top, total, mixed = _nothing(N_ROWS, DV)
    begin = low // N_SEGMENT
    for segment in range(begin, tl.cdiv(high, N_SEGMENT)):
        at = ((tile.to(tl.int64) * kv_heads + kv_head) * parts + segment - begin) * USED + m
        other_top = tl.load(tops + at, mask=valid, other=float("-inf"))
        other_total = tl.load(totals + at, mask=valid, other=0.0)
        other_mixed = tl.load(mixtures + at[:, None] * value_width + dv[None, :], mask=inside, other=0.0)
        top, total, mixed = _merged(top, total, mixed, other_top, other_total, other_mixed)
    place = out + ((first + token)[:, None] * heads + head[:, None]) * value_width + dv[None, :]
    _store(place, inside, top, total, mixed, sinks, head, valid, SINKS)


def attend_tiles(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tiles: Tiles, spec: AttentionSpec, sinks: Tensor | None = None
) -> Tensor:
    """Attention of a step's tiles; see `paged_attention.paged_attention_reference` for the other arguments.

    Args:
        q: `[T, Hq, D]`; rows may be strided.
        k_cache: `[num_blocks, block_size, Hkv, D]`, contiguous.
        v_cache: `[num_blocks, block_size, Hkv, Dv]`, contiguous.
        tiles: what to compute.
        spec: the layer's.
        sinks: `[Hq]` float32, or None.

    Returns:
        `[T, Hq, Dv]`, contiguous, made by `empty_with_room`; undefined for tokens in no tile.
    """
    tokens, heads, width = q.shape
    _, block, kv_heads, value_width = v_cache.shape
    if q.stride(1) != width or q.stride(2) != 1:
        q = q.contiguous()
    out = empty_with_room(q, (tokens, heads, value_width))
    count, groups = len(tiles.places), heads // kv_heads
    if not count:
        return out
    split = tiles.segments > 1
    rows = triton.next_power_of_2(tiles.rows)
    few = rows <= _FEW and q.dtype != torch.float32  # float32 is multiplied without tensor cores
    parts = (count, kv_heads, tiles.segments, rows) if split else (1,)
    tops, totals = (torch.empty(parts, dtype=torch.float32, device=q.device) for _ in range(2))
    mixtures = torch.empty((*parts, value_width), dtype=torch.float32, device=q.device)
    sizes: dict[str, int | bool] = {
        "GROUPS": groups,
        "N_SEGMENT": SEGMENT,
        "DV": max(16, triton.next_power_of_2(value_width)),
        "AHEAD": -1 if spec.ahead is None else spec.ahead,
        "WINDOW": spec.window or 0,
        "SINKS": sinks is not None,
        "USED": rows,
    }
    given = out if sinks is None else sinks  # a pointer that is not read
    grid: Sequence[int] = (count, kv_heads, tiles.segments) if split else (count, kv_heads)
    _attend[grid](
        q,
        k_cache,
        v_cache,
        out,
        tops,
        totals,
        mixtures,
        tiles.places,
        tiles.table,
        given,
        spec.scale,
        spec.softcap or 1.0,
        q.stride(0),
        k_cache.stride(1),
        v_cache.stride(1),
        tiles.table.stride(0),
        heads,
        width,
        value_width,
        BLOCK=block,
        N_ROWS=_FEW if few else ROWS,
        N_KEYS=KEYS,
        D=max(16, triton.next_power_of_2(width)),
        CAPPED=spec.softcap is not None,
        SPLIT=split,
        num_warps=1 if few else 4,
        num_stages=1 if q.dtype == torch.float32 else 2,
        **sizes,
        **EXACT,
    )
    if split:
        _merge_segments[count, kv_heads](
            out,
            tops,
            totals,
            mixtures,
            tiles.places,
            given,
            heads,
            value_width,
            tiles.segments,
            N_ROWS=rows,
            num_warps=4,
            **sizes,
            **EXACT,
        )
    return out
