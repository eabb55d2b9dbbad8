"""Each kernel against the formula it cites, as others have written it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from penstock.kernels.activation import gelu_and_mul_reference as gelu_and_mul
from penstock.kernels.activation import gelu_new_reference as gelu_new
from penstock.kernels.activation import gelu_reference as gelu
from penstock.kernels.activation import relu_reference as relu
from penstock.kernels.activation import silu_and_mul_reference as silu_and_mul
from penstock.kernels.dense_weight import DenseWeight
from penstock.kernels.norm import layer_norm_reference as layer_norm
from penstock.kernels.norm import rms_norm_reference as rms_norm
from penstock.kernels.rope import rotate_reference as rotate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 7, 5), (3, 48, 17), (13, 33, 64)])
def test_linear_is_the_product_with_the_transpose_plus_the_bias(rows, inputs, outputs):
    x, weight, bias = random(rows, inputs), random(outputs, inputs, seed=1), random(outputs, seed=2)
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(DenseWeight(weight).matmul(None, x).double(), exact, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        DenseWeight(weight).matmul(None, x, bias).double(), exact + bias.double(), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 48), (1, 20), (4, 3, 24)])
def test_rms_norm_is_that_of_transformers_bit_by_bit(dtype, shape):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    theirs = LlamaRMSNorm(shape[-1], eps=1e-5).to(dtype)
    theirs.weight.data = random(shape[-1], seed=1, dtype=dtype)
    x = random(*shape, dtype=dtype) * 3
    out = rms_norm(x, theirs.weight.data, 1e-5)
    assert out.dtype == dtype
    assert torch.equal(out, theirs(x).detach())


def test_rms_norm_of_large_bfloat16_rows_is_finite():
    x = torch.full((2, 16), 1e20, dtype=torch.bfloat16)
    x[1] = 0
    out = rms_norm(x / 1e5, torch.ones(16, dtype=torch.bfloat16), 1e-6)
    assert torch.equal(out[0], torch.ones(16, dtype=torch.bfloat16))
    assert torch.equal(out[1], torch.zeros(16, dtype=torch.bfloat16))


def test_layer_norm_is_its_formula_in_float64():
    x, weight, bias = random(6, 30) * 5 + 2, random(30, seed=1), random(30, seed=2)
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    exact = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * weight.double() + bias.double()
    torch.testing.assert_close(layer_norm(x, weight, bias, 1e-5).double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("heads", "dim"), [(1, 2), (3, 20), (6, 24)])
def test_rotate_is_that_of_transformers_bit_by_bit_in_float32(heads, dim):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    x, angles = random(11, heads, dim), random(11, dim // 2, seed=1) * 9
    both = torch.cat((angles, angles), dim=-1)[None]
    theirs, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], both.cos(), both.sin())
    assert torch.equal(rotate(x, angles.cos(), angles.sin()), theirs[0].transpose(0, 1))


@pytest.mark.parametrize(("dim", "rotary_dim"), [(8, 2), (20, 12), (128, 96), (7, 6)])
def test_rotating_a_part_of_each_head_is_that_of_transformers(dim, rotary_dim):
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

    x, angles = random(11, 3, dim), random(11, rotary_dim // 2, seed=1) * 9
    both = torch.cat((angles, angles), dim=-1)[None]
    theirs, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], both.cos(), both.sin())
    out = rotate(x, angles.cos(), angles.sin())
    assert torch.equal(out, theirs[0].transpose(0, 1))
    assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:])


def test_rotate_turns_each_pair_by_its_angle():
    x, angle = torch.tensor([[[3.0, 0.0, 0.0, 2.0]]]), torch.tensor([[math.pi / 2, math.pi]])
    expected = torch.tensor([[[0.0, 0.0, 3.0, -2.0]]])  # pairs (3, 0) by 90 degrees and (0, 2) by 180
    torch.testing.assert_close(rotate(x, angle.cos(), angle.sin()), expected, atol=1e-6, rtol=0)


def test_rotate_rounds_bfloat16_once():
    x, angles = random(5, 2, 8, dtype=torch.bfloat16), random(5, 4, seed=1)
    wide = rotate(x.float(), angles.cos(), angles.sin())
    assert torch.equal(rotate(x, angles.cos(), angles.sin()), wide.bfloat16())


def test_rotate_reads_strided_rows_and_writes_dense_ones():
    qkv, angles = random(5, 9, 8), random(5, 4, seed=1)
    view = qkv[:, 2:5]
    out = rotate(view, angles.cos(), angles.sin())
    assert out.is_contiguous()
    assert torch.equal(out, rotate(view.contiguous(), angles.cos(), angles.sin()))


@pytest.mark.parametrize(
    ("ours", "name"), [(gelu_new, "gelu_new"), (gelu_new, "gelu_pytorch_tanh"), (gelu, "gelu"), (relu, "relu")]
)
def test_activations_are_those_of_transformers(ours, name):
    from transformers.activations import ACT2FN

    x = torch.linspace(-9, 9, 1001)
    torch.testing.assert_close(ours(x), ACT2FN[name](x), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_gates_the_second_half_with_the_first(dtype):
    gate_up = random(4, 22, dtype=dtype) * 4
    expected = nn.SiLU()(gate_up[:, :11]) * gate_up[:, 11:]
    torch.testing.assert_close(silu_and_mul(gate_up), expected, atol=1e-6, rtol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("kernel", [gelu, gelu_new, relu, silu_and_mul])
def test_activations_stay_finite_at_the_ends_of_float32(kernel):
    out = kernel(torch.tensor([[-1e9, -200.0, 200.0, 1e9, 1.0, 1.0, 1.0, 1.0]]))
    assert out.isfinite().all()
    assert torch.equal(out[0, :4], torch.tensor([0.0, 0.0, 200.0, 1e9]))


def test_embedding_gathers_copies_of_rows():
    table = random(7, 3)
    out = DenseWeight(table).rows(None, torch.tensor([6, 0, 6]), table.dtype)
    assert torch.equal(out, table[[6, 0, 6]])
    out.zero_()
    assert table.abs().min() > 0


def row_wise_kernels(width, dtype):
    """Each row-wise kernel as a function of rows `[T, width]` alone."""
    weight, bias = random(width, seed=1, dtype=dtype), random(width, seed=2, dtype=dtype)
    angles = random(1, width // 6, seed=3)
    return {
        "rms_norm": lambda x: rms_norm(x, weight, 1e-6),
        "rms_norm of heads": lambda x: rms_norm(x.view(len(x), 3, -1)[:, :2], weight[: width // 3], 1e-6),
        "layer_norm": lambda x: layer_norm(x, weight, bias, 1e-6),
        "rotate": lambda x: rotate(x.view(len(x), 3, -1), angles.cos(), angles.sin()),
        "silu_and_mul": silu_and_mul,
        "gelu_and_mul": gelu_and_mul,
        "gelu_new": gelu_new,
        "gelu": gelu,
        "relu": relu,
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [30, 72, 1536])
def test_row_wise_kernels_do_not_see_their_neighbours(width, dtype):
    x = random(131, width, dtype=dtype) * 3
    for name, kernel in row_wise_kernels(width, dtype).items():
        whole = kernel(x)
        for start, stop in ((0, 1), (5, 6), (3, 20), (130, 131), (0, 130)):
            assert torch.equal(kernel(x[start:stop]), whole[start:stop]), name


@pytest.fixture
def threads():
    """Set torch's threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_wise_kernels_do_not_see_the_number_of_threads(threads, dtype):
    x = random(131, 1542, dtype=dtype) * 3
    for name, kernel in row_wise_kernels(1542, dtype).items():
        threads(1)
        alone = kernel(x)
        threads(3)
        assert torch.equal(kernel(x), alone), name
