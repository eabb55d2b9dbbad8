"""The cases that read and write keys and values, in scattered blocks that no two sequences share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from penstock.bench.kernel_case import BLOCK, CONTEXT, HEAD_DIM, KV_HEADS, Q_HEADS, ROWS, Case
from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.cpu_backend import CpuBackend
from penstock.kernels.native import Cpu
from penstock.kernels.native_attention import (
    int8_keys_shape,
    int8_values_shape,
    packed_keys_shape,
    packed_values_shape,
    rotate_and_write,
)

__all__ = ["FilledCache", "angles", "attend", "attention_cases", "count_pairs", "rope_cases"]


@dataclass(frozen=True, slots=True, eq=False)
class FilledCache:
    """Keys and values of sequences of `CONTEXT` positions, in scattered blocks, none of them shared."""

    keys: Tensor
    values: Tensor
    block_table: Tensor
    kv_len: Tensor
    q_start: Tensor
    positions: Tensor
    write_slots: Tensor

    @classmethod
    def of(
        cls, backend: CpuBackend, sequences: int, new_tokens: int, dtype: torch.dtype = torch.bfloat16
    ) -> FilledCache:
        """The cache for a step in which each sequence computes its last `new_tokens` positions."""
        count = -(-CONTEXT // BLOCK)
        blocks = torch.randperm(sequences * count).view(sequences, count)
        keys, values = _filled(backend, sequences * count, dtype)
        last = torch.arange(CONTEXT - new_tokens, CONTEXT)
        return cls(
            keys=keys,
            values=values,
            block_table=blocks.int(),
            kv_len=torch.full((sequences,), CONTEXT, dtype=torch.int32),
            q_start=torch.arange(sequences + 1, dtype=torch.int32) * new_tokens,
            positions=last.repeat(sequences),
            write_slots=(blocks[:, last // BLOCK] * BLOCK + last % BLOCK).flatten(),
        )

    @property
    def bytes(self) -> int:
        """Size of all keys and values."""
        return int(self.keys.nbytes + self.values.nbytes)


def _filled(backend: CpuBackend, num_blocks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Random keys and values in every position of `num_blocks` blocks, in the kernels' layout."""
    shape = (num_blocks, BLOCK, KV_HEADS, HEAD_DIM)
    if dtype == torch.int8:
        keys, values = (
            torch.zeros(int8_keys_shape(*shape), dtype=dtype),
            torch.zeros(int8_values_shape(*shape), dtype=dtype),
        )
    else:
        keys, values = (torch.zeros(of(*shape, dtype), dtype=dtype) for of in (packed_keys_shape, packed_values_shape))
    for first in range(0, num_blocks * BLOCK, CONTEXT):  # in pieces, to take less memory than the cache
        slots = torch.arange(first, min(first + CONTEXT, num_blocks * BLOCK))
        k, v = (torch.randn(len(slots), KV_HEADS, HEAD_DIM).bfloat16() for _ in range(2))
        backend.write_kv(keys, values, k, v, slots)
    return keys, values


def count_pairs(sequences: int, new_tokens: int) -> int:
    """Number of pairs of a query and a position that it attends to."""
    return sequences * sum(range(CONTEXT - new_tokens + 1, CONTEXT + 1))


def attend(backend: CpuBackend, q: Tensor, cache: FilledCache) -> Tensor:
    """Attention of a step's queries `[T, heads, head_dim]` over the keys and values of `cache`."""
    spec = AttentionSpec(HEAD_DIM**-0.5)
    return backend.paged_attention(q, cache.keys, cache.values, cache.q_start, cache.kv_len, cache.block_table, spec)


def attention_cases(backend: CpuBackend) -> Iterator[Case]:
    """Decoding steps of 1, 8 and 32 sequences, and one prefill, over keys and values in bfloat16 and in int8."""
    # Attention over int8 multiplies 16-bit by 8-bit numbers, for which no limit is measured.
    for kernel, dtype, arithmetic in (("attention", torch.bfloat16, "bf16"), ("attention, int8", torch.int8, "")):
        for sequences, new_tokens in ((1, 1), (8, 1), (32, 1), (1, 256)):
            cache, count = FilledCache.of(backend, sequences, new_tokens, dtype), sequences * new_tokens
            q = torch.randn(count, Q_HEADS, HEAD_DIM).bfloat16()
            form = f"{'decode' if new_tokens == 1 else 'prefill'} at {CONTEXT}"
            ops = 4 * Q_HEADS * HEAD_DIM * count_pairs(sequences, new_tokens) if arithmetic else 0
            yield Case(
                kernel, form, count, cache.bytes, ops, arithmetic,
                partial(attend, backend, q, cache),
            )  # fmt: skip


def angles() -> tuple[Tensor, Tensor]:
    """Cosines and sines of random angles, each `[CONTEXT, HEAD_DIM / 2]`."""
    drawn = torch.rand(CONTEXT, HEAD_DIM // 2) * 6
    return drawn.cos(), drawn.sin()


def _rotate_and_write(
    cpu: Cpu, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, cache: FilledCache
) -> Tensor:
    return rotate_and_write(cpu, q, k, v, cache.positions, cos, sin, cache.keys, cache.values, cache.write_slots)


def rope_cases(backend: CpuBackend) -> Iterator[Case]:
    """Rotary embeddings of queries and keys, written with the values to their blocks."""
    cos, sin = angles()
    for rows in ROWS:
        cache = FilledCache.of(backend, 1, rows)
        q, k, v = (torch.randn(rows, heads, HEAD_DIM).bfloat16() for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
        yield Case(
            "rope and KV write", f"{Q_HEADS} + {KV_HEADS} heads", rows, 2 * (q.nbytes + k.nbytes + v.nbytes), 0, "",
            partial(_rotate_and_write, backend.cpu, q, k, v, cos, sin, cache),
        )  # fmt: skip
