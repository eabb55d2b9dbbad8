"""The block forms: the gguf package's numbers bit for bit, their products, and rows alone as in company."""

from __future__ import annotations

from dataclasses import replace

import compiled_kernels as here
import numpy as np
import pytest
import torch
from block_samples import KINDS, numbers, random_blocks, unit

from needs import COMPILED
from penstock.kernels import native
from penstock.kernels.packed_linear import PackedKind, PackedWeight, packed_linear_reference, unpack
from penstock.kernels.packed_parts import pack_parts
from penstock.kernels.packed_stack import pack_stack
from penstock.weights.gguf_blocks import block_parts
from penstock.weights.integer_blocks import INTEGER_BLOCKS, integer_parts
from penstock.weights.packing import pack_blocks
from penstock.weights.source import StoredBlocks

linear, packed_gated_linear, embedding_rows = here.linear, here.packed_gated_linear, here.embedding_rows

FORMS = ("Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4", "IQ4_XS", "IQ2_S")
FORMS += ("INT4", "INT4_128")
"""A kind of blocks for each form, and the two that Q5 holds."""

CASES = [pytest.param(kind, marks=pytest.mark.deep) if kind == "INT4" else kind for kind in FORMS]
"""INT4_128 stands for both forms of integers about a zero point in make test."""


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(kind, outputs, inputs, seed=1):
    blocks = random_blocks(kind, outputs, inputs, seed)
    return pack_blocks(StoredBlocks(kind, torch.from_numpy(blocks)), outputs, inputs)


def tolerance(x, weight):
    """Of float32 sums in some order. A minimum may undo most of what codes add up to: so of theirs, not of numbers."""
    largest = unpack(weight).double().abs().amax(dim=1)
    return 2e-5 * x.double().abs().sum(dim=1, keepdim=True) * largest + 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_keep_the_gguf_packages_numbers_bit_for_bit(isa, kind):
    for outputs, inputs in ((5, 256), (37, 768)):
        blocks = random_blocks(kind, outputs, inputs)
        weight = pack_blocks(StoredBlocks(kind, torch.from_numpy(blocks)), outputs, inputs)
        want = torch.from_numpy(numbers(kind, blocks))
        assert torch.equal(unpack(weight), want)
        ids = torch.tensor([outputs - 1, 0, outputs // 2, 0])
        assert torch.equal(embedding_rows(ids, weight), want[ids])
        assert torch.equal(embedding_rows(ids, weight, torch.bfloat16), want[ids].bfloat16())


@pytest.mark.parametrize("kind", ["INT4", "INT4_128"])
def test_integers_about_a_zero_point_are_kept_exactly(isa, kind):
    for outputs, inputs in ((5, 256), (37, 768)):
        blocks = random_blocks(kind, outputs, inputs)
        weight = pack_blocks(StoredBlocks(kind, torch.from_numpy(blocks)), outputs, inputs)
        flat = blocks.reshape(outputs * inputs // unit(kind), -1)
        codes = np.stack((flat[:, 3:] & 15, flat[:, 3:] >> 4), axis=2).reshape(len(flat), -1).astype(np.float64)
        want = (codes - flat[:, 2:3]) * flat[:, :2].copy().view(np.float16).astype(np.float64)
        want = torch.from_numpy(want.astype(np.float32)).view(outputs, inputs)
        assert torch.equal(unpack(weight), want)
        ids = torch.tensor([outputs - 1, 0, outputs // 2, 0])
        assert torch.equal(embedding_rows(ids, weight), want[ids])


@pytest.mark.parametrize("kind", CASES)
def test_the_compiled_packing_is_the_one_in_torch(kind, monkeypatch):
    ours = packed(kind, 37, 512)
    monkeypatch.setattr(native, "module", None)
    assert torch.equal(packed(kind, 37, 512).data, ours.data)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", CASES)
def test_the_product_is_the_reference_up_to_float32_rounding(isa, kind):
    for outputs, inputs in ((1, 256), (17, 512), (70, 768)):
        weight = packed(kind, outputs, inputs)
        for rows in (1, 2, 3, 5, 7, 8, 14) if outputs > 1 else (1, 9):
            x, bias, residual = random(rows, inputs, seed=rows), random(outputs, seed=2), random(rows, outputs, seed=3)
            for arguments in ({}, {"bias": bias, "residual": residual}):
                ours, theirs = linear(x, weight, **arguments), packed_linear_reference(x, weight, **arguments)
                assert ((ours - theirs).double().abs() <= tolerance(x, weight) + 1e-6).all(), (outputs, inputs, rows)


@pytest.mark.parametrize("kind", CASES)
def test_a_rows_bits_depend_on_nothing_but_the_row(compiled, kind):
    for outputs, inputs in ((1, 256), (50, 512)):
        weight, x = packed(kind, outputs, inputs), random(40, inputs).bfloat16()
        x[::3, 40] = 100  # groups with 16 bits among the others
        here.set_threads(1)
        alone = torch.cat([linear(row[None], weight) for row in x])
        for threads in (1, 2, 3):
            here.set_threads(threads)
            for count in range(1, 20):
                assert torch.equal(linear(x[:count], weight), alone[:count]), (outputs, inputs, threads, count)
            order = torch.randperm(40, generator=torch.Generator().manual_seed(threads))
            assert torch.equal(linear(x[order], weight), alone[order])


@pytest.mark.parametrize("kind", CASES)
def test_groups_with_outliers_have_16_bits(isa, kind):
    weight = packed(kind, 33, 1024)
    x = random(5, 1024)
    x[::2, 40], x[1::2, 1021] = 100, -300
    largest = x.unflatten(1, (-1, 32)).abs().amax(dim=2)  # [T, G]
    fine = largest.square() > 8 * largest.square().mean(dim=1, keepdim=True)
    assert fine.any()
    assert not fine.all()
    exact = unpack(weight).double()
    sums = exact.abs().unflatten(1, (-1, 32)).sum(dim=2)  # [N, G]
    steps = largest.double() / torch.where(fine, 32512, 127)
    bound = steps / 2 @ sums.T + tolerance(x, weight)
    assert ((linear(x, weight).double() - x.double() @ exact.T).abs() <= bound).all()


@pytest.mark.parametrize("rows", [1, 5, 14])
@pytest.mark.parametrize("kind", CASES)
def test_a_gated_product_is_that_of_its_halves(compiled, kind, rows):
    for half in (16, 48):
        weight, x, bias = packed(kind, 2 * half, 256), random(rows, 256), random(2 * half, seed=5)
        halves = linear(x, weight, bias)
        assert torch.equal(packed_gated_linear(x, weight, bias), here.silu_and_mul(halves))


@pytest.mark.parametrize("kind", CASES)
def test_the_largest_codes_and_activations_do_not_overflow(isa, kind):
    """Every code the same, the lowest or the highest, beside activations that fill their bytes."""
    blocks = torch.from_numpy(random_blocks(kind, 3, 512))
    flat = blocks.view(3 * 512 // unit(kind), -1)
    parts = integer_parts(flat) if kind in INTEGER_BLOCKS else block_parts(flat, kind)
    form = PackedKind[pack_blocks(StoredBlocks(kind, blocks), 3, 512).form.upper()]
    most = 15 if parts.values is not None else int(parts.codes.max())
    x = torch.ones(2, 512)
    x[1] = -1
    x[:, :32] *= 1000 * (1 + torch.arange(32) / 256)  # 16 bits: low bytes of all kinds
    for code in (0, most):
        weight = pack_parts(form, [replace(parts, codes=torch.full_like(parts.codes, code))], 3, 512)
        theirs = packed_linear_reference(x.double().float(), weight)
        assert ((linear(x, weight) - theirs).double().abs() <= tolerance(x, weight)).all()


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
@pytest.mark.parametrize("kind", CASES)
def test_what_is_not_finite_stays_in_its_row(compiled, kind, bad):
    weight, x = packed(kind, 33, 256), random(9, 256)
    good = linear(x, weight)
    x[4, 40] = bad
    out = linear(x, weight)
    others = [row for row in range(9) if row != 4]
    assert not torch.isfinite(out[4]).any()
    assert torch.equal(out[others], good[others])


@pytest.mark.parametrize("kind", CASES)
def test_a_stack_of_experts_is_packed_expert_by_expert(kind):
    blocks = [StoredBlocks(kind, torch.from_numpy(random_blocks(kind, 20, 512, seed))) for seed in range(3)]
    stack = pack_stack(3, lambda expert, memory: pack_blocks(blocks[expert], 20, 512, memory))
    for expert, each in enumerate(blocks):
        assert torch.equal(stack[expert].data, pack_blocks(each, 20, 512).data)


def test_forms_are_as_large_as_they_are_said_to_be():
    bits = {kind: packed(kind, 64, 4096).nbytes * 8 / (64 * 4096) for kind in FORMS}
    line = 64 * 8 / (16 * 4096)  # of the table of each panel
    assert bits == {
        "Q5_0": 6,
        "Q5_1": 6,
        "Q2_K": 3.125,
        "Q3_K": 3.625,
        "Q4_K": 4.625,
        "Q5_K": 5.625,
        "Q6_K": 6.625,
        "IQ4_NL": 4.5 + line,
        "MXFP4": 4.25 + line,
        "IQ4_XS": 4.375 + line,
        "IQ2_S": 4.625 + line,
        "INT4": 4.75,
        "INT4_128": 4.25,
    }


@pytest.mark.parametrize("kind", ["Q5_0", "Q4_K"])
def test_blocks_that_do_not_fill_the_shape_are_refused(isa, kind):
    blocks = StoredBlocks(kind, torch.from_numpy(random_blocks(kind, 20, 512)))
    with pytest.raises(ValueError, match="blocks of 20 rows, not of 21"):
        pack_blocks(blocks, 21, 512)
    with pytest.raises(ValueError, match="in units of"):
        pack_blocks(blocks, 20, 500)


def test_a_q5_0_scale_whose_minimum_does_not_exist_is_refused(isa):
    blocks = random_blocks("Q5_0", 2, 64)
    for scale in (4096.0, np.inf, np.nan):
        blocks[1, :2] = np.array([scale], dtype=np.float16).view(np.uint8)
        with pytest.raises(ValueError, match="scale is not a number below 4096"):
            pack_blocks(StoredBlocks("Q5_0", torch.from_numpy(blocks)), 2, 64)


@pytest.mark.skipif(not native.available(), reason=COMPILED)
def test_inputs_must_be_whole_units():
    with pytest.raises(ValueError, match="whole units"):
        PackedWeight(PackedKind.Q4K, 16, 300, torch.zeros(4096, dtype=torch.uint8))
