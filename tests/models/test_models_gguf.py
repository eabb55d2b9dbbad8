"""A family's GGUF file, written with the names of the `gguf` package, computes what transformers makes of its weights.

Files are laid out as llama.cpp's conversion lays them out (`convert_hf_to_gguf.py`): what it writes by its own hand,
such as Gemma's norms with one added, is written so here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import reference_logits, write_checkpoint

from penstock.contract.errors import ModelFileError
from penstock.kernels.torch_backend import TorchBackend
from penstock.models import gguf_dialect, load
from penstock.nn.dense import DenseAttention
from penstock.nn.reference import ReferenceExecutor
from penstock.weights.bind import Binder
from penstock.weights.gguf_file import open_gguf

LENGTH = 80

# What a GGUF file cannot say has the value that llama.cpp takes for it.
CASES: dict[tuple[str, str], dict[str, Any]] = {
    ("gemma2", "wide_heads_tied_small_window"): {"query_pre_attn_scalar": 20},
    ("gemma2", "all_to_one_untied_biases_widest_heads"): {
        "head_dim": 10,
        "query_pre_attn_scalar": 10,
        "attn_logit_softcapping": 4.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
    },
    ("gemma3_text", "wide_heads_tied_small_window"): {"query_pre_attn_scalar": 20},
    ("gemma3_text", "one_to_one_untied_capped"): {
        "layer_types": None,
        "num_hidden_layers": 6,
        "query_pre_attn_scalar": 24,
        "tie_word_embeddings": True,
    },
    ("gpt_oss", "wide_heads_unused_experts_small_window"): {},
    ("gpt_oss", "all_to_one_narrow_heads"): {},
    ("gpt_oss", "one_to_one_tied_every_expert_no_attention_biases"): {"layer_types": None},
    ("granite", "wide_heads_untied_factors"): {},
    ("mixtral", "wide_heads_tied_unused_experts"): {},
    ("mixtral", "all_to_one_narrow_heads_small_window"): {},
    ("granite", "all_to_one_biases_llama3_large_eps"): {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ("olmo2", "wide_heads_untied"): {},
    ("olmo2", "all_to_one_narrow_heads_linear"): {},
    ("olmo2", "one_to_one_biases_tied"): {
        "attention_bias": False,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 8.0,
            "beta_slow": 0.5,
        },
    },
    ("qwen2_moe", "wide_heads_tied_unused_experts"): {"norm_topk_prob": False},
    ("qwen2_moe", "one_to_one_no_biases_every_expert_in_every_other_layer"): {"decoder_sparse_step": 1},
    ("smollm3", "wide_heads_tied_small_window"): {"use_sliding_window": False},
    ("smollm3", "one_to_one_untied_linear_list"): {
        "num_hidden_layers": 4,
        "no_rope_layers": None,
        "attention_bias": True,
        "mlp_bias": True,
    },
    ("starcoder2", "wide_heads_tied_small_window"): {"sliding_window": None},
    ("starcoder2", "one_to_one_untied_linear_no_biases"): {},
}

ARCHITECTURES = {"gemma3_text": "gemma3", "gpt_oss": "gpt-oss", "mixtral": "llama", "qwen2_moe": "qwen2moe"}
"""What files call a family, where its name is another."""

CONVERTED_AS_LLAMA = {"granite", "mixtral", "smollm3"}
"""Families of which llama.cpp converts queries and keys so that the two elements that are rotated together lie so."""


def write_gguf(path: Path, directory: Path) -> Path:
    """The checkpoint in `directory` as one GGUF file, in float32."""
    config, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    family = config["model_type"]
    architecture = ARCHITECTURES.get(family, family)
    writer = gguf.GGUFWriter(path, architecture)
    add_settings(writer, config)
    known = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[architecture], config["num_hidden_layers"])
    for name, tensor in as_converted(tensors).items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        shift = 1.0 if "gemma" in family and name.endswith("norm.weight") else 0.0
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        if family in CONVERTED_AS_LLAMA and ("q_proj" in name or "k_proj" in name):
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(stored, (tensor + shift).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def as_converted(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts stacked, and those of gpt-oss taken apart, outputs first; a matrix of one row is a vector."""
    found, each = {}, re.compile(r"(.*)\.experts\.(\d+)\.(.*)")
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if match := each.fullmatch(name):
            stacks.setdefault(f"{match[1]}.experts.{match[3]}", {})[int(match[2])] = tensor
        elif name.endswith(".experts.gate_up_proj"):
            halves = {"gate_proj": tensor[:, :, ::2], "up_proj": tensor[:, :, 1::2]}
            found |= {name.replace("gate_up_proj", f"{part}.weight"): half.mT for part, half in halves.items()}
        elif name.endswith(".experts.down_proj"):
            found[f"{name}.weight"] = tensor.mT
        elif name.endswith(".experts.gate_up_proj_bias"):
            halves = {"gate_proj": tensor[:, ::2], "up_proj": tensor[:, 1::2]}
            found |= {name.replace("gate_up_proj_bias", f"{part}.bias"): half for part, half in halves.items()}
        else:
            found[name.replace("down_proj_bias", "down_proj.bias").replace("sinks", "sinks.weight")] = (
                tensor[0] if name.endswith("shared_expert_gate.weight") else tensor
            )
    for name, experts in stacks.items():  # of Mixtral under the names of the original release
        if "block_sparse_moe" in name:
            name = name.removeprefix("model.").replace("block_sparse_moe", "feed_forward")
        found[name] = torch.stack([experts[number] for number in sorted(experts)])
    return found


def add_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config["rope_parameters"]
    if "full_attention" in rope:
        writer.add_float32(f"{writer.arch}.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if config["model_type"] == "starcoder2":
        writer.add_layer_norm_eps(config["norm_epsilon"])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if config["model_type"] == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window(config["sliding_window"])
        if config["final_logit_softcapping"] is not None:
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["model_type"] in ("gpt_oss", "mixtral") and config["sliding_window"]:
        writer.add_sliding_window(config["sliding_window"])
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config["model_type"] == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if config["model_type"] == "qwen2_moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if config["model_type"] == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        writer.add_sliding_window(config["sliding_window"])


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_logits_from_a_gguf_file_are_those_of_transformers(tmp_path, family, variant):
    directory = write_checkpoint(tmp_path, family, variant, **CASES[family, variant])
    path = write_gguf(tmp_path / "tiny.gguf", directory)
    source = open_gguf(path, gguf_dialect)
    program = load(source.config, Binder(source, torch.float32, "cpu", str(path)), str(path))
    token_ids = torch.randint(program.shape.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(1))
    model = ReferenceExecutor(program, torch.float32, TorchBackend())
    with torch.no_grad():
        logits = model.logits(model.forward(token_ids, torch.arange(LENGTH), DenseAttention()))
    torch.testing.assert_close(logits, reference_logits(directory, token_ids.tolist()), atol=1e-4, rtol=0)


def header_only(path: Path, family: str, **keys: Any) -> Path:
    """A GGUF file of `family` whose only tensor is an embedding of 8 tokens."""
    writer = gguf.GGUFWriter(path, family)
    sizes = {"block_count": 2, "context_length": 64, "embedding_length": 48, "feed_forward_length": 32}
    sizes |= {"attention.head_count": 3, "attention.key_length": 20, "attention.value_length": 20}
    epsilon = "attention.layer_norm_epsilon" if family == "starcoder2" else "attention.layer_norm_rms_epsilon"
    for key, value in (sizes | {epsilon: 1e-6} | keys).items():
        add = {float: writer.add_float32, bool: writer.add_bool, int: writer.add_uint32}[type(value)]
        add(f"{family}.{key}", value)
    writer.add_tensor("token_embd.weight", torch.zeros(8, 48).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_what_a_gemma2_file_leaves_out_is_what_llama_cpp_takes(tmp_path):
    small = open_gguf(header_only(tmp_path / "small.gguf", "gemma2"), gguf_dialect).config
    assert small["query_pre_attn_scalar"] == 20
    assert (small["attn_logit_softcapping"], small["final_logit_softcapping"]) == (50.0, 30.0)
    assert small["sliding_window"] == 4096
    assert small["tie_word_embeddings"] is True
    largest = open_gguf(header_only(tmp_path / "large.gguf", "gemma2", block_count=46), gguf_dialect).config
    assert largest["query_pre_attn_scalar"] == 16, "Gemma 2 27B scales by hidden size over heads"


def test_what_a_gemma3_file_leaves_out_is_what_llama_cpp_takes(tmp_path):
    small = open_gguf(header_only(tmp_path / "small.gguf", "gemma3"), gguf_dialect).config
    assert (small["model_type"], small["query_pre_attn_scalar"]) == ("gemma3_text", 20)
    assert (small["rope_local_base_freq"], small["final_logit_softcapping"]) == (1e4, None)
    assert small["layer_types"] == ["full_attention"] * 2, "a file without a window has none in any layer"
    sliding = {"attention.sliding_window": 16, "block_count": 62}
    largest = open_gguf(header_only(tmp_path / "large.gguf", "gemma3", **sliding), gguf_dialect).config
    assert largest["query_pre_attn_scalar"] == 16, "Gemma 3 27B scales by hidden size over heads"
    assert (largest["sliding_window"], largest["sliding_window_pattern"]) == (16, 6)


def test_what_a_granite_file_leaves_out_is_what_llama_cpp_takes(tmp_path):
    config = open_gguf(header_only(tmp_path / "tiny.gguf", "granite", logit_scale=4.0), gguf_dialect).config
    assert config["attention_multiplier"] == 20**-0.5
    assert (config["embedding_multiplier"], config["residual_multiplier"], config["logits_scaling"]) == (1.0, 1.0, 4.0)
    for key, others in (
        ("logit_scale", {}),
        ("attention.sliding_window", {"logit_scale": 4.0, "attention.sliding_window": 16}),
    ):
        with pytest.raises(ModelFileError) as caught:
            open_gguf(header_only(tmp_path / "refused.gguf", "granite", **others), gguf_dialect)
        assert caught.value.key == f"granite.{key}"


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("granite", "rope.scaling.finetuned", False),
        ("granite", "embedding_scale", 0.0),
        ("gemma2", "attn_logit_softcapping", 0.0),
        ("gemma2", "final_logit_softcapping", -1.0),
        ("gemma2", "attention.sliding_window", 0),
        ("gemma2", "attention.scale", 0.5),
        ("gemma3", "attn_logit_softcapping", 30.0),
        ("gemma3", "attention.scale", 0.5),
        ("gemma3", "rope.freq_base_swa", 0.0),
        ("olmo2", "attention.sliding_window", 16),
        ("olmo2", "attn_logit_softcapping", 30.0),
        ("smollm3", "attention.sliding_window", 16),
        ("smollm3", "attention.scale", 0.5),
        ("starcoder2", "attention.sliding_window", 16),
        ("starcoder2", "attention.layer_norm_rms_epsilon", 1e-6),
    ],
)
def test_what_a_file_says_that_its_family_does_not_do_is_refused_by_key(tmp_path, family, key, value):
    with pytest.raises(ModelFileError) as caught:
        open_gguf(header_only(tmp_path / "tiny.gguf", family, **{key: value}), gguf_dialect)
    assert caught.value.key == f"{family}.{key}"
