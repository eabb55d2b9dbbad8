"""Phi-3: LongRoPE's factors are chosen by the context that is served, and GGUF files say what checkpoints say."""

from __future__ import annotations

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import VARIANTS, load_model, reference_logits, write_checkpoint
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock import loading
from penstock.contract.config import EngineConfig
from penstock.kernels.torch_backend import TorchBackend
from penstock.models import gguf_dialect, load
from penstock.nn.dense import DenseAttention
from penstock.nn.operations import Rotate
from penstock.nn.reference import ReferenceExecutor
from penstock.weights.bind import Binder
from penstock.weights.files import open_model
from penstock.weights.gguf_file import open_gguf

ORIGINAL = 11
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), "phi3", "partial_long")


def logits(checkpoint, length, max_model_len=None):
    model, tokens = load_model(checkpoint, max_model_len=max_model_len), prompt(length)
    with torch.no_grad():
        return model.logits(model.forward(torch.tensor(tokens), torch.arange(length), DenseAttention()))


def prompt(length):
    return [(7 * i + 3) % 127 for i in range(length)]


@pytest.mark.parametrize("max_model_len", [None, ORIGINAL + 1, 512])
def test_long_factors_serve_every_sequence_where_long_ones_are_served(checkpoint, max_model_len):
    ours = logits(checkpoint, 40, max_model_len)
    torch.testing.assert_close(ours, reference_logits(checkpoint, prompt(40)), atol=TOLERANCE, rtol=0)
    beginning = logits(checkpoint, ORIGINAL, max_model_len)
    torch.testing.assert_close(beginning, ours[:ORIGINAL], atol=TOLERANCE, rtol=0)
    assert (beginning - reference_logits(checkpoint, prompt(ORIGINAL))).abs().max() > 0.01, "which chooses anew"


def test_short_factors_serve_every_sequence_where_none_is_longer_than_those_of_the_pretraining(checkpoint):
    for length in (ORIGINAL, 4):
        ours = logits(checkpoint, length, ORIGINAL)
        torch.testing.assert_close(ours, reference_logits(checkpoint, prompt(length)), atol=TOLERANCE, rtol=0)
    assert (ours - logits(checkpoint, length)).abs().max() > 0.01, "the long factors are others"


def test_the_engine_loads_a_model_for_the_context_that_it_is_told_to_serve(checkpoint):
    for told, served in ((0, None), (ORIGINAL, ORIGINAL), (40, None)):
        config = EngineConfig(model=str(checkpoint), threads=1, dtype="float32", max_model_len=told)
        program = loading.load_model(config, open_model(checkpoint, gguf_dialect), lambda line: None).program
        assert torch.equal(cosines(program), cosines(load_model(checkpoint, max_model_len=served).program))


def cosines(program):
    return next(
        each.table.rows(torch.arange(len(each.table.cos)))[0]
        for each in program.operations()
        if isinstance(each, Rotate)
    )


@pytest.mark.parametrize("variant", VARIANTS["phi3"])
def test_a_gguf_file_is_the_same_model(tmp_path, variant):
    directory = write_checkpoint(tmp_path, "phi3", variant)
    source = open_gguf(write_gguf(directory), gguf_dialect)
    model = ReferenceExecutor(
        load(source.config, Binder(source, torch.float32, "cpu", "m"), "m"), torch.float32, TorchBackend()
    )
    tokens = [token % model.shape.vocab_size for token in prompt(40)]
    with torch.no_grad():
        ours = model.logits(model.forward(torch.tensor(tokens), torch.arange(40), DenseAttention()))
    torch.testing.assert_close(ours, reference_logits(directory, tokens), atol=TOLERANCE, rtol=0)
    rotations = [cosines(each.program) for each in (model, load_model(directory))]
    torch.testing.assert_close(*rotations, atol=1e-6, rtol=0)  # the attention factor is float32 in the file


def write_gguf(directory):
    """A checkpoint as llama.cpp's conversion writes it (`Phi3MiniModel` in convert_hf_to_gguf.py)."""
    config = AutoConfig.from_pretrained(directory)
    rope, head_dim = config.rope_parameters, config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(directory / "tiny.gguf", "phi3")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(int(rope["partial_rotary_factor"] * head_dim))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_sliding_window(config.sliding_window or 0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.PHI3, config.num_hidden_layers)
    tensors = {
        names.get_name(name, try_suffixes=(".weight",)): tensor
        for name, tensor in load_file(directory / "model.safetensors").items()
    }
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_attn_factors(ROPE_INIT_FUNCTIONS["longrope"](config)[1])
        tensors |= {f"rope_factors_{kind}.weight": torch.tensor(rope[f"{kind}_factor"]) for kind in ("long", "short")}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return directory / "tiny.gguf"
