"""Paged attention and KV cache writes in compiled code, behind the signatures of `kernels.paged_attention`.

Decides how tensors are handed over as addresses; the arithmetic and its order are in `native/attention.h`. Takes
float32 and bfloat16 on the CPU, head_dim up to 512.

A float cache has one of two layouts, told apart by their number of dimensions: natural, `[num_blocks, block_size, Hkv,
D]`, or packed (see `packed_keys_shape` and `packed_values_shape`), in the order in which attention multiplies. Both
give the same bits, and so do all block sizes, batches, prompt chunks and numbers of threads.

A cache may also be int8 (see `int8_keys_shape` and `int8_values_shape`): each position's key and value of each head is
rounded when it is stored, with its own scale, which is kept in the same block. Attention reads only stored values, even
those of the current step, so the guarantees above still hold.

A latent cache has only keys, in natural layout, of one head up to 1,024 wide; values are a view of the end of the keys
(`is_latent`). In int8 a position is a row of bytes (see `int8_latent_shape`): the rotated part of a key has one scale,
and each 128 elements of the value have one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.native import Cpu, required
from penstock.kernels.native_rows import element, rotated_width, rotation, rows, vector_of

__all__ = [
    "cache_of",
    "int8_keys_shape",
    "int8_latent_shape",
    "int8_values_shape",
    "is_latent",
    "latent_values",
    "packed_keys_shape",
    "packed_values_shape",
    "paged_attention",
    "ragged_rows",
    "rotate_and_write",
    "score_rule",
    "vector",
    "write_kv",
]

_LATENT_GROUP = 128  # elements of a value that share a scale, as in `native/attention_call.h`
_INT8 = 2  # the compiled functions' element code of an int8 cache
_LONGEST = 2**31 - 1  # positions; a wider window hides none


def packed_keys_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[int, int, int, int, int]:
    """The shape `[num_blocks, Hkv, words, block_size, w]` of a key cache in the packed layout.

    A word is 32 bits: `w` neighbouring elements of one key, 2 in bfloat16 or 1 in float32; an odd number of bfloat16
    elements is padded with 0. So the same word of 16 neighbouring positions is contiguous.
    """
    each = 4 // dtype.itemsize
    return num_blocks, num_kv_heads, -(-head_dim // each), block_size, each


def packed_values_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[int, int, int, int, int]:
    """The shape `[num_blocks, Hkv, groups, D, w]` of a value cache in the packed layout.

    A word is 32 bits: the same element of `w` neighbouring positions, 2 in bfloat16 or 1 in float32; an odd number of
    bfloat16 positions is padded. So one head's values in a block are contiguous.
    """
    each = 4 // dtype.itemsize
    return num_blocks, num_kv_heads, -(-block_size // each), head_dim, each


def int8_keys_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, int, int, int, int]:
    """The shape `[num_blocks, Hkv, words + 1, block_size, 4]` of an int8 key cache: packed, 4 codes per word.

    The last word is the scale, one float32 per position. A `head_dim` that is not a multiple of 4 is padded with 0.
    """
    return num_blocks, num_kv_heads, -(-head_dim // 4) + 1, block_size, 4


def int8_values_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, int, int, int]:
    """The shape `[num_blocks, Hkv, groups * (D + 4), 4]` of an int8 value cache; a group is 4 positions.

    For each block and head, the codes `[groups, D, 4]` come first, then the float32 scales `[groups, 4]`. The four
    positions of a group are in the order 0, 2, 1, 3. A `block_size` that is not a multiple of 4 is padded.
    """
    return num_blocks, num_kv_heads, -(-block_size // 4) * (head_dim + 4), 4


def int8_latent_shape(num_blocks: int, block_size: int, head_dim: int, value_dim: int) -> tuple[int, int, int, int]:
    """The shape `[num_blocks, block_size, 1, bytes]` of an int8 latent cache.

    A position has the codes of its rotated part, padded with 0 to a multiple of 16, then those of its value, padded
    likewise, then float32 scales: one for the rotated part, one for each 128 elements of the value. With 64 rotated and
    512 value elements, that is 596 bytes, against 1,152 in bfloat16.
    """
    scales = 1 + -(-value_dim // _LATENT_GROUP)
    return num_blocks, block_size, 1, _whole(head_dim - value_dim) + _whole(value_dim) + 4 * scales


def latent_values(k_cache: Tensor, head_dim: int, value_dim: int) -> Tensor:
    """The values `[num_blocks, block_size, 1, value_dim]` of a latent cache: a view of the keys (of codes in int8)."""
    rotated = head_dim - value_dim
    first = _whole(rotated) if k_cache.dtype == torch.int8 else rotated
    return k_cache[..., first : first + value_dim]


def _whole(width: int) -> int:
    """A width rounded up to whole vectors of 16."""
    return -(-width // 16) * 16


def write_kv(cpu: Cpu, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, write_slots: Tensor) -> None:
    """See `kernels.paged_attention.write_kv_reference`; supports every cache layout.

    Raises:
        ValueError: shapes, dtypes or slots do not fit; nothing has been written.
    """
    count, _, dim = k.shape
    cpu.rotate_and_store(
        tokens=count,
        head_dim=dim,
        queries=None,
        stored=_stored(k_cache, v_cache, k, v, write_slots),
        rotation=None,
        positions=0,
        norms=None,
    )


def rotate_and_write(
    cpu: Cpu,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    write_slots: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Norm queries and keys per head, rotate both, and store keys and values, all in one pass.

    Args:
        cpu: runs the kernel.
        q: `[T, Hq, D]`; may be a view of a fused row, as may `k` and `v`.
        k: `[T, Hkv, D]`.
        v: `[T, Hkv, D]`, or `[T, 1, value_dim]` for a latent cache.
        positions: `[T]` int64, rows of the tables.
        cos: `[P, R/2]` float32: the first R elements of each head are rotated.
        sin: `[P, R/2]` float32.
        k_cache: as for `write_kv`, in any of the layouts.
        v_cache: in the same layout.
        write_slots: `[T]` int64, all different.
        q_norm: `[D]` weights of an RMS norm of each query head, or None.
        k_norm: the same for key heads.
        eps: eps of both norms.

    Returns:
        The queries `[T, Hq, D]`, contiguous, in the dtype of `q`.

    Raises:
        ValueError: shapes, dtypes, positions or slots do not fit; nothing has been written.
    """
    count, q_heads, dim = q.shape
    heads = k.shape[1]
    if k.shape != (count, heads, dim):
        raise ValueError(f"k must be [{count}, Hkv, {dim}] like q, not {tuple(k.shape)}")
    rotary_dim = rotated_width(cos, sin, len(cos), dim)
    out = torch.empty(q.shape, dtype=q.dtype)
    native = required()
    cpu.rotate_and_store(
        tokens=count,
        head_dim=dim,
        queries=native.Queries(x=rows("q", q), out=rows("out", out), heads=q_heads),
        stored=_stored(k_cache, v_cache, k, v, write_slots),
        rotation=rotation(cos, sin, rotary_dim),
        positions=vector("positions", positions, torch.int64, count),
        norms=native.HeadNorms(q=vector_of("q_norm", q_norm, dim), k=vector_of("k_norm", k_norm, dim), eps=eps),
    )
    return out


def paged_attention(
    cpu: Cpu,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_start: Tensor,
    kv_len: Tensor,
    block_table: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `kernels.paged_attention.paged_attention_reference`; supports every cache layout.

    Raises:
        ValueError: shapes, dtypes or the row description do not fit, or the table names a block that does not exist.
    """
    count, q_heads, dim = q.shape
    value_dim = v_cache.shape[-1] if is_latent(k_cache, v_cache) else 0
    natural = value_dim or (v_cache.dim() == 4 and v_cache.dtype != torch.int8)
    heads, num_rows = v_cache.shape[2 if natural else 1], len(kv_len)
    described = ragged_rows(count, q_start, kv_len, block_table)
    cache = cache_of(k_cache, v_cache, heads, dim, value_dim)
    out = torch.empty(count, q_heads, value_dim or dim, dtype=q.dtype)
    rule = score_rule(spec, sinks, q_heads)
    size = cpu.attention_scratch_bytes(
        rows=num_rows,
        tokens=count,
        heads=required().Heads(q_heads, heads, dim, value_dim),
        longest=int(kv_len.max()) if num_rows else 0,
        reach=_reach(spec),
    )
    scratch = torch.empty(size, dtype=torch.uint8)
    cpu.attention(
        q=rows("q", q),
        out=rows("out", out),
        q_heads=q_heads,
        cache=cache,
        rows=described,
        rule=rule,
        scratch=required().Memory(scratch.data_ptr(), size),
    )
    return out


def score_rule(spec: AttentionSpec, sinks: Tensor | None, q_heads: int) -> Any:
    """The compiled `ScoreRule` of a spec and its sinks, `[Hq]` float32."""
    return required().ScoreRule(
        scale=spec.scale,
        softcap=spec.softcap or 0.0,
        window=_window(spec),
        sinks=0 if sinks is None else vector("sinks", sinks, torch.float32, q_heads),
        ahead=_LONGEST if spec.ahead is None else min(spec.ahead, _LONGEST),
    )


def _window(spec: AttentionSpec) -> int:
    return min(spec.window or 0, _LONGEST)


def _reach(spec: AttentionSpec) -> int:
    """The most positions that a token can see, its own included; 0 for no limit."""
    return 0 if spec.window is None or spec.ahead is None else min(spec.window + spec.ahead, _LONGEST)


def ragged_rows(count: int, q_start: Tensor, kv_len: Tensor, block_table: Tensor) -> Any:
    """The compiled `RaggedRows` of a step of `count` tokens.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    num_rows = len(kv_len)
    if block_table.dim() != 2 or len(block_table) != num_rows or not block_table.is_contiguous():
        raise ValueError(f"block_table must be [{num_rows}, M] and contiguous, not {tuple(block_table.shape)}")
    return required().RaggedRows(
        tokens=count,
        rows=num_rows,
        q_start=vector("q_start", q_start, torch.int32, num_rows + 1),
        kv_len=vector("kv_len", kv_len, torch.int32, num_rows),
        block_table=vector("block_table", block_table.view(-1), torch.int32, block_table.numel()),
        table_width=block_table.shape[1],
    )


def is_latent(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether `v_cache` is a view of the values in `k_cache`, as made by `latent_values`."""
    if k_cache.dim() != 4 or v_cache.dim() != 4 or v_cache.stride() != k_cache.stride():
        return False
    begins = v_cache.data_ptr() - k_cache.data_ptr()
    if k_cache.dtype == torch.int8:
        fits = begins % 16 == 0 and begins + v_cache.shape[3] < k_cache.shape[3]
    else:
        fits = begins == (k_cache.shape[3] - v_cache.shape[3]) * k_cache.itemsize
    return k_cache.dtype == v_cache.dtype and begins > 0 and fits


def cache_of(k_cache: Tensor, v_cache: Tensor, heads: int, dim: int, value_dim: int = 0) -> Any:
    """The compiled `Cache`; for `value_dim` see `KvCacheSpec`.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    if value_dim:
        return _latent_cache_of(k_cache, v_cache, (heads, dim, value_dim))
    packed = k_cache.dim() == 5
    if k_cache.dim() < 4:
        raise ValueError(f"k_cache must have four or five dimensions, not {tuple(k_cache.shape)}")
    size = (len(k_cache), k_cache.shape[3 if packed else 1], heads, dim)
    shapes: tuple[tuple[int, ...], tuple[int, ...]] = (size, size)
    if v_cache.dtype == torch.int8:
        shapes, code = (int8_keys_shape(*size), int8_values_shape(*size)), _INT8
    else:
        code = element("v_cache", v_cache)
        if packed:
            shapes = packed_keys_shape(*size, v_cache.dtype), packed_values_shape(*size, v_cache.dtype)
    for name, cache, shape in zip(("k_cache", "v_cache"), (k_cache, v_cache), shapes, strict=True):
        if cache.shape != shape:
            raise ValueError(f"{name} must be {shape} for {heads} heads of {dim}, not {tuple(cache.shape)}")
    if not v_cache.is_cpu or k_cache.device != v_cache.device:
        raise ValueError(f"k_cache and v_cache must be on the CPU, not {k_cache.device} and {v_cache.device}")
    if k_cache.dtype != v_cache.dtype or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("k_cache and v_cache must be contiguous and of one dtype")
    return required().Cache(
        keys=k_cache.data_ptr(),
        values=v_cache.data_ptr(),
        element=code,
        packed=packed,
        num_blocks=size[0],
        block_size=size[1],
        kv_heads=heads,
        head_dim=dim,
    )


def _latent_cache_of(k_cache: Tensor, v_cache: Tensor, sizes: tuple[int, int, int]) -> Any:
    heads, dim, value_dim = sizes
    in_int8 = k_cache.dtype == torch.int8
    width = int8_latent_shape(1, 1, dim, value_dim)[3] if in_int8 else dim
    fits = k_cache.dim() == 4 and k_cache.shape[2:] == (heads, width) and k_cache.is_contiguous() and k_cache.is_cpu
    if not fits or not is_latent(k_cache, v_cache) or v_cache.shape[3] != value_dim:
        raise ValueError(
            f"k_cache must be [N, B, {heads}, {width}] on the CPU, contiguous, and v_cache"
            f" {'the codes of its values' if in_int8 else f'its last {value_dim} columns'},"
            f" not {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    return required().Cache(
        keys=k_cache.data_ptr(),
        values=0,
        element=_INT8 if in_int8 else element("k_cache", k_cache),
        packed=False,
        num_blocks=len(k_cache),
        block_size=k_cache.shape[1],
        kv_heads=heads,
        head_dim=dim,
        value_dim=value_dim,
    )


def vector(name: str, x: Tensor, dtype: torch.dtype, length: int) -> int:
    """The address of a contiguous `[length]` of `dtype` on the CPU.

    Raises:
        ValueError: `x` is not such a vector; the message has `name`.
    """
    if x.shape != (length,) or x.dtype != dtype or not x.is_cpu or not x.is_contiguous():
        raise ValueError(f"{name} must be [{length}] {dtype} on the CPU, contiguous, not {tuple(x.shape)} {x.dtype}")
    return x.data_ptr()


def _stored(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, write_slots: Tensor) -> Any:
    count, heads, dim = k.shape
    value_dim = v_cache.shape[-1] if is_latent(k_cache, v_cache) else 0
    wanted = (count, heads, value_dim or dim)
    if v.shape != wanted:
        raise ValueError(f"v must be {wanted}, not {tuple(v.shape)}")
    return required().KeysAndValues(
        k=rows("k", k),
        v=rows("v", v),
        cache=cache_of(k_cache, v_cache, heads, dim, value_dim),
        write_slots=vector("write_slots", write_slots, torch.int64, count),
    )
