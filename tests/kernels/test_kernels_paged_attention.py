"""Paged attention against attention written out in float64, on ragged rows with scrambled block tables."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import compiled_kernels as here
import pytest
import torch

from penstock.kernels.attention_spec import AttentionSpec
from penstock.nn.dense import DenseAttention


@pytest.fixture(autouse=True, params=["chosen", "torch"])
def implementation(request):
    """The best implementation that runs here, and torch's."""
    here.reset()
    if request.param == "torch":
        here.set_isa("torch")
    yield
    here.reset()


def attend_in_float64(q, k, v, spec, sinks=None):
    """`q` `[C, Hq, D]`, the last C positions of `k` and `v` `[L, Hkv, D]`."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for i in range(len(q)):
        own = len(k) - len(q) + i + 1
        begin = max(0, own - (spec.window or own))
        end = len(k) if spec.ahead is None else min(len(k), own + spec.ahead)
        for head in range(q.shape[1]):
            scores = k[begin:end, head // group].double() @ q[i, head].double() * spec.scale
            if spec.softcap:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            weights = torch.exp(scores - scores.max())
            sunk = 0.0 if sinks is None else torch.exp(sinks[head].double() - scores.max())
            out[i, head] = (weights / (weights.sum() + sunk)) @ v[begin:end, head // group].double()
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
        here.backend().write_kv(k_cache, v_cache, k, v, slots)
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
    spec = AttentionSpec(head_dim**-0.5)
    q = torch.cat([row[0] for row in rows])
    out = here.backend().paged_attention(q, k_cache, v_cache, q_start, kv_len, table, spec)
    expected = torch.cat([attend_in_float64(*row, spec) for row in rows])
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=2e-5)


SPECS = [
    AttentionSpec(0.4, softcap=1.5),
    AttentionSpec(0.4, window=1),
    AttentionSpec(0.4, window=6),
    AttentionSpec(0.4, softcap=1.5, window=9),
    AttentionSpec(0.4, ahead=None),
    AttentionSpec(0.4, softcap=1.5, window=6, ahead=4),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "spec", "sunk"),
    [
        pytest.param(*shape, spec, sunk, marks=() if (place + number + sunk) % 3 == 0 else pytest.mark.deep)
        for place, shape in enumerate(SHAPES)
        for number, spec in enumerate(SPECS)
        for sunk in (False, True)
    ],
)
def test_scores_are_capped_hidden_and_sunk_as_in_float64(heads, kv_heads, head_dim, spec, sunk):
    spec = replace(spec, scale=head_dim**-0.5)
    sinks = torch.linspace(-2, 3, heads) if sunk else None
    for block_size in (1, 4, 16):
        rows, k_cache, v_cache, q_start, kv_len, table = ragged_case(
            [9, 40, 12, 1, 30, 2], [1, 13, 1, 1, 30, 2], heads, kv_heads, head_dim, block_size
        )
        q = torch.cat([row[0] for row in rows])
        out = here.backend().paged_attention(q, k_cache, v_cache, q_start, kv_len, table, spec, sinks)
        expected = [attend_in_float64(*row, spec, sinks) for row in rows]
        torch.testing.assert_close(out.double(), torch.cat(expected), atol=2e-6, rtol=2e-5)
        for (q, k, v), of_row in zip(rows, expected, strict=True):
            if len(q) == len(k):
                dense = DenseAttention()(0, q, k, v, spec, sinks)
                torch.testing.assert_close(dense.double(), of_row, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("spec", SPECS)
def test_what_all_windows_of_a_row_have_left_is_not_read(spec):
    lengths, counts = [9, 40, 12, 33], [1, 13, 1, 2]
    rows, k_cache, v_cache, q_start, kv_len, table = ragged_case(lengths, counts, 6, 2, 8, 4)
    q = torch.cat([row[0] for row in rows])
    before = here.backend().paged_attention(q, k_cache, v_cache, q_start, kv_len, table, spec)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        first = spec.window_start(length - count)
        for cache in (k_cache, v_cache):
            for position in range(first):
                cache[table[row, position // 4], position % 4] = math.nan
        table[row, : first // 4] = -1000
    assert (table == -1000).any() == (spec.window is not None)
    assert torch.equal(here.backend().paged_attention(q, k_cache, v_cache, q_start, kv_len, table, spec), before)


def through_blocks(q, k, v, spec, sinks=None):
    """Whole prompts `[T, heads, D]` by a cache in blocks of 4."""
    length, num_blocks = len(q), -(-len(q) // 4)
    caches = [torch.zeros(num_blocks, 4, k.shape[1], k.shape[2]) for _ in range(2)]
    here.backend().write_kv(*caches, k, v, torch.arange(length))
    bounds, table = torch.tensor([0, length], dtype=torch.int32), torch.arange(num_blocks, dtype=torch.int32)[None]
    return here.backend().paged_attention(q, *caches, bounds, bounds[1:], table, spec, sinks)


@pytest.mark.parametrize("window", [None, 1, 7, 40])
def test_softcap_and_window_are_those_of_gemma_2_in_transformers(window):
    from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(23, heads, 16, generator=generator) * 3 for heads in (6, 2, 2))
    sees = sliding_window_causal_mask_function(window) if window else causal_mask_function
    at = torch.arange(23)
    mask = torch.zeros(23, 23).masked_fill(~sees(0, 0, at[:, None], at), -math.inf)
    layer = SimpleNamespace(num_key_value_groups=3, training=False)
    of_heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    theirs, _ = eager_attention_forward(layer, *of_heads, mask, scaling=0.3, softcap=2.5)
    ours = through_blocks(q, k, v, AttentionSpec(0.3, softcap=2.5, window=window))
    torch.testing.assert_close(ours, theirs[0], atol=3e-6, rtol=1e-5)


def test_sinks_are_those_of_gpt_oss_in_transformers():
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(23, heads, 16, generator=generator) for heads in (6, 2, 2))
    sinks = torch.randn(6, generator=generator) * 3
    mask = torch.full((23, 23), -math.inf).triu(1)
    layer = SimpleNamespace(num_key_value_groups=3, training=False, sinks=sinks)
    theirs, _ = eager_attention_forward(layer, *(x.transpose(0, 1)[None] for x in (q, k, v)), mask, scaling=0.3)
    torch.testing.assert_close(through_blocks(q, k, v, AttentionSpec(0.3), sinks), theirs[0], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scale": 0.0}, "scale of attention"),
        ({"scale": math.nan}, "scale of attention"),
        ({"scale": 1.0, "softcap": -3.0}, "softcap of attention"),
        ({"scale": 1.0, "softcap": math.inf}, "softcap of attention"),
        ({"scale": 1.0, "window": 0}, "window of attention"),
        ({"scale": 1.0, "ahead": -1}, "ahead of attention"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        AttentionSpec(**fields)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_caches_lose_only_the_rounding_of_weights_and_result(dtype):
    if here.backend().why_not(dtype, 16):
        here.set_isa("torch")  # what a model in this dtype would be given
    rows, k_cache, v_cache, q_start, kv_len, table = ragged_case([50, 9, 30], [1, 9, 4], 6, 2, 16, 8, dtype)
    q = torch.cat([row[0] for row in rows])
    out = here.backend().paged_attention(q, k_cache, v_cache, q_start, kv_len, table, AttentionSpec(0.25))
    expected = torch.cat([attend_in_float64(*row, AttentionSpec(0.25)) for row in rows])
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
    again = here.backend().paged_attention(wide[:, :6], k_cache, v_cache, q_start, kv_len, table, AttentionSpec(0.3))
    assert again.is_contiguous()
    assert torch.equal(
        again, here.backend().paged_attention(q, k_cache, v_cache, q_start, kv_len, table, AttentionSpec(0.3))
    )


def test_writing_touches_the_named_slots_only():
    k_cache = torch.zeros(3, 4, 2, 5)
    v_cache = torch.zeros(3, 4, 2, 5)
    k, v = torch.randn(2, 2, 5), torch.randn(2, 2, 5)
    here.backend().write_kv(k_cache, v_cache, k, v, torch.tensor([9, 2]))
    assert torch.equal(k_cache[2, 1], k[0])
    assert torch.equal(v_cache[0, 2], v[1])
    assert k_cache.count_nonzero() == k.count_nonzero()
    assert v_cache.count_nonzero() == v.count_nonzero()
