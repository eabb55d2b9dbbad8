"""What the torch path computes in another way on CUDA, computed in that way on the CPU, beside the references."""

from __future__ import annotations

import pytest
import torch
from pretend_cuda import pretend_cuda

from penstock.kernels import row_pieces
from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.cuda_attention import CudaAttention
from penstock.kernels.head_projection import project_heads
from penstock.kernels.norm import rms_norm_reference
from penstock.kernels.paged_attention import paged_attention_reference

BLOCK, HEADS, KV_HEADS = 4, 6, 2
LENGTHS, COUNTS = [1, 9, 23, 12, 17, 30], [1, 1, 5, 12, 1, 2]


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("bias", [None, drawn(9, seed=2)])
def test_products_in_pieces_are_products(rows, bias):
    x, weight = drawn(rows, 40), drawn(9, 20, seed=1)
    for part in (x[:, :20], x[:, 20:].contiguous()):
        expected = torch.nn.functional.linear(part, weight, bias)
        torch.testing.assert_close(row_pieces.linear_in_pieces(part, weight, bias), expected)


def test_every_product_has_the_same_shape(monkeypatch):
    seen = []
    multiply = torch.mm
    monkeypatch.setattr(torch, "mm", lambda x, y, out: seen.append((*x.shape, x.stride())) or multiply(x, y, out=out))
    for rows in (1, 64, 70, 300):
        row_pieces.linear_in_pieces(drawn(rows, 40)[:, 8:], drawn(9, 32))
    assert set(seen) == {(64, 32, (32, 1))}


def test_no_rows_make_no_products():
    assert row_pieces.linear_in_pieces(drawn(0, 20), drawn(9, 20)).shape == (0, 9)


def test_norms_and_head_projections_are_those_of_the_cpu():
    x, weight, of_heads = drawn(70, 24), drawn(24, seed=1), drawn(3, 5, 6, seed=2)
    with pretend_cuda() as device:
        there = rms_norm_reference(x.to(device), weight.to(device), 1e-5).cpu()
        projected = project_heads(None, x.to(device), of_heads.to(device), 2).cpu()
    torch.testing.assert_close(there, rms_norm_reference(x, weight, 1e-5))
    torch.testing.assert_close(projected, project_heads(None, x, of_heads, 2))


def step(rows, width, value_width):
    """The arguments of attention for `rows`; what they may not look at is NaN, or a block that is not there."""
    blocks = [-(-length // BLOCK) for length in LENGTHS]
    order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(3)).tolist()
    tables = [order[sum(blocks[:at]) : sum(blocks[: at + 1])] for at in range(len(blocks))]
    k = drawn(len(order), BLOCK, KV_HEADS, width, seed=1)
    v = drawn(len(order), BLOCK, KV_HEADS, value_width, seed=2)
    for table, length in zip(tables, LENGTHS, strict=True):
        for cache in (k, v):
            cache[table[-1], (length - 1) % BLOCK + 1 :] = float("nan")
    q = torch.cat([drawn(COUNTS[row], HEADS, width, seed=10 + row) for row in rows])
    bounds = torch.tensor([0, *(COUNTS[row] for row in rows)]).cumsum(0).int()
    wide = max(len(tables[row]) for row in rows)
    table = torch.tensor([tables[row] + [0] * (wide - len(tables[row])) for row in rows]).int()
    return q, k, v, bounds, torch.tensor([LENGTHS[row] for row in rows]).int(), table


@pytest.mark.parametrize("rows", [[0], [0, 1, 4], [2], range(6), [5, 1]])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(0.3),
        AttentionSpec(0.3, window=5),
        AttentionSpec(0.3, softcap=4.0),
        AttentionSpec(0.3, ahead=None),
        AttentionSpec(0.3, window=6, ahead=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("widths", [(16, 16), (10, 7)])
def test_attention_is_that_of_the_reference(rows, with_sinks, spec, widths):
    given = step(list(rows), *widths)
    sinks = drawn(HEADS, seed=5) if with_sinks else None
    torch.testing.assert_close(CudaAttention()(*given, spec, sinks), paged_attention_reference(*given, spec, sinks))


def test_blocks_that_windows_have_left_may_not_be_there():
    q, k, v, bounds, lengths, table = step(list(range(6)), 16, 16)
    spec, gone = AttentionSpec(0.3, window=5), table.clone()
    expected = paged_attention_reference(q, k, v, bounds, lengths, table, spec)
    for row, (length, count) in enumerate(zip(LENGTHS, COUNTS, strict=True)):
        gone[row, : spec.window_start(length - count) // BLOCK] = 1 << 30
    torch.testing.assert_close(CudaAttention()(q, k, v, bounds, lengths, gone, spec), expected)


def test_a_step_is_known_by_its_block_table():
    attend, spec = CudaAttention(), AttentionSpec(0.3)
    for rows in ([0, 1], [2], [1, 4]):
        given = step(rows, 16, 16)
        torch.testing.assert_close(attend(*given, spec), paged_attention_reference(*given, spec))
        groups = attend.groups
        attend(*given, spec)
        assert attend.groups is groups
