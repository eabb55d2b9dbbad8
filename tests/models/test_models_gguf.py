"""A family's GGUF file, written with the names of the `gguf` package, computes what transformers makes of its weights.

Files are laid out as llama.cpp's conversion lays them out (`convert_hf_to_gguf.py`): what it writes by its own hand,
such as Gemma's norms with one added, is written so here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import add_predictor, cases, reference_logits, write_checkpoint

from penstock.contract.errors import ModelFileError
from penstock.kernels.torch_backend import TorchBackend
from penstock.models import gguf_dialect, load
from penstock.nn.dense import DenseAttention
from penstock.nn.reference import ReferenceExecutor
from penstock.weights.bind import Binder
from penstock.weights.files import open_model
from penstock.weights.gguf_file import open_gguf

LENGTH = 80

# What a GGUF file cannot say has the value that llama.cpp takes for it.
CASES: dict[tuple[str, str], dict[str, Any]] = {
    ("deepseek_v2", "query_latent_groups_yarn"): {},
    ("deepseek_v2", "direct_queries_greedy_biases_tied"): {"attention_bias": False, "mlp_bias": False},
    ("deepseek_v2", "one_head_dense_but_last"): {},
    ("deepseek_v3", "query_latent_groups_yarn"): {},
    ("deepseek_v3", "direct_queries_all_experts_biases_rotated_in_halves"): {
        "attention_bias": False,
        "rope_interleave": True,
    },
    ("deepseek_v3", "one_head_not_normalised"): {},
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
    ("gemma4_text", "wide_heads_untied_own_inputs_shared_keys_small_window"): {},
    ("gemma4_text", "one_to_one_tied_biases_keys_as_values"): {
        "attention_bias": False,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 90000.0, "partial_rotary_factor": 0.5},
        },
    },
    ("gemma4_text", "all_to_one_untied_unused_experts_widest_heads"): {},
    ("gpt_oss", "wide_heads_unused_experts_small_window"): {},
    ("gpt_oss", "all_to_one_narrow_heads"): {},
    ("gpt_oss", "one_to_one_tied_every_expert_no_attention_biases"): {"layer_types": None},
    ("granite", "wide_heads_untied_factors"): {},
    ("mixtral", "wide_heads_tied_unused_experts"): {},
    ("mixtral", "all_to_one_narrow_heads_small_window"): {},
    ("granite", "all_to_one_biases_llama3_large_eps"): {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ("granitemoehybrid", "wide_heads_untied_factors"): {},
    ("granitemoehybrid", "one_to_one_tied_biases_rotated"): {},
    ("granitemoehybrid", "all_to_one_experts"): {},
    ("lfm2", "wide_heads_tied_four_taps"): {},
    ("lfm2", "one_to_one_untied_biases_attention_first"): {"conv_bias": False},
    ("lfm2", "all_to_one_two_taps_no_multiplier"): {},
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
    ("olmo3", "wide_heads_untied_small_window_yarn"): {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e6},
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    },
    ("olmo3", "one_to_one_tied_biases_listed_windows"): {"attention_bias": False},
    ("qwen3_5_text", "wide_heads_every_fourth"): {},
    ("qwen3_5_text", "one_to_one_tied_biases_attention_first"): {},
    ("qwen3_5_text", "all_to_one_one_key_head"): {},
    ("qwen3_5_moe_text", "wide_heads_every_fourth_experts"): {},
    ("qwen3_5_moe_text", "one_to_one_tied_biases_attention_first_experts"): {},
    ("qwen3_5_moe_text", "all_to_one_one_key_head_experts"): {},
    ("qwen3_next", "wide_heads_every_fourth_some_experts"): {},
    ("qwen3_next", "one_to_one_tied_biases_attention_first_some_experts"): {
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
    ("qwen3_next", "all_to_one_one_key_head_some_experts"): {"mlp_only_layers": []},
    ("qwen2_vl", "shared_keys_tied"): {},
    ("qwen2_vl", "one_to_one_untied_linear"): {},
    ("qwen2_5_vl", "shared_keys_untied_yarn"): {},
    ("qwen2_5_vl", "all_to_one_window"): {"use_sliding_window": False},
    ("qwen3_vl", "wide_heads_tied"): {},
    ("qwen3_vl", "one_to_one_untied_biases_yarn"): {"attention_bias": False},
    ("qwen3_vl", "all_to_one_narrow_heads"): {},
    ("qwen3_vl_moe", "wide_heads_untied_unused_experts"): {},
    ("qwen3_vl_moe", "one_to_one_biases_every_expert_in_every_other_layer"): {
        "decoder_sparse_step": 1,
        "attention_bias": False,
    },
    ("qwen3_vl_moe", "all_to_one_narrow_heads_dense_last"): {"mlp_only_layers": []},
    ("qwen2_moe", "wide_heads_tied_unused_experts"): {"norm_topk_prob": False},
    ("qwen2_moe", "one_to_one_no_biases_every_expert_in_every_other_layer"): {"decoder_sparse_step": 1},
    ("seed_oss", "wide_heads_untied"): {},
    ("seed_oss", "one_to_one_tied_other_biases_linear"): {},
    ("seed_oss", "all_to_one_narrow_heads_yarn"): {},
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

ARCHITECTURES = {
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gpt_oss": "gpt-oss",
    "granitemoehybrid": "granitehybrid",
    "mixtral": "llama",
    "olmo3": "olmo2",
    "qwen2_moe": "qwen2moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "qwen2_vl": "qwen2vl",
    "qwen2_5_vl": "qwen2vl",
    "qwen3_vl": "qwen3vl",
    "qwen3_vl_moe": "qwen3vlmoe",
}
"""What files call a family, where its name is another."""

CONVERTED_AS_LLAMA = {"granite", "granitemoehybrid", "mixtral", "smollm3"}
"""Families of which llama.cpp converts queries and keys so that the two elements that are rotated together lie so."""


def write_gguf(path: Path, directory: Path, predicting: Mapping[str, torch.Tensor] | None = None) -> Path:
    """The checkpoint in `directory` as one GGUF file, in float32, followed by the block `predicting` if given."""
    config, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    family = config["model_type"]
    architecture = ARCHITECTURES.get(family, family)
    if "text_config" in config:
        config, tensors = text_alone(config, tensors)
    writer = gguf.GGUFWriter(path, architecture)
    if predicting:
        writer.add_nextn_predict_layers(1)
        config["num_hidden_layers"] += 1
        config["layer_types"].append("full_attention")
    add_settings(writer, config)
    known = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[architecture], config["num_hidden_layers"])
    if family.startswith("deepseek"):
        tensors = convert_deepseek(config, tensors)
    if family in HYBRID:
        tensors = HYBRID[family](config, tensors)
    if family == "gemma4_text":
        tensors = convert_gemma4(tensors)
        add_frequencies(writer, config)
    for name, tensor in as_converted(tensors).items():
        stored = by_hand(name) or names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        shift = 1.0 if family.startswith(("gemma2", "gemma3")) and name.endswith("norm.weight") else 0.0
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        if family in CONVERTED_AS_LLAMA and ("q_proj" in name or "k_proj" in name):
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(stored, (tensor + shift).contiguous().numpy())
    for name, tensor in (predicting or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def text_alone(
    config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """As `Qwen3VLTextModel` and similar do: the vision part's tensors left out, the others named as a text model's."""
    text = {name.replace("language_model.", ""): each for name, each in tensors.items() if "visual." not in name}
    found = {}
    for name, each in text.items():
        if name.endswith(".experts.gate_up_proj"):
            halves = zip(("gate_proj", "up_proj"), each.chunk(2, dim=1), strict=True)
            found |= {name.replace("gate_up_proj", f"{part}.weight"): half for part, half in halves}
        else:
            found[f"{name}.weight" if name.endswith(".experts.down_proj") else name] = each
    deepstack = len(config["vision_config"].get("deepstack_visual_indexes", ()))
    return {**config["text_config"], "model_type": config["model_type"], "deepstack": deepstack}, found


def convert_gemma4(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names as `Gemma4Model` completes them."""
    endings = ("layer_scalar", "experts.gate_up_proj", "experts.down_proj")
    return {f"{name}.weight" if name.endswith(endings) else name: tensor for name, tensor in tensors.items()}


def by_hand(name: str) -> str | None:
    """The names that `Gemma4Model` gives, which the `gguf` package has no Hugging Face names for."""
    endings = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
    return f"blk.{match[1]}.{endings[match[2]]}" if match and match[2] in endings else None


def add_frequencies(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    pairs = full_of(config)["head_dim"] // 2
    turning = int(pairs * config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
    factors = torch.tensor([1.0] * turning + [1e30] * (pairs - turning))
    writer.add_tensor("rope_freqs.weight", factors.numpy())


def full_of(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that layers have if they see all positions."""
    return next(iter(config["per_layer_config"].values()))


def add_gemma4_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """As `Gemma4Model.set_gguf_parameters` does, and the methods that it calls."""
    layers, full = config["num_hidden_layers"], full_of(config)
    slides = [each == "sliding_attention" for each in config["layer_types"]]
    own, inner = layers - config["num_kv_shared_layers"], config["intermediate_size"]
    double = 2 if config["use_double_wide_mlp"] else 1
    kv_heads = config["num_key_value_heads"]
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length([inner if i < own else double * inner for i in range(layers)])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv([kv_heads if each else full.get("num_key_value_heads", kv_heads) for each in slides])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window_pattern(slides)
    writer.add_sliding_window(config["sliding_window"])
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(full["head_dim"])
    for add in (writer.add_key_length_swa, writer.add_value_length_swa, writer.add_rope_dimension_count_swa):
        add(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    if config["final_logit_softcapping"] is not None:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["enable_moe_block"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def convert_deepseek(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As `DeepseekV2Model` does: what makes keys of the latent, transposed, apart from what makes values of it."""
    converted = {}
    for name, tensor in tensors.items():
        if not name.endswith("kv_b_proj.weight"):
            converted[name.replace("e_score_correction_bias", "e_score_correction.bias")] = tensor
            continue
        parts = [config["qk_nope_head_dim"], config["v_head_dim"]]
        keys, values = tensor.unflatten(0, (config["num_attention_heads"], -1)).split(parts, dim=1)
        converted[name.replace("kv_b_proj", "k_b_proj")] = keys.transpose(1, 2)
        converted[name.replace("kv_b_proj", "v_b_proj")] = values
    return converted


def add_deepseek_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_rope_dimension_count(rotated)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config.get("norm_topk_prob"):
        writer.add_expert_weights_norm(True)
    if config.get("n_group"):
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    third = config["model_type"] == "deepseek_v3"
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if third else gguf.ExpertGatingFuncType.SOFTMAX)
    if weight := config["rope_parameters"].get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * weight)


def convert_lfm2(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.squeeze(1) if "conv.conv" in name else tensor for name, tensor in tensors.items()}


def convert_granite_hybrid(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As `Mamba2Model` and `GraniteMoeModel` do; the halves of a fused tensor are named as in a Llama."""
    converted = {}
    for name, tensor in tensors.items():
        stem = name.rpartition(".")[0]
        layer = stem.rpartition(".block_sparse_moe")[0] or stem.rpartition(".shared_mlp")[0]
        shared = f"{layer}.mlp" if not config["num_local_experts"] else f"{layer}.mlp.shared_expert"
        if name.endswith("input_linear.weight"):
            prefix = f"{layer}.mlp.experts" if "block_sparse_moe" in name else shared
            gates, ups = tensor.chunk(2, dim=-2)
            converted |= {f"{prefix}.gate_proj.weight": gates, f"{prefix}.up_proj.weight": ups}
        elif name.endswith("shared_mlp.output_linear.weight"):
            converted[f"{shared}.down_proj.weight"] = tensor
        elif name.endswith("A_log"):
            converted[name] = -tensor.exp()[:, None]
        elif name.endswith("mamba.D"):
            converted[name] = tensor[:, None]
        elif name.endswith("dt_bias"):
            converted[name.replace("dt_bias", "dt_proj.bias")] = tensor
        elif name.endswith("mamba.norm.weight"):
            converted[name] = tensor.view(config["mamba_n_groups"], -1)
        else:
            converted[name] = tensor.squeeze(1) if name.endswith("conv1d.weight") else tensor
    return converted


def convert_qwen35(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As `Qwen3NextModel` does, and then `_LinearAttentionVReorderBase`: value heads go from grouped to tiled."""
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys, width = 2 * key_heads * config["linear_key_head_dim"], config["linear_value_head_dim"]
    order = torch.arange(value_heads).view(key_heads, -1).T.flatten()

    def tiled(tensor: torch.Tensor, width: int = 1) -> torch.Tensor:
        return tensor.unflatten(0, (value_heads, width))[order].flatten(0, 1)

    converted = {}
    for name, tensor in tensors.items():
        part = name.partition(".linear_attn.")[2]
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            tensor = torch.cat((tensor[:keys], tiled(tensor[keys:], width)))
            tensor = tensor.squeeze(1) if part == "conv1d.weight" else tensor
        elif part == "in_proj_z.weight":
            tensor = tiled(tensor, width)
        elif part == "out_proj.weight":
            tensor = tiled(tensor.T, width).T
        elif part in ("in_proj_a.weight", "in_proj_b.weight", "dt_bias", "A_log"):
            tensor = tiled(-tensor.exp() if part == "A_log" else tensor)
        elif name.endswith("norm.weight") and part != "norm.weight":
            tensor = tensor + 1
        converted[name.replace("dt_bias", "dt_proj.bias")] = tensor
    return converted


def convert_qwen3_next(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As `Qwen3NextModel` does: q, k and v of all heads before z; how much is written stays beside the decay."""
    heads, keys = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    converted = {}
    for name, tensor in tensors.items():
        part = name.partition(".linear_attn.")[2]
        if part == "in_proj_qkvz.weight":
            q, k, v, z = tensor.unflatten(0, (heads, -1)).split([keys, keys, values, values], dim=1)
            converted[name.replace("qkvz", "qkv")] = torch.cat([each.flatten(0, 1) for each in (q, k, v)])
            converted[name.replace("qkvz", "z")] = z.flatten(0, 1)
            continue
        if part == "A_log":
            tensor = -tensor.exp()
        elif part == "conv1d.weight":
            tensor = tensor.squeeze(1)
        elif name.endswith("norm.weight") and part != "norm.weight":
            tensor = tensor + 1
        converted[name.replace("dt_bias", "dt_proj.bias")] = tensor
    return converted


HYBRID = {
    "granitemoehybrid": convert_granite_hybrid,
    "lfm2": convert_lfm2,
    "qwen3_5_text": convert_qwen35,
    "qwen3_5_moe_text": convert_qwen35,
    "qwen3_next": convert_qwen3_next,
}
"""What the conversion rearranges of families that carry state."""


def add_hybrid_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    attending = [each in ("attention", "full_attention") for each in config["layer_types"]]
    if not config["model_type"].startswith("qwen3"):
        writer.add_head_count_kv([config["num_key_value_heads"] * attends for attends in attending])
    if config["model_type"] == "lfm2":
        writer.add_shortconv_l_cache(config["conv_L_cache"])
        return
    if config["model_type"] == "granitemoehybrid":
        inner = config["mamba_expand"] * config["hidden_size"]
        sizes = [inner, *(config[f"mamba_{key}"] for key in ("n_heads", "n_groups", "d_state", "d_conv"))]
        writer.add_rope_scaling_finetuned(config.get("position_embedding_type") == "rope")
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    else:
        value_heads = config["linear_num_value_heads"]
        sizes = [value_heads * config["linear_value_head_dim"], value_heads, config["linear_num_key_heads"]]
        sizes += [config["linear_key_head_dim"], config["linear_conv_kernel_dim"]]
        rope, head_dim = config["rope_parameters"], config["head_dim"]
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 0.25)))
        if config["model_type"] != "qwen3_next":
            writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", [not attends for attends in attending])
        writer.add_full_attention_interval(4)
    add = writer.add_ssm_inner_size, writer.add_ssm_time_step_rank, writer.add_ssm_group_count
    add += writer.add_ssm_state_size, writer.add_ssm_conv_kernel
    for write, size in zip(add, sizes, strict=True):
        write(size)


def inner_size(config: dict[str, Any]) -> int:
    """The width of MLPs; LFM2's is adjusted (`LFM2Model._add_feed_forward_length`)."""
    inner = config["intermediate_size"]
    if config["model_type"] != "lfm2" or not config["block_auto_adjust_ff_dim"]:
        return inner
    adjusted, multiple = int(2 * inner / 3), config["block_multiple_of"]
    return multiple * -(-int(config["block_ffn_dim_multiplier"] * adjusted) // multiple)


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
    if config["model_type"] == "gemma4_text":
        add_gemma4_settings(writer, config)
        return
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config["rope_parameters"]
    if "full_attention" in rope:
        if config["model_type"] == "olmo3":
            writer.add_sliding_window_pattern([each == "sliding_attention" for each in config["layer_types"]])
        else:
            writer.add_float32(f"{writer.arch}.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if "intermediate_size" in config:
        writer.add_feed_forward_length(inner_size(config))
    writer.add_head_count(config["num_attention_heads"])
    if config["model_type"] in HYBRID:
        add_hybrid_settings(writer, config)
    deepseek = config["model_type"].startswith("deepseek")
    if deepseek:
        add_deepseek_settings(writer, config)
    elif config["model_type"] not in ("lfm2", "granitemoehybrid"):
        writer.add_head_count_kv(config["num_key_value_heads"])
    if config["model_type"] == "starcoder2":
        writer.add_layer_norm_eps(config["norm_epsilon"])
    else:
        writer.add_layer_norm_rms_eps(config["norm_eps" if config["model_type"] == "lfm2" else "rms_norm_eps"])
    if not deepseek:
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
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast", 32.0))
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow", 1.0))
    if config["model_type"] in ("granite", "granitemoehybrid"):
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window(config["sliding_window"])
        if config["final_logit_softcapping"] is not None:
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["model_type"] in ("gpt_oss", "mixtral", "olmo3") and config["sliding_window"]:
        writer.add_sliding_window(config["sliding_window"])
    if "mrope_section" in rope and config["model_type"] not in HYBRID:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
        if config["model_type"].startswith("qwen3"):
            writer.add_num_deepstack_layers(config["deepstack"])
    if config["model_type"] == "qwen3_vl_moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config["model_type"] == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if config["model_type"] == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        writer.add_sliding_window(config["sliding_window"])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("family", "variant"), cases(CASES, every=True))
def test_logits_from_a_gguf_file_are_those_of_transformers(tmp_path, family, variant):
    directory = write_checkpoint(tmp_path, family, variant, **CASES[family, variant])
    assert_logits_of_transformers(write_gguf(tmp_path / "tiny.gguf", directory), directory)


def assert_logits_of_transformers(path: Path, directory: Path) -> None:
    source = open_gguf(path, gguf_dialect)
    program = load(source.config, Binder(source, torch.float32, "cpu", str(path)), str(path))
    token_ids = torch.randint(program.shape.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(1))
    model = ReferenceExecutor(program, torch.float32, TorchBackend())
    with torch.no_grad():
        logits = model.logits(model.forward(token_ids, torch.arange(LENGTH), DenseAttention()))
    torch.testing.assert_close(logits, reference_logits(directory, token_ids.tolist()), atol=1e-4, rtol=0)


def test_an_older_file_of_deepseek_has_keys_and_values_joined(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "convert_deepseek", lambda config, tensors: tensors)
    monkeypatch.setattr(gguf.GGUFWriter, "add_key_length_mla", gguf.GGUFWriter.add_key_length)
    monkeypatch.setattr(gguf.GGUFWriter, "add_value_length_mla", gguf.GGUFWriter.add_value_length)
    directory = write_checkpoint(tmp_path, "deepseek_v2", "query_latent_groups_yarn")
    path = write_gguf(tmp_path / "tiny.gguf", directory)
    assert "blk.0.attn_kv_b.weight" in open_gguf(path, gguf_dialect).header.tensors
    assert_logits_of_transformers(path, directory)


def test_an_older_file_of_qwen3_next_has_its_delta_nets_joined_as_the_checkpoint_has(tmp_path, monkeypatch):
    def joined(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        stays = {name.replace("qkvz", "qkv"): each for name, each in tensors.items() if "in_proj_qkvz" in name}
        split = convert_qwen3_next(config, tensors)
        return {name: each for name, each in split.items() if "in_proj_z" not in name} | stays

    monkeypatch.setitem(HYBRID, "qwen3_next", joined)
    monkeypatch.setitem(gguf.TENSOR_NAMES, gguf.MODEL_TENSOR.ATTN_QKV, gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.SSM_IN])
    directory = write_checkpoint(tmp_path, "qwen3_next", "wide_heads_every_fourth_some_experts")
    path = write_gguf(tmp_path / "tiny.gguf", directory)
    assert "blk.0.ssm_in.weight" in open_gguf(path, gguf_dialect).header.tensors
    assert_logits_of_transformers(path, directory)


def test_blocks_that_predict_further_tokens_are_left_out(tmp_path):
    directory = write_checkpoint(tmp_path, "qwen3_5_text", "all_to_one_one_key_head")
    predicting = {f"blk.3.nextn.{part}.weight": torch.ones(4) for part in ("enorm", "hnorm", "eh_proj")}
    predicting |= {"blk.3.attn_norm.weight": torch.ones(4), "blk.3.attn_q.weight": torch.ones(4, 4)}
    path = write_gguf(tmp_path / "tiny.gguf", directory, predicting)
    source = open_gguf(path, gguf_dialect)
    binder = Binder(source, torch.float32, "cpu", str(path))
    program = load(source.config, binder, str(path))
    assert (program.shape.num_layers, binder.left_out) == (3, {"model.layers.3.": 5})


def test_the_block_that_predicts_a_second_token_is_that_of_the_directory(tmp_path):
    """Norms are stored plus 1, like all other norms of such a file; the rest is as it was, under other names."""
    directory = write_checkpoint(tmp_path, "qwen3_5_text", "all_to_one_one_key_head")
    add_predictor(directory)
    tensors, own = load_file(directory / "model.safetensors"), {}
    names = {
        "mtp.fc": "nextn.eh_proj",
        "mtp.norm": "nextn.shared_head_norm",
        "mtp.pre_fc_norm_embedding": "nextn.enorm",
        "mtp.pre_fc_norm_hidden": "nextn.hnorm",
        "mtp.layers.0.input_layernorm": "attn_norm",
        "mtp.layers.0.post_attention_layernorm": "post_attention_norm",
        **{f"mtp.layers.0.self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
        **{f"mtp.layers.0.self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
        "mtp.layers.0.self_attn.o_proj": "attn_output",
        **{f"mtp.layers.0.mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    }
    for name, stored in names.items():
        tensor = tensors.pop(f"{name}.weight")
        own[f"blk.3.{stored}.weight"] = tensor + 1.0 if stored.endswith("norm") else tensor
    assert not any(name.startswith("mtp.") for name in tensors)
    path = tmp_path / "whole"
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text((directory / "config.json").read_text())
    source = open_gguf(write_gguf(tmp_path / "tiny.gguf", path, own), gguf_dialect)
    binder = Binder(source, torch.float32, "cpu", str(path), predicts=True)
    of_file = load(source.config, binder, str(path)).predictor
    files = open_model(directory, gguf_dialect)
    of_directory = load(files.config, Binder(files.source, torch.float32, "cpu", "", predicts=True), "").predictor
    assert binder.left_out == {}
    pair = torch.randn(9, 2 * of_file.program.shape.hidden_size, generator=torch.Generator().manual_seed(1))
    outs = [
        ReferenceExecutor(each.program, torch.float32, TorchBackend()).forward_given(
            pair.clone(), torch.arange(9), DenseAttention()
        )
        for each in (of_file, of_directory)
    ]
    torch.testing.assert_close(*outs, atol=1e-5, rtol=0)


def header_only(path: Path, family: str, **keys: Any) -> Path:
    """A GGUF file of `family` whose only tensor is an embedding of 8 tokens."""
    writer = gguf.GGUFWriter(path, family)
    sizes = {"block_count": 2, "context_length": 64, "embedding_length": 48, "feed_forward_length": 32}
    sizes |= {"attention.head_count": 3, "attention.key_length": 20, "attention.value_length": 20}
    epsilon = "attention.layer_norm_epsilon" if family == "starcoder2" else "attention.layer_norm_rms_epsilon"
    for key, value in (sizes | {epsilon: 1e-6} | keys).items():
        adds = {float: writer.add_float32, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
        add = adds[type(value)]
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


_SSM = {"ssm.inner_size": 96, "ssm.time_step_rank": 4, "ssm.group_count": 2, "ssm.state_size": 8, "ssm.conv_kernel": 4}
_EXPERTS = {"expert_count": 4, "expert_used_count": 2}
_DEEPSEEK = _EXPERTS | {"expert_feed_forward_length": 8, "rope.dimension_count": 4, "attention.kv_lora_rank": 16}
OF_HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {"attention.head_count_kv": [0, 3], "shortconv.l_cache": 3},
    "granitehybrid": {"attention.head_count_kv": [0, 3], **_SSM},
    "deepseek2": _DEEPSEEK,
    "qwen3vlmoe": _EXPERTS | {"expert_feed_forward_length": 8},
    "qwen35": _SSM,
    "qwen35moe": _SSM | _EXPERTS,
    "qwen3next": _SSM | _EXPERTS,
}
"""What a file of theirs must say."""


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
        ("olmo2", "attention.sliding_window_pattern", [True, False]),
        ("olmo2", "attn_logit_softcapping", 30.0),
        ("seed_oss", "attention.sliding_window", 16),
        ("smollm3", "attention.sliding_window", 16),
        ("smollm3", "attention.scale", 0.5),
        ("starcoder2", "attention.sliding_window", 16),
        ("starcoder2", "attention.layer_norm_rms_epsilon", 1e-6),
        ("qwen2vl", "attention.sliding_window", 16),
        ("qwen3vl", "attention.sliding_window", 16),
        ("qwen3vlmoe", "attention.sliding_window", 16),
        ("lfm2", "attention.head_count_kv", [0, 0]),
        ("lfm2", "attention.head_count_kv", [1, 3]),
        ("lfm2", "attention.head_count_kv", [3]),
        ("lfm2", "attention.sliding_window", 16),
        ("granitehybrid", "ssm.inner_size", 47),
        ("granitehybrid", "attention.head_count_kv", [3, 3]),
        ("granitehybrid", "ssm.dt_b_c_rms", True),
        ("qwen35", "ssm.inner_size", 47),
        ("qwen35", "nextn_predict_layers", 2),
        ("qwen35", "attention.recurrent_layers", [True]),
        ("deepseek2", "rope.dimension_count", 20),
        ("deepseek2", "attention.head_count_kv", 2),
        ("deepseek2", "expert_gating_func", 3),
        ("deepseek2", "expert_weights_norm", True),
        ("deepseek2", "attention.sliding_window", 16),
        ("qwen35moe", "nextn_predict_layers", 2),
        ("qwen35moe", "expert_gating_func", 2),
        ("qwen3next", "ssm.inner_size", 47),
    ],
)
def test_what_a_file_says_that_its_family_does_not_do_is_refused_by_key(tmp_path, family, key, value):
    keys = OF_HYBRIDS.get(family, {}) | {key: value}
    with pytest.raises(ModelFileError) as caught:
        open_gguf(header_only(tmp_path / "tiny.gguf", family, **keys), gguf_dialect)
    assert caught.value.key == f"{family}.{key}"
