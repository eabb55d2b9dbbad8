"""Layers and attention, each against what transformers or torch computes."""

from __future__ import annotations

import math
import resource
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from penstock.kernels.attention_spec import AttentionSpec
from penstock.models.config_reader import ConfigReader
from penstock.models.rope_config import read_rope
from penstock.nn.dense import DenseAttention
from penstock.nn.rope import FrequencyFactors, LinearScaling, Llama3Scaling, Rope, RotaryTable

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spec(q):
    return AttentionSpec(q.shape[-1] ** -0.5)


@pytest.mark.parametrize("head_dim", [10, 20, 64, 128])
@pytest.mark.parametrize(
    ("parameters", "rope"),
    [
        ({"rope_type": "default", "rope_theta": 10000.0}, Rope()),
        ({"rope_type": "default", "rope_theta": 500000.0}, Rope(500000.0)),
        ({"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}, Rope(10000.0, LinearScaling(2.5))),
        ({**LLAMA3, "rope_theta": 500000.0}, Rope(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192))),
    ],
    ids=["default", "large-theta", "linear", "llama3"],
)
def test_rotary_tables_are_those_of_transformers_bit_by_bit(parameters, rope, head_dim):
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, max_position_embeddings=65536, rope_parameters=dict(parameters)
    )
    theirs = LlamaRotaryEmbedding(config)
    assert torch.equal(rope.inverse_frequencies(head_dim), theirs.inv_freq)
    table = RotaryTable.build(rope, head_dim, max_positions=3000, device=torch.device("cpu"))
    positions = torch.tensor([0, 1, 2999, 17, 17, 1024])
    cos, sin = table.rows(positions)
    their_cos, their_sin = theirs(torch.zeros(1), positions[None])
    half = head_dim // 2
    torch.testing.assert_close(cos, their_cos[0, :, :half], atol=2e-7, rtol=0)  # one unit in the last place
    torch.testing.assert_close(sin, their_sin[0, :, :half], atol=2e-7, rtol=0)


@pytest.mark.parametrize(
    ("max_positions", "original", "extra", "amplitude"),
    [
        (65536, 4096, {}, math.sqrt(1 + math.log(16) / math.log(4096))),
        (65536, 4096, {"factor": 4.0}, math.sqrt(1 + math.log(4) / math.log(4096))),
        (65536, 4096, {"attention_factor": 1.25}, 1.25),
        (4096, 4096, {}, 1.0),
    ],
)
@pytest.mark.parametrize(("head_dim", "share"), [(20, 1.0), (64, 0.75)])
def test_longrope_tables_are_those_of_transformers_bit_by_bit(
    head_dim, share, max_positions, original, extra, amplitude
):
    pairs = int(head_dim * share) // 2
    short, long = [1.0 + i / 7 for i in range(pairs)], [1.0 + i * i / 3 for i in range(pairs)]
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": short,
        "long_factor": long,
        "partial_rotary_factor": share,
        "original_max_position_embeddings": original,
        **extra,
    }
    config = Phi3Config(
        hidden_size=head_dim,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=max_positions,
        original_max_position_embeddings=original,
        rope_parameters=dict(parameters),
    )
    for served, factors in ((None, short if max_positions == original else long), (original, short)):
        reader = ConfigReader({"rope_scaling": parameters}, "config.json", max_model_len=served)
        rope = read_rope(reader, head_dim, max_positions, partial=True)
        assert rope == Rope(10000.0, FrequencyFactors(tuple(factors)), share, pytest.approx(amplitude))
        theirs = Phi3RotaryEmbedding(config)
        positions = torch.tensor([0, 1, 17, (served or max_positions) - 1])  # the last one makes theirs choose
        their_cos, their_sin = theirs(torch.zeros(1), positions[None])
        assert torch.equal(rope.inverse_frequencies(head_dim), theirs.inv_freq)
        cos, sin = RotaryTable.build(rope, head_dim, max_positions, torch.device("cpu")).rows(positions)
        torch.testing.assert_close(cos, their_cos[0, :, :pairs], atol=4e-7, rtol=0)  # a unit in the last place
        torch.testing.assert_close(sin, their_sin[0, :, :pairs], atol=4e-7, rtol=0)


@pytest.mark.parametrize("head_dim", [10, 64, 160, 512])
def test_angles_are_the_same_bits_however_a_table_grew(head_dim):
    rope, positions = Rope(500000.0, LinearScaling(2.0), amplitude=1.25), torch.arange(3000)
    angles = positions.float()[:, None] * rope.inverse_frequencies(head_dim)  # all at once
    for reached in ([3000], [1, 2, 129, 700, 2999, 3000], [2500, 3, 3000]):
        table = RotaryTable.build(rope, head_dim, 3000, torch.device("cpu"))
        for each in reached:
            cos, sin = table.rows(positions[each - 1 : each])
            assert torch.equal(cos, angles[each - 1 : each].cos() * 1.25)
            assert torch.equal(sin, angles[each - 1 : each].sin() * 1.25)
        assert torch.equal(table.cos, angles.cos() * 1.25)
        assert torch.equal(table.sin, angles.sin() * 1.25)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux says how much memory a process uses")
def test_a_table_takes_the_memory_of_the_positions_that_were_asked_for():
    before = resident_bytes()
    table = RotaryTable.build(Rope(), 128, 1 << 18, torch.device("cpu"))  # 128 MiB in all
    table.rows(torch.tensor([4000]))
    assert table.known == 4096 == -(-4001 // 128) * 128
    assert table.nbytes(4001) == 2 * 4096 * 64 * 4
    assert resident_bytes() - before < 16 << 20


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_positions_beyond_a_table_have_no_angles():
    table = RotaryTable.build(Rope(), 8, 200, torch.device("cpu"))
    assert table.nbytes(10**6) == 2 * 200 * 4 * 4
    with pytest.raises(IndexError):
        table.rows(torch.tensor([200]))


def test_an_odd_number_of_elements_is_rotated_as_transformers_does():
    config = Phi3Config(hidden_size=15, num_attention_heads=1, num_key_value_heads=1)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.6}
    rope = Rope(10000.0, share=0.6)
    assert rope.width(15) == 10
    assert torch.equal(rope.inverse_frequencies(15), Phi3RotaryEmbedding(config).inv_freq)


@pytest.mark.parametrize("head_dim", [10, 20, 36, 512])
@pytest.mark.parametrize(("share", "factor"), [(0.25, 1.0), (0.5, 1.0), (1.0, 1.0), (0.3, 2.5), (0.0, 1.0)])
def test_proportional_frequencies_are_those_of_transformers_bit_by_bit(share, factor, head_dim):
    parameters = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": share, "factor": factor}
    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, rope_parameters=parameters)
    theirs, _ = ROPE_INIT_FUNCTIONS["proportional"](config)
    rope = read_rope(ConfigReader({"rope_parameters": parameters}, "config.json"), head_dim, 512)
    assert torch.equal(rope.inverse_frequencies(head_dim), theirs)
    assert rope.width(head_dim) == head_dim


def test_llama3_scaling_has_all_three_regimes():
    plain = Rope(500000.0).inverse_frequencies(128)
    ratio = plain / Rope(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192)).inverse_frequencies(128)
    assert (ratio == 1).any()
    assert (ratio == 8).any()
    assert ((ratio > 1.01) & (ratio < 7.99)).any()


def test_factors_divide_frequencies_so_that_those_of_a_scaling_reproduce_it():
    theta = 500000.0
    config = LlamaConfig(hidden_size=64, num_attention_heads=1, rope_parameters={**LLAMA3, "rope_theta": theta})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    factors = tuple((Rope(theta).inverse_frequencies(64) / scaled).tolist())
    torch.testing.assert_close(
        Rope(theta, FrequencyFactors(factors)).inverse_frequencies(64), scaled, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 10), (6, 2, 20), (3, 1, 24)])
def test_dense_attention_is_torchs_causal_attention(heads, kv_heads, dim):
    q, k, v = random(9, heads, dim), random(9, kv_heads, dim, seed=1), random(9, kv_heads, dim, seed=2)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], is_causal=True, enable_gqa=True
    )
    out = DenseAttention()(0, q, k, v, spec(q))
    assert out.is_contiguous()
    torch.testing.assert_close(out, expected[0].transpose(0, 1), atol=1e-6, rtol=1e-5)


def test_dense_attention_continues_and_keeps_layers_apart():
    q, k, v = random(9, 4, 10), random(9, 2, 10, seed=1), random(9, 2, 10, seed=2)
    whole = DenseAttention()(0, q, k, v, spec(q))
    attend = DenseAttention()
    parts = []
    for start, stop in ((0, 4), (4, 5), (5, 9)):
        attend(1, q[start:stop], -k[start:stop], 2 * v[start:stop], spec(q))
        parts.append(attend(0, q[start:stop], k[start:stop], v[start:stop], spec(q)))
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-6, rtol=1e-5)


def test_dense_attention_keeps_its_own_copy():
    q, k, v = random(3, 2, 8), random(3, 2, 8, seed=1), random(3, 2, 8, seed=2)
    expected = DenseAttention()(0, torch.cat((q, q)), torch.cat((k, k)), torch.cat((v, v)), spec(q))[3:]
    attend, first_k, first_v = DenseAttention(), k.clone(), v.clone()
    attend(0, q, first_k, first_v, spec(q))
    first_k.zero_()
    first_v.zero_()
    torch.testing.assert_close(attend(0, q, k, v, spec(q)), expected, atol=1e-6, rtol=1e-5)
