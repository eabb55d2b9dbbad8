"""Paged attention against attention written out in float64, on ragged rows with scrambled block tables."""

from __future__ import annotations

import math
import random

import pytest
import torch

from penstock.kernels import native
from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.paged_attention import paged_attention, write_kv


@pytest.fixture(autouse=True, params=["chosen", "torch"])
def implementation(request, monkeypatch):
    """Whatever serves here, and torch's."""
    if request.param == "torch":
        monkeypatch.setattr(native, "module", None)


def attend_in_float64(q, k, v, scale):
    """`q` `[C, Hq, D]`, the last C positions of `k` and `v` `[L, Hkv, D]`."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for i in range(len(q)):
        seen = len(k) - len(q) + i + 1
        for head in range(q.shape[1]):
            scores = k[:seen, head // group].double() @ q[i, head].double() * scale
            weights = torch.exp(scores - scores.max())
            out[i, head] = (weights / weights.sum()) @ v[:seen, head // group].double()
    return out


def ragged_case(lengths, counts, heads, kv_heads, head_dim, block_size, dtype=torch.float32, seed=0):
    """Rows with their keys and values scattered over a cache whose every other cell is NaN."""
    generator = torch.Generator().manual_seed(seed)
    blocks_each = [math.ceil(length / block_size) for length in lengths]
    num_blocks = sum(blocks_each) + 3
    ids = random.Random(seed).sample(range(num_blocks), sum(blocks_each))
    table = torch.zeros(len(lengths), max(blocks_each), dtype=torch.int32)
    k_cache, v_cache = (
        torch.full((num_blocks, block_size, kv_heads, head_dim), float("nan"), dtype=dtype) for _ in range(2)
    )
    rows = []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        own = [ids.pop() for _ in range(blocks_each[row])]
        table[row, : len(own)] = torch.tensor(own)
        k, v = (torch.randn(length, kv_heads, head_dim, generator=generator).to(dtype) for _ in range(2))
        slots = torch.tensor([own[at // block_size] * block_size + at % block_size for at in range(length)])
        write_kv(k_cache, v_cache, k, v, slots)
        rows.append((torch.randn(count, heads, head_dim, generator=generator).to(dtype), k, v))
    q_start = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    return rows, k_cache, v_cache, q_start, torch.tensor(lengths, dtype=torch.int32), table


SHAPES = [(4, 4, 8), (6, 2, 5), (9, 3, 64), (8, 1, 16), (2, 1, 300)]


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize(
    ("lengths", "counts"),
    [
        ([1], [1]),
        ([7, 1, 33, 16], [1, 1, 1, 1]),
        ([5, 20, 17], [5, 3, 17]),
        ([9, 40, 12, 1, 30, 2], [1, 13, 1, 1, 30, 2]),
    ],
)
def test_ragged_rows_attend_as_each_does_alone_in_float64(lengths, counts, heads, kv_heads, head_dim, block_size):
    rows, k_cache, v_cache, q_start, kv_len, table = ragged_case(lengths, counts, heads, kv_heads, head_dim, block_size)
    scale = head_dim**-0.5
    q = torch.cat([row[0] for row in rows])
    out = paged_attention(q, k_cache, v_cache, q_start, kv_len, table, AttentionSpec(scale))
    expected = torch.cat([attend_in_float64(*row, scale) for row in rows])
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_caches_lose_only_the_rounding_of_weights_and_result(dtype):
    rows, k_cache, v_cache, q_start, kv_len, table = ragged_case([50, 9, 30], [1, 9, 4], 6, 2, 16, 8, dtype)
    q = torch.cat([row[0] for row in rows])
    out = paged_attention(q, k_cache, v_cache, q_start, kv_len, table, AttentionSpec(0.25))
    expected = torch.cat([attend_in_float64(*row, 0.25) for row in rows])
    assert out.dtype == dtype
    eps = torch.finfo(dtype).eps
    of_weights = (
        eps / 2 if dtype == torch.bfloat16 else 1e-6
    )  # the compiled kernels round them beside bfloat16 (ADR 11)
    torch.testing.assert_close(out.double(), expected, atol=of_weights, rtol=eps)


def test_queries_may_be_views_of_a_wider_matrix():
    rows, k_cache, v_cache, q_start, kv_len, table = ragged_case([5, 20, 17], [5, 1, 17], 6, 2, 8, 4)
    q = torch.cat([row[0] for row in rows])
    wide = torch.cat((q, torch.full((len(q), 4, 8), float("nan"))), dim=1)
    again = paged_attention(wide[:, :6], k_cache, v_cache, q_start, kv_len, table, AttentionSpec(0.3))
    assert again.is_contiguous()
    assert torch.equal(again, paged_attention(q, k_cache, v_cache, q_start, kv_len, table, AttentionSpec(0.3)))


def test_writing_touches_the_named_slots_only():
    k_cache = torch.zeros(3, 4, 2, 5)
    v_cache = torch.zeros(3, 4, 2, 5)
    k, v = torch.randn(2, 2, 5), torch.randn(2, 2, 5)
    write_kv(k_cache, v_cache, k, v, torch.tensor([9, 2]))
    assert torch.equal(k_cache[2, 1], k[0])
    assert torch.equal(v_cache[0, 2], v[1])
    assert k_cache.count_nonzero() == k.count_nonzero()
    assert v_cache.count_nonzero() == v.count_nonzero()
