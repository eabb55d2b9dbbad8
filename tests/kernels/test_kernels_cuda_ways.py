"""What the torch path computes differently on CUDA, computed that way on the CPU, against the references."""

from __future__ import annotations

import pytest
import torch
from pretend_cuda import pretend_cuda
from scattered_rows import BLOCK, COUNTS, HEADS, LENGTHS, drawn, step

from penstock.kernels import row_pieces
from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.cuda_attention import CudaAttention
from penstock.kernels.head_projection import project_heads
from penstock.kernels.norm import rms_norm_reference
from penstock.kernels.paged_attention import paged_attention_reference
from penstock.kernels.step_cache import StepCache


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 200, 1300])
@pytest.mark.parametrize("bias", [None, drawn(9, seed=2)])
def test_products_in_pieces_are_products(rows, bias):
    x, weight = drawn(rows, 40), drawn(9, 20, seed=1)
    for part in (x[:, :20], x[:, 20:].contiguous(), row_pieces.empty_with_room(x, (rows, 20)).copy_(x[:, :20])):
        expected = torch.nn.functional.linear(part, weight, bias)
        torch.testing.assert_close(row_pieces.linear_in_pieces(part, weight, bias), expected)


def test_only_pieces_with_the_same_bits_are_multiplied(monkeypatch):
    """A library that sums in another order with 64 and with 1,024 rows."""
    seen, multiply = [], torch.mm

    def sums_otherwise(x, y, out):
        seen.append((*x.shape, x.stride()))
        torch.add(multiply(x, y), 1 if len(x) in (64, 1024) else 0, out=out)

    row_pieces._sizes.cache_clear()
    monkeypatch.setattr(torch, "mm", sums_otherwise)
    weight = drawn(9, 32)
    row_pieces.linear_in_pieces(drawn(1, 32), weight)
    assert {size for size, *_ in seen} == {64, 128, 256, 1024}, "all are tried once"
    seen.clear()
    for rows in (1, 64, 129, 300, 2000):
        row_pieces.linear_in_pieces(drawn(rows, 40)[:, 8:], weight)
    assert set(seen) == {(size, 32, (32, 1)) for size in (128, 256)}
    row_pieces._sizes.cache_clear()


def test_what_is_tried_lies_where_tensors_lie(monkeypatch):
    tried = []

    def alike(x, weight, bias, out_dtype, *, adds):
        tried.extend([x, weight, bias])
        return (256,)

    monkeypatch.setattr(row_pieces, "alike_sizes", alike)
    row_pieces._sizes.cache_clear()
    row_pieces.linear_in_pieces(drawn(3, 32), drawn(9, 32), drawn(9))
    row_pieces._sizes.cache_clear()
    assert [tuple(each.shape) for each in tried] == [(1024, 32), (9, 32), (9,)]
    assert {each.storage_offset() for each in tried} == {0}, "a kernel is chosen by alignment too"
    assert not torch.equal(tried[0][:9], tried[1])


@pytest.mark.parametrize("sizes", [(256,), (64, 256), (64, 128, 256, 1024)])
def test_rows_are_cut_into_few_pieces(sizes):
    for rows in (1, 64, 65, 128, 129, 256, 257, 1000, 1024, 1100, 5000):
        cut = row_pieces._cut(rows, sizes)
        assert set(cut) <= set(sizes)
        assert 0 <= sum(cut) - rows < 256, "less than a standard piece is in vain"
        assert len(cut) <= 1 + rows / 256
    assert row_pieces._cut(2048, (64, 128, 256, 1024)) == [1024, 1024]
    assert row_pieces._cut(0, sizes) == []


def test_padding_takes_no_copy_where_there_is_room():
    made = row_pieces.empty_with_room(drawn(1), (3, 5))
    assert row_pieces.filled_up(made, 256).data_ptr() == made.data_ptr()
    whole = drawn(3, 5)
    padded = row_pieces.filled_up(whole, 64)
    assert padded.shape == (64, 5)
    assert torch.equal(padded[:3], whole)


@pytest.mark.parametrize("rows", [3, 256, 300])
@pytest.mark.parametrize("bias", [None, drawn(9, seed=2)])
def test_a_residual_is_added_where_it_lies_if_all_of_its_memory_is_its_own(rows, bias):
    x, weight, before = drawn(rows, 20), drawn(9, 20, seed=1), drawn(rows, 9, seed=3)
    expected = before + torch.nn.functional.linear(x, weight, bias)
    residual = row_pieces.empty_with_room(x, (rows, 9)).copy_(before)
    made = row_pieces.linear_in_pieces(x, weight, bias, residual=residual)
    torch.testing.assert_close(made, expected)
    assert (made.data_ptr() == residual.data_ptr()) == (bias is None)
    others = torch.cat((before, drawn(1000, 9, seed=4)))
    kept = others.clone()
    torch.testing.assert_close(row_pieces.linear_in_pieces(x, weight, bias, residual=others[:rows]), expected)
    assert torch.equal(others, kept), "rows that are somebody else's"


def test_no_rows_make_no_products():
    x, weight = drawn(0, 20), drawn(9, 20)
    assert row_pieces.linear_in_pieces(x, weight).shape == (0, 9)
    assert row_pieces.linear_in_pieces(x, weight, residual=drawn(0, 9)).shape == (0, 9)


def test_norms_and_head_projections_are_those_of_the_cpu():
    x, weight, of_heads = drawn(70, 24), drawn(24, seed=1), drawn(3, 5, 6, seed=2)
    with pretend_cuda() as device:
        there = rms_norm_reference(x.to(device), weight.to(device), 1e-5).cpu()
        projected = project_heads(None, x.to(device), of_heads.to(device), 2).cpu()
    torch.testing.assert_close(there, rms_norm_reference(x, weight, 1e-5))
    torch.testing.assert_close(projected, project_heads(None, x, of_heads, 2))


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
        torch.testing.assert_close(attend(*given, spec), paged_attention_reference(*given, spec))


def test_what_layers_have_in_common_is_made_once_a_step():
    cache, made, step_one = StepCache(), [], torch.zeros(2, 3)
    for table, key in [(step_one, "a"), (step_one, "a"), (step_one, "b"), (step_one.clone(), "a"), (step_one, "a")]:
        assert cache.get(table, key, lambda: made.append(0) or len(made)) == len(made)
    assert len(made) == 4, "the second layer of the first step found what the first had made"
