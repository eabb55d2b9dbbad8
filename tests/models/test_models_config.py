"""What a config may say, and how it is refused: by key and value, before any tensor is touched."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.contract.errors import ModelFileError
from penstock.kernels.attention_spec import AttentionSpec
from penstock.models import load
from penstock.models.config_reader import ConfigReader
from penstock.models.families import families
from penstock.models.rope_config import read_rope, without_image_axes
from penstock.nn.operations import Attend, Norm, Rotate
from penstock.nn.rope import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    ProportionalScaling,
    Rope,
    RotaryTable,
    Unscaled,
    YarnScaling,
    yarn_temperature,
)

FILE = "config.json"

LLAMA_LIKE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [1.0, 3.0, 9.0, 27],
    "original_max_position_embeddings": 32,
}


class TouchedError(Exception):
    """The config was accepted: the model now asks for its tensors."""


class NoTensors:
    """A binder that must not be reached."""

    device = torch.device("cpu")
    predicts = False

    def has(self, name):
        return False

    def take(self, name, shape, dtype=None):
        raise TouchedError

    def take_fused(self, parts):
        raise TouchedError

    def take_linear(self, parts, *, transposed=False):
        raise TouchedError

    def take_table(self, name, shape):
        raise TouchedError

    def split_rows(self, name, shape, parts):
        raise TouchedError

    def shape(self, name):
        raise TouchedError

    def differ(self, first, second):
        raise TouchedError

    def leave_out(self, part):
        pass

    def ignore(self, name):
        raise TouchedError

    def finish(self):
        raise TouchedError


ENCODER = {"num_key_value_heads": 4, "hidden_act": "gelu"}
HYBRID = {
    "bert": ENCODER,
    "roberta": ENCODER,
    "xlm_roberta": ENCODER,
    "modernbert": {"num_key_value_heads": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4},
    "deepseek_v2": {"num_key_value_heads": LLAMA_LIKE["num_attention_heads"], "num_experts_per_tok": 2},
    "deepseek_v3": {"num_key_value_heads": LLAMA_LIKE["num_attention_heads"]},
    "mistral3": {"text_config": LLAMA_LIKE},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5": {"text_config": {**LLAMA_LIKE, "layer_types": ["linear_attention", "full_attention"]}},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_moe": {"text_config": {**LLAMA_LIKE, "layer_types": ["linear_attention", "full_attention"]}},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
}


def config_of(family, **changes):
    base = GPT2 if family == "gpt2" else LLAMA_LIKE | HYBRID.get(family, {})
    return {"model_type": family, **base, **changes}


def refusal(config):
    with pytest.raises(ModelFileError) as caught:
        load(config, NoTensors(), FILE)
    assert str(caught.value).startswith(f"{FILE}: {caught.value.key}: ")
    return caught.value


def is_accepted(config):
    with pytest.raises(TouchedError):
        load(config, NoTensors(), FILE)
    return True


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"block_ff_dim": 100},
        {"block_multiple_of": 7},
        {"block_ffn_dim_multiplier": 1.7, "block_multiple_of": 5},
        {"block_auto_adjust_ff_dim": False},
    ],
)
def test_lfm2_has_mlps_as_wide_as_those_of_transformers(settings, monkeypatch):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {**LLAMA_LIKE, **settings}
    sizes.pop("model_type", None)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model("lfm2", **sizes))
    assert config_seen(monkeypatch, {"model_type": "lfm2", **sizes}).inner_size == len(
        theirs.model.layers[0].feed_forward.w1.weight
    )


@pytest.mark.parametrize("family", families())
def test_a_plain_config_is_accepted(family):
    assert is_accepted(config_of(family))


@pytest.mark.parametrize(
    "name",
    [
        "mamba",
        "config_reader",
        "gemma4_config",
        "families",
        "decoder_config",
        "os",
        "..llama",
        "llama.x",
        "",
        "Llama",
        "__init__",
    ],
)
def test_an_unknown_model_type_is_refused_and_the_known_ones_listed(name):
    error = refusal({**LLAMA_LIKE, "model_type": name})
    assert error.key == "model_type"
    known = (
        "bert, deepseek_v2, deepseek_v3, gemma2, gemma3, gemma3_text, gemma4, gemma4_text, gpt2, gpt_oss, granite,"
        " granitemoehybrid, lfm2, llama, mistral, mistral3, mixtral, modernbert,"
        " olmo2, olmo3, phi3, qwen2, qwen2_5_vl, qwen2_moe, qwen2_vl, qwen3, qwen3_5, qwen3_5_moe, qwen3_5_moe_text,"
        " qwen3_5_text, qwen3_moe, qwen3_next, qwen3_vl, qwen3_vl_moe,"
        " roberta, seed_oss, smollm3, starcoder2, xlm_roberta"
    )
    assert known in str(error)


@pytest.mark.parametrize("value", [None, 3, ["llama"], {"a": 1}])
def test_a_model_type_that_is_no_string_is_refused(value):
    assert refusal({**LLAMA_LIKE, "model_type": value}).key == "model_type"


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "hidden_act", "gelu"),
        ("llama", "hidden_act", 1),
        ("llama", "quantization_config", "gptq"),
        ("llama", "compression_config", {"bits": 8}),
        ("llama", "hidden_size", 0),
        ("llama", "hidden_size", None),
        ("llama", "hidden_size", 32.0),
        ("llama", "hidden_size", "32"),
        ("llama", "num_hidden_layers", 10**9),
        ("llama", "num_hidden_layers", True),
        ("llama", "num_hidden_layers", -1),
        ("llama", "vocab_size", 10**12),
        ("llama", "intermediate_size", 10**400),
        ("llama", "max_position_embeddings", 10**10),
        ("llama", "num_key_value_heads", 3),
        ("llama", "num_key_value_heads", 8),
        ("llama", "num_attention_heads", 6),
        ("llama", "head_dim", 7),
        ("llama", "head_dim", 0),
        ("llama", "rms_norm_eps", math.nan),
        ("llama", "rms_norm_eps", math.inf),
        ("llama", "rms_norm_eps", -1e-6),
        ("llama", "rms_norm_eps", "1e-6"),
        ("llama", "rms_norm_eps", True),
        ("llama", "attention_bias", "yes"),
        ("llama", "mlp_bias", 1),
        ("llama", "tie_word_embeddings", 0),
        ("llama", "rope_theta", 0),
        ("llama", "rope_scaling", "linear"),
        ("llama", "partial_rotary_factor", 0.5),
        ("llama", "layer_types", ["full_attention", "sliding_attention"]),
        ("llama", "layer_types", ["full_attention"]),
        ("llama", "layer_types", ["full_attention", "linear_attention"]),
        ("llama", "layer_types", ["full_attention", ["x"]]),
        ("mistral", "sliding_window", 0),
        ("mistral", "sliding_window", "none"),
        ("phi3", "attention_bias", True),
        ("phi3", "sliding_window", -1),
        ("phi3", "partial_rotary_factor", 0.1),
        ("phi3", "head_dim", 7),
        ("qwen2", "use_sliding_window", "no"),
        ("qwen2", "layer_types", ["full_attention", "sliding_attention"]),
        ("qwen3", "attention_bias", None.__class__),
        ("gemma2", "hidden_activation", "gelu"),
        ("gemma2", "hidden_act", "silu"),
        ("gemma2", "use_bidirectional_attention", True),
        ("gemma2", "attention_bias", 0),
        ("gemma2", "query_pre_attn_scalar", 0),
        ("gemma2", "query_pre_attn_scalar", "256"),
        ("gemma2", "attn_logit_softcapping", 0.0),
        ("gemma2", "attn_logit_softcapping", -50.0),
        ("gemma2", "attn_logit_softcapping", math.inf),
        ("gemma2", "final_logit_softcapping", math.nan),
        ("gemma2", "final_logit_softcapping", "30"),
        ("gemma2", "final_logit_softcapping", False),
        ("gemma2", "sliding_window", 0),
        ("gemma2", "sliding_window", None),
        ("gemma2", "layer_types", ["sliding_attention"]),
        ("gemma2", "head_dim", 7),
        ("gemma3_text", "hidden_activation", "gelu"),
        ("gemma3_text", "use_bidirectional_attention", "all"),
        ("gemma3_text", "attn_logit_softcapping", 50.0),
        ("gemma3_text", "final_logit_softcapping", 0.0),
        ("gemma3_text", "query_pre_attn_scalar", 0),
        ("gemma3_text", "sliding_window", None),
        ("gemma3_text", "sliding_window_pattern", 0),
        ("gemma3_text", "rope_local_base_freq", 0),
        ("gemma3_text", "layer_types", ["sliding_attention"]),
        ("gemma3_text", "head_dim", 7),
        ("gemma4_text", "hidden_activation", "gelu"),
        ("gemma4_text", "use_bidirectional_attention", "all"),
        ("gemma4_text", "rope_theta", 1e4),
        ("gemma4_text", "rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ("gemma4_text", "layer_types", ["full_attention", "sliding_attention"]),
        ("gemma4_text", "sliding_window", 0),
        ("gemma4_text", "num_kv_shared_layers", 1),
        ("gemma4_text", "num_kv_shared_layers", 3),
        ("gemma4_text", "use_double_wide_mlp", 1),
        ("gemma4_text", "attention_k_eq_v", "yes"),
        ("gemma4_text", "global_head_dim", 7),
        ("gemma4_text", "head_dim", 7),
        ("gemma4_text", "vocab_size_per_layer_input", 63),
        ("gemma4_text", "hidden_size_per_layer_input", -1),
        ("gemma4_text", "final_logit_softcapping", 0.0),
        ("gemma4_text", "attention_bias", 0),
        ("gemma4_text", "enable_moe_block", 1),
        ("gemma4", "text_config", 3),
        ("gemma3", "text_config", 3),
        ("gemma3", "tie_word_embeddings", 1),
        ("olmo2", "hidden_act", "gelu"),
        ("olmo2", "attention_bias", "no"),
        ("olmo2", "layer_types", ["full_attention", "sliding_attention"]),
        ("olmo3", "hidden_act", "gelu"),
        ("olmo3", "attention_bias", "no"),
        ("olmo3", "sliding_window", 0),
        ("olmo3", "sliding_window", None),
        ("olmo3", "layer_types", ["sliding_attention"]),
        ("qwen3_moe", "num_experts", 0),
        ("qwen3_moe", "num_experts_per_tok", 129),
        ("qwen3_moe", "norm_topk_prob", 1),
        ("qwen3_moe", "moe_intermediate_size", 0),
        ("qwen3_moe", "decoder_sparse_step", 0),
        ("qwen3_moe", "mlp_only_layers", 1),
        ("qwen3_moe", "mlp_only_layers", "1"),
        ("qwen3_moe", "hidden_act", "gelu"),
        ("qwen3_moe", "layer_types", ["full_attention", "sliding_attention"]),
        ("qwen2_moe", "num_experts", 0),
        ("qwen2_moe", "num_experts_per_tok", 61),
        ("qwen2_moe", "shared_expert_intermediate_size", 0),
        ("qwen2_moe", "qkv_bias", 1),
        ("qwen2_moe", "mlp_only_layers", 1),
        ("qwen2_moe", "hidden_act", "gelu"),
        ("mixtral", "num_local_experts", 0),
        ("mixtral", "num_experts_per_tok", 9),
        ("mixtral", "sliding_window", 0),
        ("mixtral", "hidden_act", "gelu"),
        ("gpt_oss", "num_local_experts", 0),
        ("gpt_oss", "num_experts_per_tok", 129),
        ("gpt_oss", "swiglu_limit", 6.0),
        ("gpt_oss", "swiglu_alpha", 1.5),
        ("gpt_oss", "hidden_act", "gelu"),
        ("gpt_oss", "attention_bias", 1),
        ("gpt_oss", "sliding_window", 0),
        ("gpt_oss", "sliding_window", None),
        ("gpt_oss", "layer_types", ["sliding_attention"]),
        ("granitemoehybrid", "hidden_act", "gelu"),
        ("granitemoehybrid", "layer_types", ["mamba", "mamba"]),
        ("granitemoehybrid", "layer_types", ["mamba", "conv"]),
        ("granitemoehybrid", "mamba_n_heads", 5),
        ("granitemoehybrid", "mamba_d_head", 3),
        ("granitemoehybrid", "mamba_d_conv", 1),
        ("granitemoehybrid", "mamba_conv_bias", 1),
        ("granitemoehybrid", "time_step_limit", [0.0, 1.0]),
        ("granitemoehybrid", "position_embedding_type", "alibi"),
        ("granitemoehybrid", "num_local_experts", -1),
        ("granitemoehybrid", "residual_multiplier", 0.0),
        ("deepseek_v2", "num_key_value_heads", 1),
        ("deepseek_v2", "num_experts_per_tok", 65),
        ("deepseek_v2", "topk_method", "noaux_tc"),
        ("deepseek_v2", "norm_topk_prob", True),
        ("deepseek_v2", "scoring_func", "sigmoid"),
        ("deepseek_v2", "qk_rope_head_dim", 7),
        ("deepseek_v2", "kv_lora_rank", 0),
        ("deepseek_v2", "q_lora_rank", 0),
        ("deepseek_v2", "moe_layer_freq", 2),
        ("deepseek_v2", "mlp_bias", 1),
        ("deepseek_v3", "topk_method", "greedy"),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "n_group", 7),
        ("deepseek_v3", "n_group", 256),
        ("deepseek_v3", "topk_group", 9),
        ("deepseek_v3", "rope_interleave", 1),
        ("deepseek_v3", "first_k_dense_replace", -1),
        ("deepseek_v3", "v_head_dim", 0),
        ("qwen3_5", "text_config", 3),
        ("qwen3_5_text", "hidden_act", "gelu"),
        ("qwen3_5_text", "layer_types", ["linear_attention", "linear_attention"]),
        ("qwen3_5_text", "linear_num_value_heads", 17),
        ("qwen3_5_text", "linear_key_head_dim", 0),
        ("qwen3_5_text", "linear_conv_kernel_dim", 1),
        ("qwen3_5_text", "partial_rotary_factor", 1.5),
        ("qwen3_5_text", "attention_bias", 1),
        ("qwen3_5_moe", "text_config", 3),
        ("qwen3_5_moe_text", "num_experts", 0),
        ("qwen3_5_moe_text", "num_experts_per_tok", 257),
        ("qwen3_5_moe_text", "shared_expert_intermediate_size", 0),
        ("qwen3_next", "num_experts_per_tok", 513),
        ("qwen3_next", "decoder_sparse_step", 0),
        ("qwen3_next", "mlp_only_layers", "all"),
        ("qwen3_next", "norm_topk_prob", 1),
        ("qwen3_next", "linear_num_value_heads", 17),
        ("mistral3", "text_config", 3),
        ("mistral3", "tie_word_embeddings", 1),
        ("qwen2_vl", "text_config", 3),
        ("qwen2_vl", "head_dim", 20),
        ("qwen2_vl", "use_sliding_window", "no"),
        ("qwen2_5_vl", "text_config", 3),
        ("qwen2_5_vl", "head_dim", 20),
        ("qwen2_5_vl", "layer_types", ["full_attention", "sliding_attention"]),
        ("qwen3_vl", "text_config", 3),
        ("qwen3_vl", "use_sliding_window", True),
        ("qwen3_vl", "hidden_act", "gelu"),
        ("qwen3_vl", "attention_bias", 1),
        ("qwen3_vl", "layer_types", ["full_attention", "sliding_attention"]),
        ("qwen3_vl_moe", "text_config", 3),
        ("qwen3_vl_moe", "norm_topk_prob", False),
        ("qwen3_vl_moe", "use_sliding_window", True),
        ("qwen3_vl_moe", "num_experts", 0),
        ("qwen3_vl_moe", "num_experts_per_tok", 61),
        ("qwen3_vl_moe", "mlp_only_layers", 1),
        ("lfm2", "layer_types", ["conv", "conv"]),
        ("lfm2", "layer_types", ["conv", "sliding_attention"]),
        ("lfm2", "full_attn_idxs", []),
        ("lfm2", "conv_L_cache", 1),
        ("lfm2", "conv_bias", 1),
        ("lfm2", "block_auto_adjust_ff_dim", "yes"),
        ("lfm2", "block_multiple_of", 0),
        ("lfm2", "block_ffn_dim_multiplier", -1.0),
        ("lfm2", "block_ff_dim", 0),
        ("lfm2", "tie_embedding", 1),
        ("seed_oss", "hidden_act", "gelu"),
        ("seed_oss", "attention_bias", 1),
        ("seed_oss", "attention_out_bias", "no"),
        ("seed_oss", "mlp_bias", 0),
        ("seed_oss", "layer_types", ["full_attention", "sliding_attention"]),
        ("smollm3", "hidden_act", "gelu"),
        ("smollm3", "attention_bias", 1),
        ("smollm3", "mlp_bias", "no"),
        ("smollm3", "no_rope_layers", [1]),
        ("smollm3", "no_rope_layers", []),
        ("smollm3", "no_rope_layers", 4),
        ("smollm3", "no_rope_layer_interval", 0),
        ("smollm3", "use_sliding_window", 1),
        ("smollm3", "layer_types", ["full_attention", "sliding_attention"]),
        ("granite", "hidden_act", "gelu"),
        ("granite", "attention_bias", 0),
        ("granite", "mlp_bias", "no"),
        ("granite", "embedding_multiplier", 0),
        ("granite", "attention_multiplier", math.inf),
        ("granite", "residual_multiplier", -0.22),
        ("granite", "residual_multiplier", "0.22"),
        ("granite", "logits_scaling", 0.0),
        ("granite", "logits_scaling", True),
        ("granite", "layer_types", ["full_attention", "sliding_attention"]),
        ("starcoder2", "hidden_act", "silu"),
        ("starcoder2", "use_bias", 1),
        ("starcoder2", "norm_epsilon", -1e-5),
        ("starcoder2", "norm_epsilon", "1e-5"),
        ("starcoder2", "sliding_window", 0),
        ("starcoder2", "head_dim", 7),
        ("gpt2", "activation_function", "silu"),
        ("gpt2", "scale_attn_weights", False),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("gpt2", "reorder_and_upcast_attn", True),
        ("gpt2", "add_cross_attention", True),
        ("gpt2", "n_inner", 0),
        ("gpt2", "n_head", 5),
        ("gpt2", "n_head", 0),
        ("gpt2", "n_embd", 10**9),
        ("gpt2", "n_layer", 10**9),
        ("gpt2", "n_positions", False),
        ("gpt2", "layer_norm_epsilon", None.__class__),
    ],
)
def test_a_value_that_cannot_be_honoured_is_refused_by_key(family, key, value):
    assert refusal(config_of(family, **{key: value})).key == key


@pytest.mark.parametrize(
    ("config", "expected"), [({}, 50.0), ({"cap": None}, None), ({"cap": 30}, 30.0), ({"cap": 2.5}, 2.5)]
)
def test_an_optional_number_tells_null_from_absent(config, expected):
    assert ConfigReader(config, FILE).optional_number("cap", 1.0, 99.0, absent=50.0) == expected


@pytest.mark.parametrize("value", [0.5, 100.0, math.nan, True, "3", [3.0]])
def test_an_optional_number_that_is_none_is_refused_by_key(value):
    with pytest.raises(ModelFileError) as caught:
        ConfigReader({"cap": value}, FILE).optional_number("cap", 1.0, 99.0)
    assert caught.value.key == "cap"


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_size_without_default_is_required(family):
    required = {"num_key_value_heads", "rms_norm_eps"}
    for key in set(config_of(family)) - required:
        config = config_of(family)
        del config[key]
        error = refusal(config)
        assert error.key == key
        assert "is missing" in str(error)


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"rope_type": "ntk", "factor": 4.0}, "rope_type"),
        ({"rope_type": "yarn", "factor": 0.5}, "factor"),
        ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 1.0}, "beta_fast"),
        ({"rope_type": "yarn", "factor": 4.0, "beta_slow": -1.0}, "beta_slow"),
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}, "rope_theta"),
        ({"rope_type": "yarn", "factor": 4.0, "truncate": 1}, "truncate"),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 0}, "attention_factor"),
        ({"rope_type": "yarn", "factor": 4.0, "short_factor": [1.0]}, "short_factor"),
        ({"type": "dynamic", "factor": 4.0}, "type"),
        ({"rope_type": "llama3", "type": "linear"}, "type"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0.5}, "factor"),
        ({"rope_type": "linear", "factor": True}, "factor"),
        ({"rope_type": "linear", "factor": 2.0, "mrope_section": [1, 2]}, "mrope_section"),
        ({"rope_type": "default", "factor": 2.0}, "factor"),
        ({"rope_type": "default", "rope_theta": "big"}, "rope_theta"),
        ({"rope_type": "default", "partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor"),
        ({**LLAMA3, "low_freq_factor": None}, "low_freq_factor"),
        ({**LLAMA3, "original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        ({**LONGROPE, "short_factor": None}, "short_factor"),
        ({**LONGROPE, "short_factor": [1.0, 1.5, 2.0]}, "short_factor"),
        ({**LONGROPE, "long_factor": [1.0, 3.0, 0.0, 9.0]}, "long_factor"),
        ({**LONGROPE, "factor": 0.5}, "factor"),
        ({**LONGROPE, "attention_factor": 0}, "attention_factor"),
        ({**LONGROPE, "short_mscale": 1.1}, "short_mscale"),
        ({**LONGROPE, "original_max_position_embeddings": None}, "original_max_position_embeddings"),
        ({**LONGROPE, "original_max_position_embeddings": 1}, "original_max_position_embeddings"),
        ({"rope_type": "factors"}, "factors"),
        ({"rope_type": "factors", "factors": [1.0]}, "factors"),
        ({"rope_type": "factors", "factors": [1.0, 0.0, 1.0, 1.0]}, "factors"),
        ({"rope_type": "factors", "factors": [1.0, 10**400, 1.0, 1.0]}, "factors"),
    ],
)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_rotary_parameters_are_refused_by_dotted_key(spelling, section, key):
    assert refusal(config_of("llama", **{spelling: section})).key == f"{spelling}.{key}"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, Rope(10000.0, Unscaled())),
        ({"rope_theta": 5e5}, Rope(5e5, Unscaled())),
        ({"rope_theta": 500000, "rope_scaling": None}, Rope(5e5, Unscaled())),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}, Rope(5e5, LinearScaling(2.0))),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.5}}, Rope(1e6, LinearScaling(2.5))),
        ({"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 1e4}, Rope(1e6, Unscaled())),
        ({"rope_scaling": LLAMA3}, Rope(1e4, Llama3Scaling(8.0, 1.0, 4.0, 32))),
        (
            {"rope_scaling": {**LLAMA3, "type": "llama3", "original_max_position_embeddings": None}},
            Rope(1e4, Llama3Scaling(8.0, 1.0, 4.0, 128)),
        ),
        (
            {"rope_scaling": {"rope_type": "factors", "factors": [1, 2, 3.5, 4]}},
            Rope(1e4, FrequencyFactors((1.0, 2.0, 3.5, 4.0))),
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2},
                "rope_parameters": {"rope_type": "linear", "factor": 2.0},
            },
            Rope(1e4, LinearScaling(2.0)),
        ),
    ],
)
def test_both_spellings_of_rotary_parameters_are_read(config, expected):
    assert read_rope(ConfigReader(config, FILE), head_dim=8, max_positions=128) == expected


@pytest.mark.parametrize("config", [{}, {"rope_parameters": {"rope_type": "default"}}, {"rope_theta": None}])
def test_a_base_that_is_left_out_is_the_familys(config):
    assert read_rope(ConfigReader(config, FILE), head_dim=8, max_positions=128, theta=2e6) == Rope(2e6)
    stated = read_rope(ConfigReader({**config, "rope_theta": 1e5}, FILE), head_dim=8, max_positions=128, theta=2e6)
    assert stated == Rope(1e5)


def test_the_length_that_is_served_chooses_the_factors_of_longrope():
    amplitude = math.sqrt(1 + math.log(4) / math.log(32))  # 128 positions of 32 in the pretraining, whatever is served
    short = Rope(1e4, FrequencyFactors((1.0, 1.5, 2.0, 2.5)), amplitude=amplitude)
    long = Rope(1e4, FrequencyFactors((1.0, 3.0, 9.0, 27.0)), amplitude=amplitude)
    for section in (LONGROPE, {**LONGROPE, "rope_type": "su"}, {**LONGROPE, "original_max_position_embeddings": None}):
        config = {"rope_scaling": section, "original_max_position_embeddings": 32}
        for served, expected in ((None, long), (128, long), (33, long), (32, short), (1, short)):
            reader = ConfigReader(config, FILE, max_model_len=served)
            assert read_rope(reader, head_dim=8, max_positions=128) == expected
    unextended = read_rope(ConfigReader({"rope_scaling": LONGROPE}, FILE), head_dim=8, max_positions=32)
    assert unextended == replace(short, amplitude=1.0)


def test_yarn_extends_the_context_and_is_warmer_for_it():
    section = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    scaling = YarnScaling(1e4, 4.0, 32)
    for config, expected in (
        ({"rope_scaling": section}, Rope(1e4, scaling, amplitude=0.1 * math.log(4.0) + 1.0)),
        ({"rope_scaling": {**section, "attention_factor": 1.5}}, Rope(1e4, scaling, amplitude=1.5)),
        ({"rope_scaling": {**section, "mscale": 1.0, "mscale_all_dim": 1}}, Rope(1e4, scaling, amplitude=1.0)),
        (
            {"rope_scaling": {**section, "truncate": False, "attention_factor": 2, "beta_fast": 9, "beta_slow": 2}},
            Rope(1e4, replace(scaling, truncate=False, fast=9.0, slow=2.0), amplitude=2.0),
        ),
    ):
        rope = read_rope(ConfigReader(config, FILE), head_dim=8, max_positions=64)
        assert rope == expected
        assert rope.reaches == 128
    assert read_rope(ConfigReader({}, FILE), head_dim=8, max_positions=64).reaches == 0


@pytest.mark.parametrize(("positions", "served"), [(64, 128), (128, 128), (512, 512)])
def test_a_config_that_turns_yarn_on_need_not_say_how_far_it_reaches(positions, served, monkeypatch):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    seen = config_seen(monkeypatch, config_of("qwen3", max_position_embeddings=positions, rope_scaling=yarn))
    assert seen.shape.max_positions == served


def test_yarn_beyond_any_context_is_refused():
    yarn = {"rope_type": "yarn", "factor": 1e6, "original_max_position_embeddings": 32}
    assert refusal(config_of("qwen3", rope_scaling=yarn)).key == "rope_scaling.factor"


def test_heads_are_rotated_in_part_where_the_family_says_so():
    for config in ({"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}):
        rope = read_rope(ConfigReader(config, FILE), head_dim=8, max_positions=128, partial=True)
        assert rope == Rope(1e4, share=0.5)
        assert rope.width(8) == 4
    assert read_rope(ConfigReader({}, FILE), head_dim=8, max_positions=128, partial=True) == Rope(1e4)


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"type": "mrope", "mrope_section": [1, 2, 1]}, Rope(1e6)),
        ({"rope_type": "default", "type": "default", "mrope_section": [2, 1, 1]}, Rope(1e6)),
        ({"rope_type": "default", "mrope_interleaved": True, "mrope_section": [2, 1, 1]}, Rope(1e6)),
        ({"type": "linear", "factor": 2.0, "mrope_section": [1, 2, 1]}, Rope(1e6, LinearScaling(2.0))),
    ],
)
def test_which_pairs_turn_by_which_axis_of_an_image_is_nothing_to_text(spelling, section, expected):
    reader = without_image_axes(ConfigReader({"rope_theta": 1e6, spelling: section}, FILE))
    assert read_rope(reader, head_dim=8, max_positions=128) == expected


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_rotary_embedding_of_a_model_that_sees_is_refused_as_any_other(key):
    for section, refused in ((3, key), ({"rope_type": "mrope", "beta": 1}, f"{key}.beta")):
        with pytest.raises(ModelFileError) as caught:
            read_rope(without_image_axes(ConfigReader({key: section}, FILE)), head_dim=8, max_positions=128)
        assert caught.value.key == refused


@pytest.mark.parametrize("value", [0, 0.1, 1.5, -1, "half", math.nan])
def test_a_share_of_a_head_that_cannot_be_rotated_is_refused(value):
    for config, key in (
        ({"partial_rotary_factor": value}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": value}}, "rope_parameters.partial_rotary_factor"),
    ):
        with pytest.raises(ModelFileError) as caught:
            read_rope(ConfigReader(config, FILE), head_dim=8, max_positions=128, partial=True)
        assert caught.value.key == key


def test_two_spellings_that_disagree_are_refused():
    sections = {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "default"}}
    assert refusal(config_of("llama", **sections)).key == "rope_scaling"


def test_two_pretraining_lengths_that_disagree_are_refused():
    config = config_of("llama", rope_scaling=LLAMA3, original_max_position_embeddings=64)
    assert refusal(config).key == "original_max_position_embeddings"


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": None},
        {"num_key_value_heads": None},
        {"head_dim": None},
        {"head_dim": 20},
        {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10},
        {"partial_rotary_factor": 1},
        {"pretraining_tp": 4, "torch_dtype": "bfloat16", "use_cache": False, "attention_dropout": 0.1},
        {"quantization_config": None},
        {"layer_types": ["full_attention", "full_attention"]},
    ],
)
def test_neutral_and_derived_values_are_accepted(changes):
    assert is_accepted(config_of("llama", **changes))


FULL, SLIDING = "full_attention", "sliding_attention"
PLAIN = {"rope_parameters": {"rope_type": "default"}}


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("mistral", {"sliding_window": None}, (None, None)),
        ("mistral", {"sliding_window": 99}, (99, 99)),
        ("mistral", {"sliding_window": 99, "layer_types": [FULL, SLIDING]}, (None, 99)),
        ("mistral", {}, (4096, 4096)),
        ("gemma2", {}, (4096, None)),
        ("gemma2", {"sliding_window": 99}, (99, None)),
        ("gemma2", {"sliding_window": 99, "layer_types": [FULL, SLIDING]}, (None, 99)),
        ("gemma2", {"sliding_window": None, "layer_types": [FULL, FULL]}, (None, None)),
        ("gemma3_text", {}, (4096, 4096)),
        ("gemma3_text", {"sliding_window": 99, "sliding_window_pattern": 2}, (99, None)),
        ("gemma3_text", {"sliding_window": None, "layer_types": [FULL, FULL]}, (None, None)),
        ("gemma4_text", {}, (512, None)),
        ("gemma4_text", {"sliding_window": 99, "layer_types": [FULL, FULL]}, (None, None)),
        ("olmo2", {"layer_types": [FULL, FULL]}, (None, None)),
        ("olmo3", {}, (4096, 4096)),
        ("olmo3", {"sliding_window": 99, "layer_types": [FULL, SLIDING]}, (None, 99)),
        ("olmo3", {"sliding_window": None, "layer_types": [FULL, FULL]}, (None, None)),
        ("qwen2", {"sliding_window": 99}, (None, None)),
        ("qwen2", {"sliding_window": 99, "use_sliding_window": True}, (None, None)),
        ("qwen2", {"sliding_window": 99, "use_sliding_window": True, "max_window_layers": 2}, (None, None)),
        ("qwen2", {"sliding_window": 99, "use_sliding_window": True, "max_window_layers": 1}, (None, 99)),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, (4096, 4096)),
        (
            "qwen3",
            {"sliding_window": 99, "use_sliding_window": True, "max_window_layers": 0, "layer_types": [FULL, FULL]},
            (None, None),
        ),
        ("phi3", {}, (None, None)),
        ("phi3", {"sliding_window": 99}, (99, 99)),
        ("qwen3", {"sliding_window": 99, "use_sliding_window": True, "layer_types": [FULL, SLIDING]}, (None, 99)),
        ("qwen2_vl", {"sliding_window": 99, "use_sliding_window": True}, (None, None)),
        ("qwen2_5_vl", {"sliding_window": 99, "use_sliding_window": True, "max_window_layers": 1}, (None, 99)),
        ("qwen3_moe", {"sliding_window": 99}, (None, None)),
        ("mixtral", {}, (None, None)),
        ("mixtral", {"sliding_window": 99, "layer_types": [FULL, SLIDING]}, (99, 99)),
        ("gpt_oss", PLAIN, (128, None)),
        ("gpt_oss", {**PLAIN, "sliding_window": 99}, (99, None)),
        ("gpt_oss", {**PLAIN, "sliding_window": 99, "layer_types": [FULL, SLIDING]}, (None, 99)),
        ("gpt_oss", {**PLAIN, "sliding_window": None, "layer_types": [FULL, FULL]}, (None, None)),
        ("qwen2_moe", {"sliding_window": 99}, (None, None)),
        ("qwen2_moe", {"sliding_window": 99, "use_sliding_window": True}, (99, None)),
        ("qwen2_moe", {"sliding_window": 99, "use_sliding_window": True, "max_window_layers": 0}, (None, None)),
        ("qwen2_moe", {"use_sliding_window": True, "layer_types": [FULL, SLIDING]}, (None, 4096)),
        ("smollm3", {"sliding_window": 99}, (None, None)),
        ("starcoder2", {}, (None, None)),
        ("starcoder2", {"sliding_window": 99}, (99, 99)),
        ("starcoder2", {"sliding_window": 99, "layer_types": [FULL, SLIDING]}, (99, 99)),
        ("smollm3", {"use_sliding_window": True, "no_rope_layers": [0, 1]}, (None, None)),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 99}, (None, None)),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 99, "no_rope_layers": [0, 1]}, (99, None)),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 99, "no_rope_layer_interval": 1}, (99, 99)),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 99, "max_window_layers": 2}, (99, 99)),
    ],
)
def test_each_layer_has_the_window_that_its_config_says(family, changes, windows, monkeypatch):
    seen = config_seen(monkeypatch, config_of(family, max_position_embeddings=8192, **changes))
    assert seen.windows == windows
    assert seen.shape.max_positions == 8192, "a window caps what a layer sees, not the context"


MADE_BY = {
    "mistral3": "mistral",
    "olmo3": "olmo2",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}
"""The family whose layers a family's text part has, where its file only says in what the two differ."""


def config_seen(monkeypatch, config):
    """What a family of the shared decoder read, before it asks for a tensor."""
    seen = []

    def parts(config, weights):
        seen.append(config)
        raise TouchedError

    made_by = MADE_BY.get(config["model_type"], config["model_type"])
    monkeypatch.setattr(f"penstock.models.{made_by}.DecoderParts", parts)
    with pytest.raises(TouchedError):
        load(config, NoTensors(), FILE)
    return seen[0]


@pytest.mark.parametrize(
    "family",
    [
        *("gemma2", "gpt_oss", "granite", "lfm2", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen2_moe"),
        *(
            "qwen2_vl",
            "qwen2_5_vl",
            "qwen3",
            "qwen3_moe",
            "qwen3_vl",
            "qwen3_vl_moe",
            "seed_oss",
            "smollm3",
            "starcoder2",
        ),
    ],
)
def test_what_a_decoder_config_leaves_out_has_the_default_of_transformers(family, monkeypatch):
    from transformers import AutoConfig

    config = {key: value for key, value in config_of(family).items() if key != "rms_norm_eps"}
    ours = config_seen(monkeypatch, config)
    sizes = {key: value for key, value in config.items() if key != "model_type"}
    theirs = whole = AutoConfig.for_model(family, **sizes)
    if family in MADE_BY:  # the vision part has a config too, and the whole says whether embeddings are tied
        whole = AutoConfig.for_model(family, text_config=sizes)
        theirs = whole.text_config
    eps = {"starcoder2": "norm_epsilon", "lfm2": "norm_eps"}.get(family, "rms_norm_eps")
    assert ours.eps == getattr(theirs, eps)
    assert ours.tied == whole.tie_word_embeddings
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.shape.head_dim == head_dim
    rope = theirs.rope_parameters
    if family == "gpt_oss":  # positions of a model that was extended by YaRN, whatever else its config says
        assert rope["rope_type"] == "yarn"
        scaling = YarnScaling(
            theta=rope["rope_theta"],
            factor=rope["factor"],
            original_positions=rope["original_max_position_embeddings"],
            fast=rope["beta_fast"],
            slow=rope["beta_slow"],
            truncate=rope["truncate"],
        )
        assert ours.rope == Rope(rope["rope_theta"], scaling, amplitude=yarn_temperature(rope["factor"]))
    else:
        assert ours.rope == Rope(rope["rope_theta"])


class ZeroTensors(NoTensors):
    """A binder whose checkpoint has every tensor that is asked for, full of zeros."""

    dtype, device = torch.float32, torch.device("cpu")

    def take(self, name, shape, dtype=None):
        return torch.zeros(shape)

    def take_fused(self, parts):
        return torch.zeros(sum(shape[0] for _, shape in parts), *parts[0][1][1:])

    def take_linear(self, parts, *, transposed=False):
        return self.take_fused(parts)

    def take_table(self, name, shape):
        return torch.zeros(shape)

    def ignore(self, name):
        pass

    def finish(self):
        pass


def specs_and_softcap(config):
    """How each layer attends, and the softcap of logits."""
    program = load(config, ZeroTensors(), FILE)
    return [each.spec for each in program.operations() if isinstance(each, Attend)], program.head.softcap


def test_what_a_gemma2_config_leaves_out_of_its_scores_has_the_default_of_transformers():
    from transformers import AutoConfig

    theirs = AutoConfig.for_model("gemma2", **LLAMA_LIKE)
    every = AttentionSpec(theirs.query_pre_attn_scalar**-0.5, theirs.attn_logit_softcapping)
    assert theirs.layer_types == [SLIDING, FULL]
    specs, softcap = specs_and_softcap(config_of("gemma2"))
    assert specs == [replace(every, window=theirs.sliding_window), every]
    assert softcap == theirs.final_logit_softcapping


GEMMA3_SECTIONS = [
    ({"text_config": {"model_type": "llama"}}, "text_config.model_type"),
    ({"text_config": {"hidden_activation": "relu"}}, "text_config.hidden_activation"),
    ({"text_config": {"rope_parameters": {"rope_type": "linear"}}}, "text_config.rope_parameters.rope_type"),
    (
        {"text_config": {"rope_parameters": {"full_attention": {"factor": 2.0}}}},
        "text_config.rope_parameters.full_attention.factor",
    ),
    ({"text_config": {"final_logit_softcapping": 30.0}}, "text_config.final_logit_softcapping"),
    ({"text_config": {"rope_scaling": {"rope_type": "linear"}}}, "text_config.rope_scaling.factor"),
]


def test_the_text_model_of_ministral_3_is_refused_by_its_name():
    error = refusal(config_of("mistral3", text_config={**LLAMA_LIKE, "model_type": "ministral3"}))
    assert error.key == "text_config.model_type"
    assert "'ministral3' is not implemented; only 'mistral'" in str(error)


def test_embeddings_of_a_mistral3_are_tied_unless_its_config_says_otherwise(monkeypatch):
    from transformers import AutoConfig

    assert AutoConfig.for_model("mistral3").tie_word_embeddings is True
    for beside, inside, tied in ((None, None, True), (False, None, False), (True, False, False), (None, False, False)):
        text = {**LLAMA_LIKE, "tie_word_embeddings": inside}
        assert (
            config_seen(monkeypatch, config_of("mistral3", text_config=text, tie_word_embeddings=beside)).tied is tied
        )


@pytest.mark.parametrize(("config", "key"), GEMMA3_SECTIONS)
def test_what_a_text_part_says_is_refused_by_dotted_key(config, key):
    assert refusal({"model_type": "gemma3", **config}).key == key


def test_what_a_gemma3_config_leaves_out_has_the_default_of_transformers(monkeypatch):
    from transformers import AutoConfig

    seen = config_seen(monkeypatch, {"model_type": "gemma3_text"})
    theirs = AutoConfig.for_model("gemma3_text")
    shape = seen.shape
    assert (shape.num_layers, shape.hidden_size, shape.num_heads, shape.num_kv_heads) == (
        *(theirs.num_hidden_layers, theirs.hidden_size, theirs.num_attention_heads, theirs.num_key_value_heads),
    )
    assert (shape.head_dim, shape.vocab_size, shape.max_positions) == (
        *(theirs.head_dim, theirs.vocab_size, theirs.max_position_embeddings),
    )
    assert (seen.inner_size, seen.eps, seen.tied) == (theirs.intermediate_size, theirs.rms_norm_eps, True)
    wanted = [theirs.sliding_window if each == SLIDING else None for each in theirs.layer_types]
    assert list(seen.windows) == wanted
    assert seen.rope == Rope(theirs.rope_parameters["full_attention"]["rope_theta"])


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 1e6, "rope_local_base_freq": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0},
                SLIDING: {"rope_type": "default", "rope_theta": 500.0},
            }
        },
    ],
)
def test_local_layers_of_a_gemma3_are_rotated_by_a_base_of_their_own(spelling):
    config = config_of("gemma3_text", layer_types=[FULL, SLIDING], **spelling)
    tables = [each.table for each in load(config, ZeroTensors(), FILE).operations() if isinstance(each, Rotate)]
    wanted = [Rope(1e6, LinearScaling(8.0))] * 2 + [Rope(500.0)] * 2
    for table, rope in zip(tables, wanted, strict=True):
        theirs = RotaryTable.build(rope, 256, 128, torch.device("cpu"))
        assert all(map(torch.equal, table.rows(torch.arange(128)), theirs.rows(torch.arange(128))))


GEMMA4_REFUSED = [
    ({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "num_global_key_value_heads"),
    ({"enable_moe_block": True}, "num_experts"),
    ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5}, "top_k_experts"),
    ({"rope_parameters": {FULL: {"rope_type": "proportional"}}}, f"rope_parameters.{SLIDING}"),
    ({"rope_parameters": {FULL: {"rope_type": "proportional", "beta": 1}, SLIDING: PLAIN}}, None),
    ({"per_layer_config": {"2": {"head_dim": 20}}}, "per_layer_config.2"),
    ({"per_layer_config": {"1": {"sliding_window": 20}}}, "per_layer_config.1.sliding_window"),
    ({"per_layer_config": {"1": {"num_key_value_heads": 3}}}, "per_layer_config.1.num_key_value_heads"),
    ({"per_layer_config": {"1": {"head_dim": 20}}, "layer_types": [FULL, FULL]}, "per_layer_config"),
]


@pytest.mark.parametrize(("changes", "key"), GEMMA4_REFUSED)
def test_what_a_gemma4_config_says_together_is_refused_by_key(changes, key):
    found = refusal(config_of("gemma4_text", **changes)).key
    assert found == key if key else found.startswith("rope_parameters")


def test_what_a_gemma4_config_leaves_out_has_the_default_of_transformers():
    from transformers import AutoConfig

    from penstock.models.gemma4_config import read_config

    theirs, ours = AutoConfig.for_model("gemma4_text"), read_config(ConfigReader({}, FILE))
    theirs.allow_global_per_layer_attribute_access = True
    shape, last = ours.decoder.shape, theirs.per_layer_config[-1]
    assert (shape.num_layers, shape.hidden_size, shape.vocab_size, shape.max_positions) == (
        *(theirs.num_hidden_layers, theirs.hidden_size, theirs.vocab_size, theirs.max_position_embeddings),
    )
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (
        *(theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim),
    )
    assert (ours.full.shape.head_dim, ours.full.shape.num_kv_heads) == (last.head_dim, last.num_key_value_heads)
    assert (ours.decoder.inner_size, ours.decoder.eps, ours.decoder.tied) == (
        *(theirs.intermediate_size, theirs.rms_norm_eps, theirs.tie_word_embeddings),
    )
    assert list(ours.decoder.windows) == [512 if each == SLIDING else None for each in theirs.layer_types]
    assert (ours.per_layer, ours.per_layer_vocab) == (
        *(theirs.hidden_size_per_layer_input, theirs.vocab_size_per_layer_input),
    )
    assert ours.decoder.rope == Rope(theirs.rope_parameters[SLIDING]["rope_theta"])
    assert ours.full.rope == Rope(theirs.rope_parameters[FULL]["rope_theta"], ProportionalScaling(64))
    assert (ours.caches, ours.mixture, ours.softcap, ours.keys_are_values) == (tuple(range(30)), None, None, False)


def test_layers_of_a_gemma4_read_the_keys_of_the_last_before_them_of_their_type():
    from penstock.models.gemma4_config import read_config

    types = [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL]
    changes = {"num_hidden_layers": 6, "layer_types": types, "use_double_wide_mlp": True}
    config = read_config(ConfigReader({**LLAMA_LIKE, **changes, "num_kv_shared_layers": 2}, FILE))
    assert (config.caches, config.owners) == ((0, 1, 2, 3, 2, 3), (0, 1, 2, 3))
    assert [config.inner_size(index) for index in range(6)] == [48, 48, 48, 48, 96, 96]
    program = load(
        {"model_type": "gemma4_text", **LLAMA_LIKE, **changes, "num_kv_shared_layers": 3}, ZeroTensors(), FILE
    )
    assert [each.cache for each in program.operations() if isinstance(each, Attend)] == [0, 1, 2, 1, 2, 1]
    assert [cache.window for cache in program.caches] == [512, None, 512]


def test_only_layers_of_an_olmo3_that_see_all_have_its_scaling_as_published_configs_spell_it():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    config = config_of("olmo3", layer_types=[FULL, SLIDING], rope_scaling=yarn, rope_theta=5e5)
    tables = [each.table for each in load(config, ZeroTensors(), FILE).operations() if isinstance(each, Rotate)]
    scaled = Rope(5e5, YarnScaling(5e5, 4.0, 32), amplitude=yarn_temperature(4.0))
    for table, rope in zip(tables, [scaled] * 2 + [Rope(5e5)] * 2, strict=True):
        expected = RotaryTable.build(rope, 8, 128, torch.device("cpu"))
        assert all(map(torch.equal, table.rows(torch.arange(128)), expected.rows(torch.arange(128))))


def test_what_an_olmo3_config_leaves_out_has_the_default_of_transformers(monkeypatch):
    from transformers import AutoConfig

    config = {key: value for key, value in config_of("olmo3").items() if key not in ("rms_norm_eps", "model_type")}
    ours = config_seen(monkeypatch, config_of("olmo3") | {"rms_norm_eps": None})
    theirs = AutoConfig.for_model("olmo3", **config)
    assert (ours.eps, ours.tied) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert ours.rope == Rope(theirs.rope_parameters[FULL]["rope_theta"])
    assert ours.windows == tuple(theirs.sliding_window if each == SLIDING else None for each in theirs.layer_types)


def test_a_gemma2_config_may_turn_softcaps_off():
    off = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": 64}
    specs, softcap = specs_and_softcap(config_of("gemma2", **off))
    assert specs == [AttentionSpec(0.125, None, 4096), AttentionSpec(0.125)]
    assert softcap is None


def test_factors_that_a_granite_config_leaves_out_have_the_default_of_transformers():
    from transformers import AutoConfig

    theirs = AutoConfig.for_model("granite", **LLAMA_LIKE)
    program = load(config_of("granite"), ZeroTensors(), FILE)
    assert theirs.residual_multiplier == 1.0
    assert {each.scale for each in program.embedding} == {theirs.embedding_multiplier}
    assert {each.eps for each in program.operations() if isinstance(each, Norm)} == {theirs.rms_norm_eps}
    assert {each.spec.scale for each in program.operations() if isinstance(each, Attend)} == {
        theirs.attention_multiplier
    }
    assert program.head.scale == 1 / theirs.logits_scaling


@pytest.mark.parametrize(
    "changes", [{}, {"no_rope_layer_interval": 3}, {"no_rope_layers": [1, 0, 0, 1, 1, 0, 1]}, {"no_rope_layers": None}]
)
def test_smollm3_rotates_the_layers_that_transformers_rotates(changes):
    from transformers import AutoConfig

    sizes = {**LLAMA_LIKE, "num_hidden_layers": 6, **changes}
    program = load({"model_type": "smollm3", **sizes}, ZeroTensors(), FILE)
    rotated = [any(isinstance(each, Rotate) for each in layer) for layer in program.layers]
    theirs = AutoConfig.for_model("smollm3", **sizes).no_rope_layers[:6]
    assert 0 < sum(rotated) < 6
    assert rotated == [bool(one) for one in theirs]


def test_what_a_gpt2_config_leaves_out_has_the_default_of_transformers():
    from transformers import GPT2Config as Theirs

    from penstock.models.gpt2 import GPT2Config

    ours, theirs = GPT2Config.read(ConfigReader(GPT2, FILE)), Theirs(**GPT2)
    assert ours.tied == theirs.tie_word_embeddings
    assert ours.eps == theirs.layer_norm_epsilon
    assert ours.activation == theirs.activation_function
    assert ours.inner_size == 4 * theirs.n_embd
    assert theirs.n_inner is None


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
KEYS = [
    *("model_type", "hidden_act", "attention_bias", "head_dim", "rope_theta", "rope_scaling", "rope_parameters"),
    *("layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "tie_word_embeddings", "n_inner"),
    *("activation_function", "scale_attn_weights", "partial_rotary_factor", *LLAMA_LIKE, *GPT2),
    *("hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    *("use_bidirectional_attention", "sliding_window_pattern", "rope_local_base_freq", "text_config", "is_causal"),
    *("local_attention", "global_attn_every_n_layers", "norm_bias", "global_rope_theta"),
    "local_rope_theta",
    *("num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size"),
    *("decoder_sparse_step", "mlp_only_layers", "no_rope_layers", "no_rope_layer_interval"),
    *("use_bias", "norm_epsilon", "attention_out_bias"),
    *("conv_L_cache", "conv_bias", "full_attn_idxs", "block_ff_dim", "block_multiple_of", "block_ffn_dim_multiplier"),
    *("block_auto_adjust_ff_dim", "norm_eps", "tie_embedding"),
    *("full_attention_interval", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
    *("linear_value_head_dim", "linear_conv_kernel_dim", "mamba_n_heads", "mamba_n_groups", "mamba_d_state"),
    *("mamba_d_head", "mamba_d_conv", "mamba_expand", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit"),
    *("qkv_bias", "shared_expert_intermediate_size", "swiglu_limit", "swiglu_alpha"),
    *("shared_intermediate_size", "position_embedding_type", "layers_block_type"),
    *("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
    *(
        "q_lora_rank",
        "kv_lora_rank",
        "qk_rope_head_dim",
        "qk_nope_head_dim",
        "v_head_dim",
        "n_routed_experts",
        "n_group",
    ),
    *(
        "topk_group",
        "topk_method",
        "scoring_func",
        "n_shared_experts",
        "first_k_dense_replace",
        "routed_scaling_factor",
    ),
    *("moe_layer_freq", "rope_interleave", "mlp_bias"),
    *("linear_value_heads_tiled", "num_nextn_predict_layers"),
    *("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "num_kv_shared_layers", "per_layer_config"),
    *("hidden_size_per_layer_input", "vocab_size_per_layer_input", "use_double_wide_mlp", "enable_moe_block"),
    *("top_k_experts",),
]


@settings(max_examples=400, deadline=None)
@given(
    family=st.sampled_from(families()),
    changes=st.dictionaries(st.sampled_from(KEYS), JSON_VALUES, min_size=1, max_size=3),
)
@example(family="bert", changes={"hidden_size": 4})  # heads of one element, which the config does not size itself
@example(family="llama", changes={"hidden_size": 12})  # heads of three, which cannot be rotated
@example(family="qwen3_5_text", changes={"layer_types": None})  # two layers, of which every fourth would attend
def test_any_config_is_either_accepted_or_refused_by_key(family, changes):
    with pytest.raises((ModelFileError, TouchedError)) as caught:
        load({**config_of(family), **changes}, NoTensors(), FILE)
    if isinstance(caught.value, ModelFileError):
        assert caught.value.key.split(".")[0] in changes.keys() | {
            "num_attention_heads",
            "num_key_value_heads",
            "num_experts_per_tok",
            "n_head",
            "linear_num_value_heads",
            "mamba_n_heads",
            "layer_types",
        }
