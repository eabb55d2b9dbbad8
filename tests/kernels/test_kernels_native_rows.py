"""Compiled row-wise kernels against their references and float64, on every instruction set that this machine has."""

from __future__ import annotations

import math

import compiled_kernels as here
import pytest
import torch

from needs import COMPILED
from penstock.kernels import activation, native, norm, rope

if not native.available():
    pytest.skip(COMPILED, allow_module_level=True)

from penstock.kernels import native_rows

pytestmark = pytest.mark.usefixtures("compiled")

BF16, F32 = torch.bfloat16, torch.float32
WIDTHS = [1, 7, 16, 30, 72, 576, 1542]


def random(*shape, seed=0, dtype=F32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(ours, theirs, dtype):
    """Equal except for the order of sums and, in bfloat16, one more rounding that the references make."""
    tolerance = {"atol": 4e-6, "rtol": 4e-6} if dtype == F32 else {"atol": 1e-6, "rtol": 2 * torch.finfo(BF16).eps}
    assert ours.dtype == theirs.dtype == dtype
    assert ours.is_contiguous()
    torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_are_their_references(width, dtype):
    x = random(5, width, dtype=dtype) * 3
    weight, bias = random(width, seed=1, dtype=dtype), random(width, seed=2, dtype=dtype)
    close(here.rms_norm(x, weight, 1e-5), norm.rms_norm_reference(x, weight, 1e-5), dtype)
    if width > 1:  # one element is its own mean: what is left is rounding
        wide = norm.layer_norm_reference(x.float(), weight.float(), bias.float(), 1e-5).to(dtype)
        torch.testing.assert_close(
            here.layer_norm(x, weight, bias, 1e-5), wide, atol=2e-5, rtol=torch.finfo(dtype).eps * 8
        )


def test_rms_norm_takes_heads_in_strided_rows():
    x = random(4, 5, 24)
    weight = random(24, seed=1)
    close(here.rms_norm(x[:, 1:3], weight, 1e-6), norm.rms_norm_reference(x[:, 1:3], weight, 1e-6), F32)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_norm_may_be_over_some_columns_of_wider_rows_in_place(dtype):
    """As OLMo 2 norms its queries and its keys, each over all heads, where they lie in a fused row."""
    qkv, weight = random(5, 72 + 40 + 24, dtype=dtype), random(40, seed=1)
    expected = qkv.clone()
    keys = qkv[:, 72:112]
    expected[:, 72:112] = here.rms_norm(keys.contiguous(), weight, 1e-6)
    native_rows._norm(here.cpu().rms_norm, keys, None, weight, None, 1e-6, keys)
    assert torch.equal(qkv, expected)


@pytest.mark.parametrize("stream_dtype", [F32, BF16])
@pytest.mark.parametrize("residual_dtype", [F32, BF16])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("width", [30, 576])
def test_the_residual_is_added_to_the_stream_before_it_is_normed(width, dtype, residual_dtype, stream_dtype):
    stream, residual = random(6, width, dtype=stream_dtype), random(6, width, seed=1, dtype=residual_dtype)
    weight = random(width, seed=2)
    total = (stream.float() + residual.float()).to(stream_dtype)
    out = here.add_rms_norm(stream, residual, weight, 1e-5, dtype)
    assert torch.equal(stream, total)
    exact = norm.rms_norm_reference(total.float(), weight, 1e-5)
    torch.testing.assert_close(out, exact.to(dtype), atol=4e-6, rtol=4e-6 if dtype == F32 else 2**-7)


def exact_gelu(x):
    """In float64: the reference adds 1 to torch's `erf`, which leaves nothing of a small tail on some processors."""
    wide = x.double()
    return wide * 0.5 * torch.special.erfc(-wide * math.sqrt(0.5))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("width", WIDTHS)
def test_activations_are_their_references(width, dtype):
    x = random(5, 2 * width, dtype=dtype) * 4
    gate, up = x.chunk(2, dim=-1)
    close(here.silu_and_mul(x), activation.silu_and_mul_reference(x), dtype)
    close(here.gelu_and_mul(x), exact_gelu(gate).to(dtype) * up, dtype)
    close(here.clamped_swiglu_and_mul(x), activation.clamped_swiglu_and_mul_reference(x), dtype)
    close(here.gelu_new(x), activation.gelu_new_reference(x), dtype)
    close(here.gelu(x), exact_gelu(x).to(dtype), dtype)
    assert torch.equal(here.relu(x), activation.relu_reference(x))


def test_the_exponential_is_within_two_units_of_the_last_place():
    x = torch.linspace(-86, 86, 200_001)
    out = here.silu_and_mul(torch.stack((x, torch.ones_like(x)), dim=1)).flatten().double()
    exact = x.double() / (1 + torch.exp(-x.double()))
    assert ((out - exact).abs() / exact.abs().clamp(min=1e-37)).max() < 2.5 * 2**-23


def test_gelu_is_exact_to_a_few_units_where_it_is_tiny_too():
    """Against the normal distribution in float64; `x^2 / 2` in float32 leaves its own rounding in the exponential."""
    x = torch.linspace(-13, 13, 200_001)
    exact = exact_gelu(x)
    error = (here.gelu(x[:, None]).flatten().double() - exact).abs() / exact.abs().clamp(min=1e-37)
    assert (error / (6 + x.double().square() / 2)).max() < 2**-24


def test_activations_stay_finite_at_the_ends_of_float32():
    ends = torch.tensor([-3e38, -1e9, -200.0, 200.0, 1e9, 3e38, -math.inf])
    for out in (here.gelu_new(ends[:, None]), here.silu_and_mul(ends[:, None] * torch.ones(1, 2))):
        assert not out[:3].any() or out.shape[1] == 1
    for kernel in (here.gelu_new, here.gelu, here.relu):
        assert torch.equal(kernel(ends[:6, None]).flatten(), torch.tensor([0.0, 0.0, 0.0, 200.0, 1e9, 3e38]))
    infinite = torch.tensor([[-math.inf, math.inf]])
    for kernel in (here.gelu, here.relu):
        assert torch.equal(kernel(infinite), torch.tensor([[0.0, math.inf]]))


def test_the_swiglu_of_gpt_oss_cuts_gates_above_and_the_rest_both_ways():
    gates, ups = torch.tensor([-1e9, -20.0, 7.0, 8.0, 1e9]), torch.tensor([-1e9, -7.0, 0.0, 7.0, 1e9])
    pairs = torch.cartesian_prod(gates, ups)  # [25, 2]
    out = here.clamped_swiglu_and_mul(pairs).flatten().double()
    gate, up = pairs[:, 0].double().clamp(max=7.0), pairs[:, 1].double().clamp(-7.0, 7.0)
    torch.testing.assert_close(out, gate * (1.702 * gate).sigmoid() * (up + 1), rtol=1e-5, atol=1e-12)


def test_nan_stays_in_its_element_and_its_row():
    x = random(3, 40)
    x[1, 5] = math.nan
    for kernel in (here.silu_and_mul, here.clamped_swiglu_and_mul, here.gelu_new, here.gelu, here.relu):
        out = kernel(x)
        assert out[1, 5].isnan()
        assert out.isnan().sum() == 1
    normed = here.rms_norm(x, torch.ones(40), 1e-5)
    assert normed[1].isnan().all()
    assert not normed[[0, 2]].isnan().any()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("heads", "dim", "rotary_dim"), [(1, 2, 2), (3, 20, 20), (6, 64, 64), (2, 128, 128), (2, 128, 96), (3, 21, 12)]
)
def test_rotation_is_its_reference_bit_by_bit(heads, dim, rotary_dim, dtype):
    x, angles = random(11, heads + 2, dim, dtype=dtype)[:, 1:-1], random(11, rotary_dim // 2, seed=1) * 9
    expected = rope.rotate_reference(x, angles.cos(), angles.sin())
    assert torch.equal(here.rotate(x, angles.cos(), angles.sin()), expected)


def test_bfloat16_is_rounded_to_the_nearest_even():
    x = torch.cat((random(4000) * 100, 1 + torch.arange(0, 4096) * 2**-12, torch.tensor([0.0, -0.0, 3.4e38, math.inf])))
    pairs = torch.stack((x, torch.zeros_like(x)), dim=1)[:, None]  # [N, 1, 2], turned by no angle
    out = here.rotate(pairs.to(BF16), torch.ones(len(x), 1), torch.zeros(len(x), 1))
    assert torch.equal(out[:, 0, 0], x.to(BF16))
    stream = torch.zeros(1, len(x) - 1, dtype=BF16)
    here.add_rms_norm(stream, x[None, :-1], torch.ones(len(x) - 1), 1.0, F32)
    assert torch.equal(stream[0], x[:-1].to(BF16))


def row_wise(width, dtype):
    """Each kernel as a function of rows `[T, width]` alone."""
    weight, bias = random(width, seed=1, dtype=dtype), random(width, seed=2, dtype=dtype)
    angle = random(1, 3, seed=3)
    return {
        "rms_norm": lambda x: here.rms_norm(x, weight, 1e-6),
        "add_rms_norm": lambda x: here.add_rms_norm(x.clone(), x, weight, 1e-6, dtype),
        "layer_norm": lambda x: here.layer_norm(x, weight, bias, 1e-6),
        "layer_norm without bias": lambda x: here.layer_norm(x, weight, None, 1e-6),
        "rotate": lambda x: here.rotate(
            x.view(len(x), -1, 6), angle.cos().repeat(len(x), 1), angle.sin().repeat(len(x), 1)
        ),
        "silu_and_mul": here.silu_and_mul,
        "gelu_and_mul": here.gelu_and_mul,
        "gelu_new": here.gelu_new,
        "gelu": here.gelu,
        "relu": here.relu,
    }


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("width", [30, 72, 1542])
def test_rows_see_neither_neighbours_nor_threads(width, dtype):
    x = random(131, width, dtype=dtype) * 3
    for name, kernel in row_wise(width, dtype).items():
        here.set_threads(1)
        whole = kernel(x)
        for start, stop in ((0, 1), (5, 6), (3, 20), (130, 131), (0, 130)):
            assert torch.equal(kernel(x[start:stop]), whole[start:stop]), name
        for threads in (2, 3):
            here.set_threads(threads)
            assert torch.equal(kernel(x), whole), name


def test_bad_arguments_are_refused_before_anything_is_written():
    stream = torch.ones(3, 8)
    with pytest.raises(ValueError, match="weight must be"):
        here.add_rms_norm(stream, stream.clone(), torch.ones(9), 1e-5, F32)
    with pytest.raises(ValueError, match="residual must be"):
        here.add_rms_norm(stream, torch.ones(3, 7), torch.ones(8), 1e-5, F32)
    with pytest.raises(ValueError, match="residual must be float32 or bfloat16"):
        here.add_rms_norm(stream, torch.ones(3, 8, dtype=torch.float16), torch.ones(8), 1e-5, F32)
    assert torch.equal(stream, torch.ones(3, 8))
    with pytest.raises(ValueError, match="even number of columns"):
        here.silu_and_mul(torch.ones(3, 7))
    with pytest.raises(ValueError, match="must be contiguous"):
        here.gelu_new(torch.ones(3, 8).T.unsqueeze(0)[0])
    with pytest.raises(ValueError, match="cos must be"):
        here.rotate(torch.ones(3, 1, 8), torch.ones(3, 3), torch.ones(3, 4))


def test_without_compiled_kernels_there_is_nothing_to_open(monkeypatch):
    monkeypatch.setattr(native, "module", None)
    with pytest.raises(RuntimeError, match="this installation of penstock has no compiled kernels"):
        native.open_cpu()
