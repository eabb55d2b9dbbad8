"""Packed linear: against float64 and the gguf package, and bit for bit against itself in other company."""

from __future__ import annotations

import itertools
import math
import threading
from functools import partial

import compiled_kernels as here
import gguf
import numpy as np
import pytest
import torch
from fp8_samples import fp8_rows, quantize_fp8
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from needs import COMPILED
from penstock.kernels import native, packed_layout
from penstock.kernels.packed_linear import ELEMENTS, packed_linear_reference
from penstock.kernels.packed_weight import (
    PackedKind,
    pack_bf16,
    pack_f32,
    pack_fp8,
    pack_q4_0,
    pack_q4_1,
    pack_q8_0,
    quantize_int4,
    quantize_int8,
    unpack,
)
from penstock.kernels.scratch import Scratch
from penstock.kernels.weight_memory import WeightMemory

linear, packed_gated_linear, embedding_rows = here.linear, here.packed_gated_linear, here.embedding_rows

SHAPES = [(1, 1), (15, 16), (16, 15), (17, 17), (63, 63), (33, 32), (130, 576), (20, 1536)]
ROWS = [1, 2, 3, 5, 8, 14, 70]
GGUF = {
    "Q4_0": (gguf.GGMLQuantizationType.Q4_0, pack_q4_0, 2),
    "Q4_1": (gguf.GGMLQuantizationType.Q4_1, pack_q4_1, 4),
    "Q8_0": (gguf.GGMLQuantizationType.Q8_0, pack_q8_0, 2),
}


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gguf_blocks(kind, outputs, inputs, seed=0):
    weight = random(outputs, inputs, seed=seed).numpy()
    return torch.from_numpy(gguf.quants.quantize(weight, GGUF[kind][0])).flatten()


def pack_gguf(kind):
    return lambda weight: GGUF[kind][1](gguf_blocks(kind, len(weight), weight.shape[1]), *weight.shape)


MAKERS = {
    "f32": pack_f32,
    "bf16": pack_bf16,
    "int8": quantize_int8,
    "int4": quantize_int4,
    "fp8": quantize_fp8,
    "Q4_0": pack_gguf("Q4_0"),
    "Q4_1": pack_gguf("Q4_1"),
    "Q8_0": pack_gguf("Q8_0"),
}


GATES = {
    "silu_and_mul": lambda x: x / (1 + (-x).exp()),
    "gelu_new_and_mul": lambda x: x / 2 * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh()),
    "gelu_and_mul": lambda x: x / 2 * (1 + (x * math.sqrt(0.5)).erf()),
}
"""What the gates go through, written out."""


def packed(maker, outputs, inputs):
    if maker.startswith("Q"):
        inputs = -(-inputs // 32) * 32  # GGUF has whole blocks only
    return MAKERS[maker](random(outputs, inputs, seed=1))


def tolerance(x, weight):
    """For float32 sums in some order: a few rounding errors of the sum of magnitudes."""
    return 4e-6 * (x.double().abs() @ unpack(weight).double().abs().T) + 1e-7


@pytest.mark.parametrize(
    "maker", [pytest.param(maker, marks=pytest.mark.deep) if maker == "fp8" else maker for maker in MAKERS]
)
def test_the_product_is_the_reference_up_to_float32_rounding(isa, maker):
    for outputs, inputs in SHAPES:
        weight = packed(maker, outputs, inputs)
        for rows in ROWS if outputs < 100 else ROWS[:4]:
            x = random(rows, weight.inputs, seed=rows)
            bias, residual = random(outputs, seed=2), random(rows, outputs, seed=3)
            for arguments in ({}, {"bias": bias}, {"residual": residual}, {"bias": bias, "residual": residual}):
                ours, theirs = linear(x, weight, **arguments), packed_linear_reference(x, weight, **arguments)
                assert ((ours - theirs).double().abs() <= tolerance(x, weight) + 1e-6).all(), (outputs, inputs, rows)


@pytest.mark.parametrize("maker", ["bf16", "f32", "int8", "Q4_1"])
def test_a_product_may_take_the_place_of_its_residual(compiled, maker):
    """As in a program, where a projection adds to the stream: no row may be added twice, whatever the tiles."""
    weight, module, scratch = packed(maker, 33, 64), native.required(), Scratch()
    for rows in (5, 17, 21, 33, 49, 70):
        x, stream = random(rows, weight.inputs), random(rows, 33, seed=3)
        apart = linear(x, weight, residual=stream)
        place = module.Rows(stream.data_ptr(), stream.stride(0), ELEMENTS[stream.dtype])
        here.cpu().linear(
            rows=rows,
            weight=weight.native,
            x=module.Rows(x.data_ptr(), x.stride(0), ELEMENTS[x.dtype]),
            bias=None,
            residual=place,
            out=place,
            gate=None,
            scratch=module.Memory(scratch.address_of(rows * weight.scratch_bytes), rows * weight.scratch_bytes),
        )
        assert torch.equal(stream, apart), rows


def test_bfloat16_weights_give_the_product_of_rounded_numbers(isa):
    for outputs, inputs in SHAPES:
        numbers, x = random(outputs, inputs, seed=1), random(5, inputs)
        exact = x.bfloat16().double() @ numbers.bfloat16().double().T
        weight = pack_bf16(numbers)
        assert ((linear(x, weight).double() - exact).abs() <= tolerance(x, weight)).all()
        assert torch.equal(linear(x, weight), linear(x.bfloat16(), weight, out_dtype=torch.float32))


def every_code(scales):
    """Rows `[len(scales), 254]` that hold each code but NaN, and what torch takes them for."""
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    rows = torch.cat(
        (scales[:, None].expand(-1, 2).contiguous().view(torch.uint8), codes.expand(len(scales), -1)), dim=1
    )
    return rows, codes.view(torch.float8_e4m3fn).float() * scales[:, None]


def test_every_code_of_fp8_is_the_number_that_torch_takes_it_for(isa):
    scales = random(19, seed=4).abs() * torch.logspace(-30, 30, 19)
    rows, numbers = every_code(scales)
    weight = pack_fp8(rows, 19, 254)
    assert torch.equal(unpack(weight), numbers)
    assert torch.equal(embedding_rows(torch.arange(19), weight), numbers)
    assert torch.equal(linear(torch.eye(254), weight), numbers.T), "each input by itself: no sum, and one rounding"


def test_a_scale_of_fp8_is_that_of_128_inputs(isa):
    """In every shape of tile: up to 21 rows."""
    numbers, x = random(33, 300, seed=1), random(21, 300)
    rows = fp8_rows(numbers)
    scales, codes = rows[:, :12].contiguous().view(torch.float32), rows[:, 12:].contiguous()
    exact = (
        x.bfloat16().double()
        @ (codes.view(torch.float8_e4m3fn).double() * scales.double().repeat_interleave(128, dim=1)[:, :300]).T
    )
    weight = pack_fp8(rows, 33, 300)
    for rows in (1, 2, 3, 5, 8, 14, 21):
        out = linear(x[:rows], weight)
        assert ((out.double() - exact[:rows]).abs() <= tolerance(x[:rows], weight)).all()
        assert torch.equal(out, linear(x[:rows].bfloat16(), weight, out_dtype=torch.float32))


def test_rows_of_fp8_that_do_not_fill_the_shape_are_refused(isa):
    rows = fp8_rows(random(4, 200))
    for wrong in (rows[:, :-1], rows[:3], rows.view(torch.int8), rows.repeat(2, 1)[::2]):
        with pytest.raises(ValueError, match="4 x 200 in FP8 is 832 contiguous bytes"):
            pack_fp8(wrong, 4, 200)


def test_float32_weights_give_the_product_of_the_numbers_themselves(isa):
    for outputs, inputs in SHAPES:
        numbers, x = random(outputs, inputs, seed=1), random(5, inputs)
        weight = pack_f32(numbers)
        assert torch.equal(unpack(weight), numbers)
        exact = x.double().numpy() @ numbers.double().numpy().T
        assert (np.abs(linear(x, weight).numpy() - exact) <= tolerance(x, weight).numpy()).all()
        narrow = x.bfloat16()
        assert torch.equal(linear(narrow, weight, out_dtype=torch.float32), linear(narrow.float(), weight))


def test_float32_is_packed_from_any_rows_of_numbers():
    wide = random(20, 50)
    for numbers in (wide[:, 7:40], wide.T, wide.bfloat16()):
        assert torch.equal(unpack(pack_f32(numbers)), numbers.float())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.tuples(st.integers(1, 150), st.integers(1, 90), st.integers(1, 40)),
    threads=st.integers(1, 3),
    adds=st.tuples(st.booleans(), st.booleans()),
    gate=st.sampled_from([None, *GATES]),
)
def test_float32_in_any_shape_is_near_float64_and_a_row_is_what_it_is_alone(compiled, sizes, threads, adds, gate):
    outputs, inputs, rows = sizes
    outputs = -(-outputs // 32) * 32 if gate else outputs
    weight, x = pack_f32(random(outputs, inputs, seed=1)), random(rows, inputs)
    bias = random(outputs, seed=2) if adds[0] else None
    residual = random(rows, outputs, seed=3) if adds[1] and not gate else None
    exact = x.double().numpy() @ unpack(weight).double().numpy().T
    exact += 0 if bias is None else bias.double().numpy()
    exact += 0 if residual is None else residual.double().numpy()
    here.set_threads(threads)
    product = partial(packed_gated_linear, bias=bias, activation=gate) if gate else partial(linear, bias=bias)
    others = [{} if residual is None else {"residual": residual[row : row + 1]} for row in range(rows)]
    out = product(x, weight, **({} if residual is None else {"residual": residual}))
    alone = [product(x[row : row + 1], weight, **other) for row, other in enumerate(others)]
    assert torch.equal(out, torch.cat(alone))
    bound = tolerance(x, weight).numpy() + 1e-6
    if gate:
        gates, ups = np.split(exact, 2, axis=1)
        exact = GATES[gate](torch.from_numpy(gates)).numpy() * ups
        below, above = np.split(bound, 2, axis=1)
        bound = 1.2 * np.abs(ups) * below + (np.abs(gates) + below) * above + 4e-6 * np.abs(exact)
    assert (np.abs(out.numpy() - exact) <= bound).all()


@pytest.mark.parametrize("maker", ["int8", "int4", "Q4_0", "Q4_1", "Q8_0"])
def test_quantised_activations_are_off_by_half_a_step_at_most(isa, maker):
    for outputs, inputs in ((17, 17), (40, 576)):
        weight = packed(maker, outputs, inputs)
        x, numbers = random(7, weight.inputs), unpack(weight).double()
        share = 16 if weight.kind is PackedKind.Q8 else 32
        largest = torch.stack([part.abs().amax(dim=1) for part in x.split(share, dim=1)], dim=1)  # [T, shares]
        sums = torch.stack([part.abs().sum(dim=1) for part in numbers.split(share, dim=1)], dim=1)  # [N, shares]
        bound = (largest.double() / 254) @ sums.T + tolerance(x, weight)
        assert ((linear(x, weight).double() - x.double() @ numbers.T).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("maker", MAKERS)
def test_the_sum_with_bias_and_residual_is_rounded_once_to_any_dtype(isa, maker, dtype):
    weight = packed(maker, 37, 64)
    x, bias, residual = random(6, 64, dtype=dtype), random(37, seed=2, dtype=dtype), random(6, 37, seed=3, dtype=dtype)
    wide = linear(x, weight, bias, residual, torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(wide, (linear(x, weight, out_dtype=torch.float32) + bias.float()) + residual.float())
    assert torch.equal(linear(x, weight, bias, residual, torch.bfloat16), wide.bfloat16())
    assert linear(x, weight).dtype == dtype


@pytest.mark.parametrize("maker", MAKERS)
def test_a_rows_bits_depend_on_nothing_but_the_row(compiled, maker):
    for outputs, inputs in ((1, 63), (50, 200), (600, 64)):
        weight = packed(maker, outputs, inputs)
        x = random(70, weight.inputs).bfloat16()
        here.set_threads(1)
        alone = torch.cat([linear(row[None], weight) for row in x])
        for threads in (1, 2, 3):
            here.set_threads(threads)
            for count in range(1, 20):
                assert torch.equal(linear(x[:count], weight), alone[:count]), (outputs, inputs, threads, count)
            order = torch.randperm(70, generator=torch.Generator().manual_seed(threads))
            assert torch.equal(linear(x[order], weight), alone[order])
            assert torch.equal(linear(x[3:], weight), alone[3:])


@pytest.mark.parametrize("maker", MAKERS)
def test_strided_rows_are_read_where_they_lie(isa, maker):
    weight = packed(maker, 33, 96)
    wide, others = random(9, 300), random(9, 100, seed=2)
    x, residual = wide[:, 7 : 7 + weight.inputs], others[:, 5:38]
    assert torch.equal(linear(x, weight, None, residual), linear(x.contiguous(), weight, None, residual.contiguous()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("maker", MAKERS)
def test_what_is_not_finite_stays_in_its_row(isa, maker, bad):
    weight = packed(maker, 33, 96)
    x = random(9, weight.inputs)
    good = linear(x, weight)
    x[4, 40] = bad
    out = linear(x, weight)
    assert not torch.isfinite(out[4]).any()
    others = [row for row in range(9) if row != 4]
    if isa == "torch":
        torch.testing.assert_close(out[others], good[others])
    else:
        assert torch.equal(out[others], good[others])


@pytest.mark.parametrize("maker", MAKERS)
def test_rows_of_zeros_and_of_vanishing_numbers_give_the_bias(isa, maker):
    weight = packed(maker, 18, 64)
    bias = random(18)
    for x in (torch.zeros(2, 64), torch.full((2, 64), 1e-40)):
        torch.testing.assert_close(linear(x, weight, bias), bias.expand(2, -1), rtol=0, atol=1e-37)


def with_outliers(rows, inputs):
    """Rows with a channel far above all others, as the hidden states of language models have."""
    x = random(rows, inputs)
    x[::2, 40] = 100
    x[1::2, inputs - 3] = -300
    return x


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("maker", [maker for maker in MAKERS if maker not in ("bf16", "f32", "fp8")])
def test_groups_with_outliers_have_16_bits(isa, maker, rows):
    for outputs, inputs in ((17, 320), (40, 576), (33, 2080)):
        weight = packed(maker, outputs, inputs)
        x, numbers = with_outliers(rows, weight.inputs), unpack(weight).double()
        largest = torch.stack([part.abs().amax(dim=1) for part in x.split(32, dim=1)], dim=1)  # [T, G]
        fine = largest.square() > 8 * largest.square().mean(dim=1, keepdim=True)
        assert fine.any()
        assert not fine.all()
        sums = torch.stack([part.abs().sum(dim=1) for part in numbers.split(32, dim=1)], dim=1)  # [N, G]
        steps = largest.double() / torch.where(fine, 32512, 127)
        out = linear(x, weight)
        assert ((out.double() - x.double() @ numbers.T).abs() <= steps / 2 @ sums.T + tolerance(x, weight)).all()
        if isa != "torch":
            assert torch.equal(out, torch.cat([linear(x[row : row + 1], weight) for row in range(rows)]))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("rows", [1, 2, 5, 7, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("maker", MAKERS)
def test_a_gated_product_is_that_of_its_halves(compiled, maker, gate, dtype, rows):
    for half in (16, 48, 112):
        weight = packed(maker, 2 * half, 64)
        x, bias = random(rows, 64, dtype=dtype), random(2 * half, seed=5)
        halves = linear(x, weight, bias, out_dtype=torch.float32)
        gates, ups = halves.double().chunk(2, dim=1)
        out = packed_gated_linear(x, weight, bias, gate)
        assert out.dtype == dtype
        rounding = 2e-6 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(out.double(), GATES[gate](gates) * ups, rtol=rounding, atol=1e-6)
        if dtype == torch.float32:  # instructions that round to bfloat16 take its subnormals for 0
            assert torch.equal(out, getattr(here, gate)(halves)), "not the bits of the activation by itself"
        alone = torch.cat([packed_gated_linear(x[row : row + 1], weight, bias, gate) for row in range(rows)])
        assert torch.equal(out, alone)


def test_a_gated_product_wants_whole_panels(compiled):
    weight = pack_bf16(random(48, 16))
    with pytest.raises(ValueError, match="multiple of 32"):
        packed_gated_linear(random(1, 16), weight)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_sums_do_not_overflow(compiled, sign):
    x = torch.full((2, 65536), sign)
    for numbers in (torch.ones(3, 65536), -torch.ones(3, 65536)):
        expected = (numbers.sum(dim=1) * sign).expand(2, -1)
        assert torch.equal(linear(x, pack_bf16(numbers)), expected)
        assert torch.equal(linear(x, pack_f32(numbers)), expected)
        torch.testing.assert_close(linear(x, quantize_int8(numbers)), expected, rtol=1e-3, atol=0)  # fp16 scales
    x = torch.full((2, 64), sign)
    blocks = torch.full((3 * 2, 34), 0xFF, dtype=torch.uint8)
    blocks[:, :2] = blocks[:, 2:4] = torch.tensor([1.0], dtype=torch.float16).view(torch.uint8)
    highest = pack_q4_1(torch.cat((blocks[:, :4], blocks[:, 4:20]), dim=1).flatten(), 3, 64)  # 15 * 1 + 1
    torch.testing.assert_close(linear(x, highest), torch.full((2, 3), sign * 64 * 16), rtol=1e-6, atol=0)
    blocks[:, 2:] = 0x80
    torch.testing.assert_close(
        linear(x, pack_q8_0(blocks.flatten(), 3, 64)), torch.full((2, 3), sign * 64 * -128), rtol=1e-6, atol=0
    )


def test_no_rows_give_no_rows(isa):
    assert linear(torch.empty(0, 32), pack_bf16(random(5, 32))).shape == (0, 5)
    assert embedding_rows(torch.empty(0, dtype=torch.int64), pack_bf16(random(5, 32))).shape == (0, 32)


@pytest.mark.parametrize("kind", GGUF)
def test_gguf_blocks_keep_their_numbers_bit_by_bit(isa, kind):
    quantization, pack, scale_bytes = GGUF[kind]
    blocks = gguf_blocks(kind, 21, 160).view(21 * 5, -1)
    scales = torch.arange(0, 21 * 5, dtype=torch.int32) * 270  # from below the normal range of float16 to beyond 4096
    blocks[:, :2] = scales.to(torch.int16).view(-1, 1).view(torch.uint8)
    blocks[1::2, scale_bytes - 1] ^= 0x80  # of either sign
    weight = pack(blocks.flatten(), 21, 160)
    exact = torch.from_numpy(gguf.quants.dequantize(blocks.view(21, -1).numpy(), quantization).astype(np.float32))
    assert torch.equal(unpack(weight), exact)
    ids = torch.tensor([20, 0, 0, 15, 16, 7])
    assert torch.equal(embedding_rows(ids, weight), exact[ids])
    assert torch.equal(embedding_rows(ids, weight, torch.bfloat16), exact[ids].bfloat16())


@pytest.mark.parametrize("maker", MAKERS)
def test_packing_is_the_same_with_and_without_compiled_kernels(maker, monkeypatch):
    if not native.available():
        pytest.skip(COMPILED)
    for outputs, inputs in SHAPES:
        ours = packed(maker, outputs, inputs)
        with monkeypatch.context() as patch:
            patch.setattr(native, "module", None)
            assert torch.equal(ours.data, packed(maker, outputs, inputs).data), (outputs, inputs)


@pytest.mark.parametrize("maker", MAKERS)
def test_embedding_rows_are_rows_of_the_unpacked_weight(isa, maker):
    weight = packed(maker, 35, 63)
    ids = torch.randint(0, 35, (60,), generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(embedding_rows(ids, weight, dtype), unpack(weight)[ids].to(dtype))


def test_int8_rounds_to_the_nearest_127th_of_the_largest_of_its_group():
    numbers = random(19, 50)
    off = (unpack(quantize_int8(numbers)) - numbers).abs()
    for part, of in zip(off.split(32, dim=1), numbers.split(32, dim=1), strict=True):
        largest = of.abs().amax(dim=1, keepdim=True)
        assert (part <= largest / 254 + largest * 5e-4).all()  # fp16 scale
    assert torch.equal(unpack(quantize_int8(torch.zeros(3, 4))), torch.zeros(3, 4))


@pytest.mark.parametrize("inputs", [32, 50, 576])
def test_int4_rounds_to_the_nearest_15th_of_the_range_of_its_group(inputs):
    numbers = random(19, inputs)
    off = (unpack(quantize_int4(numbers)) - numbers).abs()
    for part, of in zip(off.split(32, dim=1), numbers.split(32, dim=1), strict=True):
        low, high = of.aminmax(dim=1, keepdim=True)
        assert (part <= (high - low) / 30 + (low.abs() + high.abs()) * 2e-3).all()  # fp16 scale and minimum
    assert torch.equal(unpack(quantize_int4(torch.full((3, 32), 0.5))), torch.full((3, 32), 0.5))


def test_layouts_are_undone_by_their_inverse():
    codes = torch.arange(17 * 64, dtype=torch.int64).view(17, 64)
    scales, minima = random(17, 2, seed=1, dtype=torch.float16), random(17, 2, seed=2, dtype=torch.float16)
    small, whole = (codes % 16).to(torch.uint8), (codes % 256 - 128).to(torch.int8)
    spread = scales.float().repeat_interleave(32, dim=1)
    assert torch.equal(packed_layout.unpack_f32(packed_layout.pack_f32(spread), 17, 64), spread)
    assert torch.equal(packed_layout.unpack_bf16(packed_layout.pack_bf16(small.bfloat16()), 17, 64), small.float())
    assert torch.equal(packed_layout.unpack_q8(packed_layout.pack_q8(whole, scales), 17, 64), whole * spread)
    lowest = minima.float().repeat_interleave(32, dim=1)
    assert torch.equal(
        packed_layout.unpack_q4(packed_layout.pack_q4(small, scales, minima), 17, 64), small * spread + lowest
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": random(3, 31)}, "x must be"),
        ({"x": random(32)}, "x must be"),
        ({"x": random(3, 32).double()}, "x must be"),
        ({"x": random(32, 3).T}, "x must be"),
        ({"x": random(32).expand(3, 32)}, "x must be"),
        ({"bias": random(6)}, "bias must be"),
        ({"bias": random(5).half()}, "bias must be"),
        ({"bias": random(10)[::2]}, "bias must be"),
        ({"residual": random(3, 6)}, "residual must be"),
        ({"residual": random(2, 5)}, "residual must be"),
        ({"residual": random(5, 3).T}, "residual must be"),
        ({"out_dtype": torch.float16}, "out_dtype must be"),
    ],
)
def test_operands_that_do_not_fit_are_refused(isa, change, words):
    arguments = {"x": random(3, 32), "weight": pack_bf16(random(5, 32)), **change}
    with pytest.raises(ValueError, match=words):
        linear(**arguments)


def test_weights_that_cannot_be_packed_are_refused(isa):
    for pack in (pack_f32, pack_bf16, quantize_int8, quantize_int4):
        for weight in (random(4), random(0, 4), random(4, 0), random(4, 4).double(), torch.zeros(1, 65537)):
            with pytest.raises(ValueError, match="a weight must be"):
                pack(weight)
    for quantize in (quantize_int8, quantize_int4):
        with pytest.raises(ValueError, match="not finite"):
            quantize(torch.tensor([[1.0, float("nan")]]))
    with pytest.raises(ValueError, match="too large for its scales"):
        quantize_int4(torch.tensor([[1e6, -1e6]]))


@pytest.mark.parametrize("kind", GGUF)
def test_blocks_that_do_not_fill_the_shape_are_refused(isa, kind):
    blocks = gguf_blocks(kind, 4, 64)
    for wrong in (blocks[:-1], blocks.view(torch.int8), blocks.repeat(2)[::2]):
        with pytest.raises(ValueError, match="contiguous bytes"):
            GGUF[kind][1](wrong, 4, 64)
    with pytest.raises(ValueError, match="must have outputs"):
        GGUF[kind][1](blocks[:0], 0, 64)


def test_a_q4_0_scale_whose_minimum_does_not_exist_is_refused(isa):
    blocks = gguf_blocks("Q4_0", 2, 64)
    for scale in (8192.0, float("inf"), float("nan")):
        blocks[36:38] = torch.tensor([scale], dtype=torch.float16).view(torch.uint8)
        with pytest.raises(ValueError, match="scale of a Q4_0 block"):
            pack_q4_0(blocks, 2, 64)
    blocks[36:38] = torch.tensor([8188.0], dtype=torch.float16).view(torch.uint8)
    assert unpack(pack_q4_0(blocks, 2, 64)).isfinite().all()


@pytest.mark.parametrize("maker", MAKERS)
def test_ids_outside_the_table_are_refused(isa, maker):
    weight = packed(maker, 20, 32)
    for ids in ([0, 20], [-1], [19, 31]):
        with pytest.raises(ValueError, match="outside the table"):
            embedding_rows(torch.tensor(ids), weight)
    for ids in (torch.tensor([1], dtype=torch.int32), torch.tensor([[1]]), torch.arange(6)[::2]):
        with pytest.raises(ValueError, match="ids must be"):
            embedding_rows(ids, weight)


def test_weights_lie_apart_in_large_blocks_and_keep_them_alive(isa):
    memory = WeightMemory()
    rooms = [memory.take(count) for count in (1, 64, 65, (64 << 20) + 1, 5, 128)]
    spans = sorted((room.data_ptr(), room.data_ptr() + len(room)) for room in rooms)
    assert all(start % 64 == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    packs = [pack_bf16(random(20, 40, seed=seed), memory) for seed in range(3)]
    del memory, rooms
    assert all(
        torch.equal(unpack(pack), random(20, 40, seed=seed).bfloat16().float()) for seed, pack in enumerate(packs)
    )
    elsewhere = [
        quantize_int8,
        quantize_int4,
        *(lambda weight, memory, kind=kind: GGUF[kind][1](gguf_blocks(kind, 4, 32), 4, 32, memory) for kind in GGUF),
    ]
    for make in elsewhere:
        home = WeightMemory()
        first, second = make(random(4, 32), home), make(random(4, 32), home)
        assert torch.equal(first.data, second.data)
        assert second.data.data_ptr() - first.data.data_ptr() == -(-len(first.data) // 64) * 64


class NativeCall:
    """A call by addresses into a result that is wider than it needs to be."""

    def __init__(self):
        self.weight, self.x = quantize_int8(random(20, 40)), random(7, 40)
        self.out, self.scratch = torch.full((7, 32), 5.0), torch.zeros(7 * self.weight.scratch_bytes, dtype=torch.uint8)

    def __call__(self, **change):
        """Call with some of its numbers changed: `x_stride` is the stride of `x`, and so on."""
        module, given = native.module, dict.fromkeys(("bias", "residual", "residual_stride"), 0) | change
        weight = {"kind": int(self.weight.kind), "outputs": 20, "inputs": 40, "weight": self.weight.data.data_ptr()}

        def rows(name, address, stride):
            address, stride = given.get(name, address), given.get(f"{name}_stride", stride)
            return module.Rows(address=address, stride=stride, element=given.get(f"{name}_element", 0))

        scratch = given.get("scratch", self.scratch.data_ptr()), given.get("scratch_bytes", len(self.scratch))
        here.cpu().linear(
            rows=given.get("rows", 7),
            weight=module.Weight(*(given.get(name, value) for name, value in weight.items())),
            x=rows("x", self.x.data_ptr(), 40),
            bias=module.Vector(given["bias"], given["bias_element"]) if "bias_element" in given else None,
            residual=rows("residual", 0, 0) if {"residual", "residual_element"} & change.keys() else None,
            out=rows("out", self.out.data_ptr(), 32),
            gate=given.get("gate"),
            scratch=module.Memory(*scratch),
        )


def test_nothing_is_written_beyond_the_outputs(compiled):
    call = NativeCall()
    call()
    assert torch.equal(call.out[:, :20], linear(call.x, call.weight))
    assert (call.out[:, 20:] == 5).all()


@pytest.mark.parametrize(
    "change",
    [
        {"kind": 99},
        {"kind": -1},
        {"gate": 0},
        {"gate": 4, "outputs": 32, "residual": 64, "residual_stride": 32},
        {"gate": 1, "outputs": 32},
        {"gate": 7, "outputs": 32},
        {"outputs": 0},
        {"inputs": 0},
        {"inputs": 65537},
        {"rows": -1},
        {"x": 0},
        {"x_stride": 39},
        {"x_element": 2},
        {"bias_element": -1},
        {"residual_element": 7},
        {"residual": 64, "residual_stride": 19},
        {"weight": 0},
        {"out": 0},
        {"out_stride": 19},
        {"out_element": 2},
        {"scratch": 0},
        {"scratch_bytes": 1},
    ],
)
def test_bad_numbers_raise_before_anything_is_written(compiled, change):
    call = NativeCall()
    with pytest.raises(ValueError, match="must"):
        call(**change)
    assert (call.out == 5).all()
    assert not call.scratch.any()


def test_calls_from_several_threads_do_not_meet(compiled):
    here.set_threads(2)
    weight = quantize_int8(random(300, 64))
    xs = [random(11, 64, seed=seed) for seed in range(4)]
    expected = [linear(x, weight) for x in xs]
    wrong = []

    def repeat(index):
        wrong.extend(index for _ in range(200) if not torch.equal(linear(xs[index], weight), expected[index]))

    threads = [threading.Thread(target=repeat, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not native.available(), reason=COMPILED)
def test_settings_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="kernels for mmx"):
        native.open_cpu("mmx")
    for threads in (0, -1, 1025):
        with pytest.raises(ValueError, match="between 1 and 1024"):
            native.open_cpu(threads=threads)


@pytest.mark.skipif(not native.available(), reason=COMPILED)
def test_the_best_instruction_set_is_used_unless_another_is_chosen():
    assert native.open_cpu().isa == native.isas()[0]
    for isa in native.isas():
        assert native.open_cpu(isa).isa == isa
    assert native.isas()[-1] == "portable"
