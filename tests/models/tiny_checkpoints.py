"""Tiny random checkpoints written by transformers, and what transformers computes from them: every family's golden.

The sizes are awkward on purpose: heads that do not add up to the hidden size, head widths that are no power of two, one
key head for all queries, vocabularies that are no multiple of 8. Norm weights and biases are random too, so that one
left out or swapped shows.
"""

from __future__ import annotations

import copy
import functools
import json
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock.kernels.torch_backend import TorchBackend
from penstock.models import gguf_dialect, load
from penstock.nn.reference import ReferenceExecutor
from penstock.weights.bind import Binder
from penstock.weights.files import open_model

__all__ = [
    "LETTERS",
    "VARIANTS",
    "cases",
    "forget_references",
    "load_model",
    "long_factors_from_the_start",
    "reference_greedy",
    "randomise",
    "reference_logits",
    "write_checkpoint",
    "write_lettered",
    "write_letters",
]

LETTERS = "abcdefghijklmnopqrstuvwxyz .,"

_IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}
_SIZES: dict[str, Any] = {**_IDS, "num_hidden_layers": 3, "max_position_embeddings": 512}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_LONGROPE = {
    "factor": 1.5,
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.1, 3.8, 4.6],
    "long_factor": [1.0, 1.4, 2.2, 3.8, 7.0, 13.4, 26.2, 51.8, 64.0],
}
_GPT_OSS_ROPE = {**_YARN, "rope_theta": 150000.0, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0}
_NO_PADDING = {"pad_token_id": None}  # a family's own lies outside so small a vocabulary
_WIDE_HEADS = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20, "vocab_size": 101}
_ONE_TO_ONE = {"hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 97}
_ALL_TO_ONE = {"hidden_size": 72, "num_attention_heads": 3, "num_key_value_heads": 1, "vocab_size": 127}


def _two_ropes(**of_global: Any) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": 700.0}
    return {"sliding_attention": local, "full_attention": {"rope_type": "default", "rope_theta": 90000.0} | of_global}


_GEMMA3: dict[str, dict[str, Any]] = {
    "wide_heads_tied_small_window": {
        **_WIDE_HEADS,
        "intermediate_size": 112,
        "num_hidden_layers": 7,
        "sliding_window": 7,
        "query_pre_attn_scalar": 300,
        "rope_parameters": _two_ropes(rope_type="linear", factor=8.0),
    },
    "one_to_one_untied_capped": {
        **_ONE_TO_ONE,
        "head_dim": 24,
        "intermediate_size": 56,
        "sliding_window": 33,
        "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 300,
        "final_logit_softcapping": 6.5,
        "tie_word_embeddings": False,
        "rope_parameters": _two_ropes(),
    },
    "all_to_one_untied_biases_widest_heads": {
        **_ALL_TO_ONE,
        "head_dim": 256,
        "intermediate_size": 100,
        "num_hidden_layers": 3,
        "sliding_window_pattern": 2,
        "sliding_window": 16,
        "query_pre_attn_scalar": 4096,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "rope_parameters": _two_ropes(rope_type="linear", factor=2.5),
    },
}


def _proportional(share: float, **of_local: Any) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": 700.0} | of_local
    turned = {"rope_type": "proportional", "rope_theta": 90000.0, "partial_rotary_factor": share}
    return {"sliding_attention": local, "full_attention": turned}


_GEMMA4: dict[str, dict[str, Any]] = {
    "wide_heads_untied_own_inputs_shared_keys_small_window": {
        **_WIDE_HEADS,
        "tie_word_embeddings": False,
        "intermediate_size": 48,
        "num_hidden_layers": 5,
        "layer_types": [*(["sliding_attention", "full_attention"] * 2), "full_attention"],
        "sliding_window": 7,
        "global_head_dim": 36,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 103,
        "final_logit_softcapping": 6.5,
        "rope_parameters": _proportional(0.25),
    },
    "one_to_one_tied_biases_keys_as_values": {
        **_ONE_TO_ONE,
        "head_dim": 24,
        "intermediate_size": 56,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 33,
        "global_head_dim": 20,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "attention_bias": True,
        "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision",
        "rope_parameters": _proportional(0.5, rope_type="linear", factor=2.5),
    },
    "all_to_one_untied_unused_experts_widest_heads": {
        **_ALL_TO_ONE,
        "tie_word_embeddings": False,
        "head_dim": 10,
        "intermediate_size": 100,
        "sliding_window": 16,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "num_experts": 11,
        "top_k_experts": 2,
        "moe_intermediate_size": 20,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 127,
        "rms_norm_eps": 0.01,
        "rope_parameters": _proportional(0.25),
    },
}
_TINY_TOWERS: dict[str, Any] = {
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "position_embedding_size": 16,
    },
    "audio_config": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "subsampling_conv_channels": [4, 4],
        "output_proj_dims": 16,
    },
}
_TINY_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

_TINY_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 16,
    "num_position_embeddings": 16,
}
_TINY_QWEN2_VISION = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4}

_CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    "gemma2": {
        "wide_heads_tied_small_window": {
            **_WIDE_HEADS,
            "intermediate_size": 112,
            "num_hidden_layers": 7,
            "sliding_window": 7,
            "query_pre_attn_scalar": 300,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 6.5,
        },
        "one_to_one_untied_uncapped": {
            **_ONE_TO_ONE,
            "head_dim": 24,
            "intermediate_size": 56,
            "sliding_window": 33,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 300,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
        },
        "all_to_one_untied_biases_widest_heads": {
            **_ALL_TO_ONE,
            "head_dim": 256,
            "intermediate_size": 100,
            "sliding_window": 16,
            "query_pre_attn_scalar": 4096,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    },
    "gemma3_text": _GEMMA3,
    "gemma3": {  # with a vision part beside it
        "wide_heads_untied": {**_GEMMA3["wide_heads_tied_small_window"], "tie_word_embeddings": False},
        "one_to_one_untied": {**_GEMMA3["one_to_one_untied_capped"], "final_logit_softcapping": None},
        "all_to_one_widest": _GEMMA3["all_to_one_untied_biases_widest_heads"],
    },
    "gemma4_text": _GEMMA4,
    "gemma4": _GEMMA4,  # with towers for images and sound beside it
    "gpt2": {
        "tied": {"n_embd": 60, "n_head": 3, "n_layer": 3, "vocab_size": 101},
        "untied_inner_gelu": {
            "n_embd": 48,
            "n_head": 2,
            "n_layer": 2,
            "vocab_size": 97,
            "n_inner": 52,
            "activation_function": "gelu",
            "tie_word_embeddings": False,
        },
        "odd_heads": {"n_embd": 45, "n_head": 3, "n_layer": 2, "vocab_size": 97},
        "one_head_relu": {"n_embd": 26, "n_head": 1, "n_layer": 3, "vocab_size": 127, "activation_function": "relu"},
    },
    "gpt_oss": {
        "wide_heads_unused_experts_small_window": {
            **_WIDE_HEADS,
            "intermediate_size": 44,
            "num_hidden_layers": 4,
            "num_local_experts": 11,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "rope_parameters": _GPT_OSS_ROPE,
        },
        "one_to_one_tied_every_expert_no_attention_biases": {
            **_ONE_TO_ONE,
            "head_dim": 24,
            "intermediate_size": 36,
            "num_local_experts": 3,
            "num_experts_per_tok": 3,
            "sliding_window": 33,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        },
        "all_to_one_narrow_heads": {
            **_ALL_TO_ONE,
            "head_dim": 10,
            "intermediate_size": 20,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "sliding_window": 16,
            "rope_parameters": {**_GPT_OSS_ROPE, "beta_fast": 6.0, "beta_slow": 0.3},
        },
    },
    "granite": {
        "wide_heads_untied_factors": {
            **_WIDE_HEADS,
            "intermediate_size": 88,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.11,
            "residual_multiplier": 0.22,
            "logits_scaling": 1.3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
        "one_to_one_tied_linear_whole_factors": {
            **_ONE_TO_ONE,
            "intermediate_size": 56,
            "embedding_multiplier": 3,
            "attention_multiplier": 0.2,
            "residual_multiplier": 2,
            "logits_scaling": 8,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
        },
        "all_to_one_biases_llama3_large_eps": {
            **_ALL_TO_ONE,
            "intermediate_size": 100,
            "attention_bias": True,
            "mlp_bias": True,
            "rms_norm_eps": 0.3,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.7,
            "rope_parameters": _LLAMA3_ROPE,
        },
    },
    "granitemoehybrid": {
        "wide_heads_untied_factors": {
            **{key: value for key, value in _WIDE_HEADS.items() if key != "head_dim"},
            "num_hidden_layers": 4,
            "intermediate_size": 88,
            "shared_intermediate_size": 72,
            "num_local_experts": 0,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 20,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.22,
            "logits_scaling": 1.3,
        },
        "one_to_one_tied_biases_rotated": {
            **_ONE_TO_ONE,
            "intermediate_size": 56,
            "shared_intermediate_size": 48,
            "num_local_experts": 0,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "mamba_n_heads": 5,
            "mamba_d_state": 33,
            "mamba_d_conv": 2,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "attention_multiplier": 0.3,
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
        },
        "all_to_one_experts": {
            **_ALL_TO_ONE,
            "intermediate_size": 36,
            "shared_intermediate_size": 56,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mamba_n_heads": 6,
            "mamba_n_groups": 3,
            "mamba_d_state": 16,
            "mamba_d_conv": 3,
            "mamba_expand": 1,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.7,
        },
    },
    "lfm2": {
        "wide_heads_tied_four_taps": {
            **_WIDE_HEADS,
            "num_hidden_layers": 4,
            "intermediate_size": 100,
            "block_multiple_of": 8,
            "conv_L_cache": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
        },
        "one_to_one_untied_biases_attention_first": {
            **_ONE_TO_ONE,
            "intermediate_size": 56,
            "block_auto_adjust_ff_dim": False,
            "conv_bias": True,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "conv", "full_attention"],
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
        },
        "all_to_one_two_taps_no_multiplier": {
            **_ALL_TO_ONE,
            "intermediate_size": 100,
            "block_ffn_dim_multiplier": 1.3,
            "block_multiple_of": 12,
            "conv_L_cache": 2,
            "norm_eps": 0.1,
            "full_attn_idxs": [1],
        },
    },
    "llama": {
        "wide_heads_untied": {
            **_WIDE_HEADS,
            "intermediate_size": 88,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
        "one_to_one_tied_linear": {
            **_ONE_TO_ONE,
            "intermediate_size": 56,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
        },
        "all_to_one_biases_llama3": {
            **_ALL_TO_ONE,
            "intermediate_size": 100,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": _LLAMA3_ROPE,
        },
    },
    "mistral": {
        "wide_heads_no_window": {**_WIDE_HEADS, "intermediate_size": 88, "sliding_window": None},
        "one_to_one_tied_large_window": {
            **_ONE_TO_ONE,
            "intermediate_size": 56,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        "all_to_one_small_window": {**_ALL_TO_ONE, "intermediate_size": 100, "sliding_window": 80},
    },
    "mixtral": {
        "wide_heads_tied_unused_experts": {
            **_WIDE_HEADS,
            "intermediate_size": 44,
            "num_local_experts": 11,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        "one_to_one_every_expert_linear": {
            **_ONE_TO_ONE,
            "intermediate_size": 36,
            "num_local_experts": 3,
            "num_experts_per_tok": 3,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
        },
        "all_to_one_narrow_heads_small_window": {
            **_ALL_TO_ONE,
            "head_dim": 10,
            "intermediate_size": 20,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "sliding_window": 7,
        },
    },
    "olmo2": {
        "wide_heads_untied": {
            **_WIDE_HEADS,
            "intermediate_size": 88,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
        "one_to_one_biases_tied": {
            **_ONE_TO_ONE,
            "intermediate_size": 56,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        "all_to_one_narrow_heads_linear": {
            **_ALL_TO_ONE,
            "head_dim": 10,
            "intermediate_size": 100,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
        },
    },
    "olmo3": {
        "wide_heads_untied_small_window_yarn": {
            **_WIDE_HEADS,
            "intermediate_size": 88,
            "num_hidden_layers": 4,
            "sliding_window": 7,
            "rope_parameters": _two_ropes(**_YARN),
        },
        "one_to_one_tied_biases_listed_windows": {
            **_ONE_TO_ONE,
            "intermediate_size": 56,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "sliding_window": 33,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "rope_parameters": _two_ropes(rope_theta=700.0),
        },
        "all_to_one_narrow_heads_linear": {
            **_ALL_TO_ONE,
            "head_dim": 10,
            "intermediate_size": 100,
            "num_hidden_layers": 4,
            "sliding_window": 16,
            "rope_parameters": _two_ropes(rope_theta=700.0, rope_type="linear", factor=2.5),
        },
    },
    "phi3": {
        "partial_long": {  # longer than the pretraining before the first token is generated: the long factors
            **_ALL_TO_ONE,
            **_NO_PADDING,
            "intermediate_size": 100,
            "rope_parameters": _LONGROPE,
            "original_max_position_embeddings": 11,
            "tie_word_embeddings": True,
        },
        "partial_short_window": {
            **_ALL_TO_ONE,
            **_NO_PADDING,
            "intermediate_size": 100,
            "rope_parameters": _LONGROPE,
            "original_max_position_embeddings": 512,
            "sliding_window": 21,
        },
        "odd_heads": {  # 9 of 15 elements of a head are rotated, for which transformers takes 10
            **_NO_PADDING,
            "hidden_size": 60,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 97,
            "intermediate_size": 56,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.6},
        },
    },
    "qwen2": {
        "gqa3_tied": {
            **_WIDE_HEADS,
            "intermediate_size": 88,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        "one_to_one_untied_linear": {
            **_ONE_TO_ONE,
            "intermediate_size": 56,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
        "all_to_one_yarn_whose_limits_are_not_rounded": {
            **_ALL_TO_ONE,
            "intermediate_size": 100,
            "rope_parameters": {
                **_YARN,
                "rope_theta": 10000.0,
                "truncate": False,
                "beta_fast": 6.0,
                "beta_slow": 0.3,
                "mscale": 1.3,
                "mscale_all_dim": 0.4,
            },
        },
        "all_to_one_window": {
            **_ALL_TO_ONE,
            "intermediate_size": 100,
            "use_sliding_window": True,
            "sliding_window": 80,
            "max_window_layers": 1,
        },
    },
    "qwen2_moe": {
        "wide_heads_tied_unused_experts": {
            **_WIDE_HEADS,
            "intermediate_size": 88,
            "moe_intermediate_size": 44,
            "shared_expert_intermediate_size": 72,
            "num_experts": 11,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        "one_to_one_no_biases_every_expert_in_every_other_layer": {
            **_ONE_TO_ONE,
            "intermediate_size": 56,
            "moe_intermediate_size": 36,
            "shared_expert_intermediate_size": 28,
            "num_experts": 3,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "qkv_bias": False,
        },
        "all_to_one_narrow_heads_small_window_dense_last": {
            **_ALL_TO_ONE,
            "head_dim": 10,
            "num_hidden_layers": 4,
            "intermediate_size": 100,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 36,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "mlp_only_layers": [3],
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 3,
        },
    },
    "qwen3": {
        "one_to_one_tied_yarn": {
            **_ONE_TO_ONE,
            "head_dim": 24,
            "intermediate_size": 56,
            "tie_word_embeddings": True,
            "rope_parameters": _YARN,
        },
        "wide_heads_tied": {
            **_WIDE_HEADS,
            "intermediate_size": 88,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        "one_to_one_untied_biases": {
            **_ONE_TO_ONE,
            "head_dim": 24,
            "intermediate_size": 56,
            "attention_bias": True,
        },
        "all_to_one_narrow_heads": {**_ALL_TO_ONE, "head_dim": 10, "intermediate_size": 100},
    },
    "qwen3_moe": {
        "wide_heads_tied_unused_experts": {
            **_WIDE_HEADS,
            "intermediate_size": 88,
            "moe_intermediate_size": 44,
            "num_experts": 11,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        "one_to_one_biases_every_expert_in_every_other_layer": {
            **_ONE_TO_ONE,
            "head_dim": 24,
            "intermediate_size": 56,
            "moe_intermediate_size": 36,
            "num_experts": 3,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "attention_bias": True,
        },
        "all_to_one_narrow_heads_window_dense_last": {
            **_ALL_TO_ONE,
            "head_dim": 10,
            "intermediate_size": 100,
            "moe_intermediate_size": 20,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "mlp_only_layers": [2],
            "use_sliding_window": True,
            "sliding_window": 33,
        },
    },
    "qwen3_5_text": {
        "wide_heads_every_fourth": {
            **_WIDE_HEADS,
            "rms_norm_eps": 1e-3,
            "num_hidden_layers": 5,
            "intermediate_size": 88,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 20,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [3, 1, 1],
            },
        },
        "one_to_one_tied_biases_attention_first": {
            **_ONE_TO_ONE,
            "head_dim": 40,
            "rms_norm_eps": 1e-2,
            "intermediate_size": 56,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 18,
            "linear_value_head_dim": 70,
            "linear_conv_kernel_dim": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 1]},
        },
        "all_to_one_one_key_head": {
            **_ALL_TO_ONE,
            "head_dim": 16,
            "intermediate_size": 100,
            "rms_norm_eps": 0.1,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 33,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 3,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
                "mrope_section": [4, 2, 2],
            },
        },
    },
    "seed_oss": {
        "wide_heads_untied": {
            **_WIDE_HEADS,
            "intermediate_size": 88,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        },
        "one_to_one_tied_other_biases_linear": {
            **_ONE_TO_ONE,
            "head_dim": 24,
            "intermediate_size": 56,
            "attention_bias": False,
            "attention_out_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
        },
        "all_to_one_narrow_heads_yarn": {
            **_ALL_TO_ONE,
            "head_dim": 10,
            "intermediate_size": 100,
            "attention_out_bias": True,
            "rope_parameters": _YARN,
        },
    },
    "smollm3": {
        "wide_heads_tied_small_window": {
            **_WIDE_HEADS,
            **_NO_PADDING,
            "intermediate_size": 88,
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 7,
        },
        "one_to_one_untied_linear_list": {
            **_ONE_TO_ONE,
            **_NO_PADDING,
            "intermediate_size": 56,
            "no_rope_layers": [0, 1, 0, 1],  # one more than there are layers
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
        },
        "all_to_one_biases_llama3_interval": {
            **_ALL_TO_ONE,
            **_NO_PADDING,
            "intermediate_size": 100,
            "attention_bias": True,
            "mlp_bias": True,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 33,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "rope_parameters": _LLAMA3_ROPE,
        },
    },
    "starcoder2": {
        "wide_heads_tied_small_window": {**_WIDE_HEADS, "intermediate_size": 88, "sliding_window": 7},
        "one_to_one_untied_linear_no_biases": {
            **_ONE_TO_ONE,
            "intermediate_size": 56,
            "use_bias": False,
            "norm_epsilon": 0.3,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
        },
        "all_to_one_narrow_heads": {
            **_ALL_TO_ONE,
            "head_dim": 10,
            "intermediate_size": 100,
            "sliding_window": 33,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    },
}

_CONFIGS["qwen3_5"] = _CONFIGS["qwen3_5_text"]  # with a vision part beside it


def _by_axes(variant: dict[str, Any], *pairs: int) -> dict[str, Any]:
    """A variant with so many pairs of a head for each axis of an image."""
    rope = {**_DEFAULT_ROPE, **variant.get("rope_parameters", {}), "mrope_section": list(pairs)}
    return {**variant, "rope_parameters": rope}


_CONFIGS["qwen3_vl"] = {  # all with a vision part beside it
    "wide_heads_tied": _by_axes(_CONFIGS["qwen3"]["wide_heads_tied"], 4, 3, 3),
    "one_to_one_untied_biases_yarn": {
        **_by_axes(_CONFIGS["qwen3"]["one_to_one_tied_yarn"], 4, 4, 4),
        "tie_word_embeddings": False,
        "attention_bias": True,
    },
    "all_to_one_narrow_heads": _by_axes(_CONFIGS["qwen3"]["all_to_one_narrow_heads"], 2, 2, 1),
}
_CONFIGS["mistral3"] = {
    "wide_heads_untied_no_window": _CONFIGS["mistral"]["wide_heads_no_window"],
    "one_to_one_tied_linear": {
        **_CONFIGS["mistral"]["one_to_one_tied_large_window"],
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e9, "factor": 2.5},
    },
    "all_to_one_small_window": {**_CONFIGS["mistral"]["all_to_one_small_window"], "sliding_window": 33},
}
_CONFIGS["qwen2_vl"] = {
    "shared_keys_tied": {
        **{key: value for key, value in _WIDE_HEADS.items() if key != "head_dim"},
        "intermediate_size": 88,
        "tie_word_embeddings": True,
        "rope_parameters": {**_DEFAULT_ROPE, "mrope_section": [1, 2, 1]},
    },
    "one_to_one_untied_linear": {
        **_ONE_TO_ONE,
        "intermediate_size": 56,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0, "mrope_section": [1, 2, 2]},
    },
    "all_to_one_window": _by_axes(_CONFIGS["qwen2"]["all_to_one_window"], 4, 5, 3),
}
_CONFIGS["qwen2_5_vl"] = {
    "shared_keys_untied_yarn": {
        **_CONFIGS["qwen2_vl"]["shared_keys_tied"],
        "tie_word_embeddings": False,
        "rope_parameters": {**_YARN, "mrope_section": [2, 1, 1]},
    },
    "one_to_one_tied": {**_by_axes({**_ONE_TO_ONE, "intermediate_size": 56}, 1, 2, 2), "tie_word_embeddings": True},
    "all_to_one_window": _CONFIGS["qwen2_vl"]["all_to_one_window"],
}
_CONFIGS["qwen3_vl_moe"] = {
    "wide_heads_untied_unused_experts": {
        **_by_axes(_CONFIGS["qwen3_moe"]["wide_heads_tied_unused_experts"], 4, 3, 3),
        "tie_word_embeddings": False,
    },
    "one_to_one_biases_every_expert_in_every_other_layer": {
        **_by_axes(_CONFIGS["qwen3_moe"]["one_to_one_biases_every_expert_in_every_other_layer"], 6, 3, 3),
        "norm_topk_prob": True,
    },
    "all_to_one_narrow_heads_dense_last": {
        **_by_axes(_CONFIGS["qwen3_moe"]["all_to_one_narrow_heads_window_dense_last"], 1, 2, 2),
        "norm_topk_prob": True,
        "use_sliding_window": False,
    },
}

_DEEPSEEK_YARN = {**_YARN, "rope_theta": 10000.0, "mscale": 0.707, "mscale_all_dim": 0.707}
_CONFIGS["deepseek_v2"] = {
    "query_latent_groups_yarn": {
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "vocab_size": 101,
        "intermediate_size": 88,
        "q_lora_rank": 28,
        "kv_lora_rank": 20,
        "qk_rope_head_dim": 12,
        "qk_nope_head_dim": 10,
        "v_head_dim": 14,
        "first_k_dense_replace": 1,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 20,
        "routed_scaling_factor": 1.5,
        "rope_parameters": _DEEPSEEK_YARN,
    },
    "direct_queries_greedy_biases_tied": {
        "hidden_size": 42,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "vocab_size": 97,
        "intermediate_size": 56,
        "q_lora_rank": None,
        "kv_lora_rank": 34,
        "qk_rope_head_dim": 6,
        "qk_nope_head_dim": 8,
        "v_head_dim": 9,
        "n_routed_experts": 3,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "moe_intermediate_size": 36,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    },
    "one_head_dense_but_last": {
        "hidden_size": 72,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": 127,
        "intermediate_size": 100,
        "q_lora_rank": 16,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 40,
        "first_k_dense_replace": 2,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 20,
        "routed_scaling_factor": 0.7,
    },
}


def _as_v3(variant: str, **changes: Any) -> dict[str, Any]:
    settings = {**_CONFIGS["deepseek_v2"][variant], "n_group": 1, "topk_group": 1, **changes}
    return {key: value for key, value in settings.items() if key not in ("topk_method", "mlp_bias")}


_CONFIGS["deepseek_v3"] = {
    "query_latent_groups_yarn": _as_v3("query_latent_groups_yarn", n_group=4, topk_group=2, n_shared_experts=1),
    "direct_queries_all_experts_biases_rotated_in_halves": _as_v3(
        "direct_queries_greedy_biases_tied", rope_interleave=False
    ),
    "one_head_not_normalised": _as_v3("one_head_dense_but_last", norm_topk_prob=False, routed_scaling_factor=1.3),
}

_FEW_OF_MANY = {
    "moe_intermediate_size": 44,
    "shared_expert_intermediate_size": 72,
    "num_experts": 11,
    "num_experts_per_tok": 2,
}
_ALL_OF_THREE = {
    "moe_intermediate_size": 36,
    "shared_expert_intermediate_size": 28,
    "num_experts": 3,
    "num_experts_per_tok": 3,
}
_MOST_OF_FIVE = {
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 36,
    "num_experts": 5,
    "num_experts_per_tok": 3,
}


def _with_experts(of_each: Sequence[dict[str, Any]], *, dense: bool) -> dict[str, dict[str, Any]]:
    """The dense variants with experts; `intermediate_size` is kept for families in which some layers have none."""
    return {
        f"{name}_{'some_' * dense}experts": {
            key: value for key, value in settings.items() if dense or key != "intermediate_size"
        }
        | more
        for (name, settings), more in zip(_CONFIGS["qwen3_5_text"].items(), of_each, strict=True)
    }


_CONFIGS["qwen3_5_moe_text"] = _with_experts((_FEW_OF_MANY, _ALL_OF_THREE, _MOST_OF_FIVE), dense=False)
_CONFIGS["qwen3_5_moe"] = _CONFIGS["qwen3_5_moe_text"]  # with a vision part beside it
_CONFIGS["qwen3_next"] = _with_experts(
    (
        _FEW_OF_MANY,
        _ALL_OF_THREE | {"decoder_sparse_step": 2, "norm_topk_prob": False},
        _MOST_OF_FIVE | {"mlp_only_layers": [2]},
    ),
    dense=True,
)

_UNUSED_EXPERTS = {
    ("gemma4", "all_to_one_untied_unused_experts_widest_heads"): 3,
    ("gemma4_text", "all_to_one_untied_unused_experts_widest_heads"): 3,
    ("gpt_oss", "wide_heads_unused_experts_small_window"): 3,
    ("mixtral", "wide_heads_tied_unused_experts"): 3,
    ("qwen2_moe", "wide_heads_tied_unused_experts"): 3,
    ("qwen3_moe", "wide_heads_tied_unused_experts"): 3,
    ("qwen3_5_moe_text", "wide_heads_every_fourth_experts"): 3,
    ("qwen3_5_moe", "wide_heads_every_fourth_experts"): 3,
    ("qwen3_next", "wide_heads_every_fourth_some_experts"): 3,
    ("qwen3_vl_moe", "wide_heads_untied_unused_experts"): 3,
}
"""How many of a variant's experts no token ever chooses; see `_leave_out_experts`."""

_BY_CLASS, _CLASSES = (
    (
        *("deepseek_v2", "deepseek_v3", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text"),
        *("qwen3_next", "qwen3_vl_moe"),
    ),
    4,
)
"""Families whose tokens choose experts by their class, and how many classes there are; see `_choose_by_class`."""

VARIANTS: dict[str, list[str]] = {family: list(variants) for family, variants in _CONFIGS.items()}
"""The variants that there are of each family."""


_LATER = {
    *("deepseek_v2", "deepseek_v3", "gemma4", "gemma4_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"),
    *("mistral3", "olmo3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "seed_oss"),
}
"""Families of which every test in `make test` looks at one variant."""

_SEES_IMAGES = {"gemma3", "gemma4", "qwen3_5", "qwen3_5_moe"}
"""Those that have a text model of their own beside them, whose variants tests in `make test` look at instead."""


_WHOLE_ALONE = {"mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"}
"""Those that see images and whose text part transformers computes with what they see beside it alone."""


def cases(pairs: Sequence[tuple[str, str]] | None = None, *, every: bool = False) -> list[Any]:
    """Parameters (family, variant) of a test: in `make test` the first variant of each family, elsewhere all.

    Args:
        pairs: which ones; None for all.
        every: `make test` takes every variant of families that are not in `_LATER`.
    """
    if pairs is None:
        pairs = [(family, variant) for family, variants in VARIANTS.items() for variant in variants]
    first = dict(reversed(pairs))
    taken = {
        (family, variant)
        for family, variant in pairs
        if (every and family not in _LATER) or (variant == first[family] and family not in _SEES_IMAGES)
    }
    return [pytest.param(*pair, id="-".join(pair), marks=[] if pair in taken else pytest.mark.deep) for pair in pairs]


def write_checkpoint(
    directory: Path, family: str, variant: str, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """Write `config.json` and `model.safetensors` into `directory`, the same ones every time; there is no tokenizer.

    Args:
        directory: where to write it.
        family: a `model_type`.
        variant: one of `VARIANTS[family]`.
        dtype: of the tensors.
        changes: settings that replace the variant's.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    settings = _CONFIGS[family][variant] | changes
    if family == "gpt2":
        settings |= {"n_positions": 512, **_IDS}
    else:
        settings = {**_SIZES, "rope_parameters": dict(_DEFAULT_ROPE), **settings}
    kind = AutoModelForCausalLM
    if family == "mistral3":
        kind, tied = AutoModelForImageTextToText, settings.get("tie_word_embeddings", False)
        text, tower = {**settings, "model_type": "mistral"}, {**_TINY_VISION, "head_dim": 8}
        settings = {"text_config": text, "vision_config": tower, "tie_word_embeddings": tied}
    if family == "gemma3":
        tied = settings.get("tie_word_embeddings", True)
        settings = {"text_config": settings, "vision_config": _TINY_VISION, "tie_word_embeddings": tied}
    if family == "gemma4":
        tied = settings.get("tie_word_embeddings", True)
        kind, settings = (
            AutoModelForImageTextToText,
            {"text_config": settings, **_TINY_TOWERS, "tie_word_embeddings": tied},
        )
    if family in ("qwen3_5", "qwen3_5_moe", *_WHOLE_ALONE) and family != "mistral3":
        kind, tied = AutoModelForImageTextToText, settings.get("tie_word_embeddings", False)
        vision = _TINY_QWEN2_VISION if family == "qwen2_vl" else _TINY_QWEN_VISION
        settings = {"text_config": settings, "vision_config": vision, "tie_word_embeddings": tied}
    model = kind.from_config(AutoConfig.for_model(family, **settings))
    randomise(model, seed=zlib.crc32(f"{family}/{variant}".encode()))
    if family.startswith("gemma4"):
        _soften(model)
    unused = _UNUSED_EXPERTS.get((family, variant), 0)
    if family in _BY_CLASS:
        _choose_by_class(model, unused)
    _leave_out_experts(model, unused, pairs=family not in _BY_CLASS)
    model.to(dtype).save_pretrained(directory)
    return directory


def add_predictor(directory: Path) -> None:
    """Give a checkpoint the part that predicts a second token: one more layer, named as its family's publishers do.

    Its numbers are those of a new layer of transformers, and of projections as published checkpoints have.
    """
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory)
    torch.manual_seed(17)
    deepseek = config.model_type == "deepseek_v3"
    names = predictor_names(config)
    hidden, mean = config.hidden_size, 1.0 if deepseek else 0.0
    own = _new_layer(config, names["layer"]) if deepseek else _new_attention_layer(config, names["layer"])
    for name in ("norm", "embedding_norm", "hidden_norm"):
        own[f"{names[name]}.weight"] = mean + torch.randn(hidden) * 0.1
    own[f"{names['joined']}.weight"] = torch.randn(hidden, 2 * hidden) * hidden**-0.5
    for name, each in own.items():
        if name.endswith("norm.weight"):  # new norms are all alike, which would hide how they are stored
            own[name] = mean + torch.randn_like(each) * 0.1
    stored = load_file(directory / "model.safetensors")
    if deepseek:  # published checkpoints repeat what they share
        block, table = names["layer"], stored["model.embed_tokens.weight"]
        own[f"{block}.embed_tokens.weight"] = table
        own[f"{block}.shared_head.head.weight"] = stored.get("lm_head.weight", table)
    dtype = next(iter(stored.values())).dtype
    save_file(
        {**stored, **{name: each.to(dtype).clone().contiguous() for name, each in own.items()}},
        directory / "model.safetensors",
        {"format": "pt"},
    )


def predictor_names(config: Any) -> dict[str, str]:
    """Prefixes of the tensors that `add_predictor` writes, by what they are."""
    if config.model_type == "deepseek_v3":
        block = f"model.layers.{config.num_hidden_layers}"
        parts = {"joined": "eh_proj", "embedding_norm": "enorm", "hidden_norm": "hnorm", "norm": "shared_head.norm"}
        return {"layer": block, **{what: f"{block}.{name}" for what, name in parts.items()}}
    norms = {f"{what}_norm": f"mtp.pre_fc_norm_{what}" for what in ("embedding", "hidden")}
    return {"layer": "mtp.layers.0", "joined": "mtp.fc", "norm": "mtp.norm", **norms}


def _new_attention_layer(config: Any, named: str) -> dict[str, torch.Tensor]:
    """A new layer of a model of which some layers attend, under the prefix `named`."""
    from transformers import AutoModelForCausalLM

    prefix = f"model.layers.{config.layer_types.index('full_attention')}."
    held = AutoModelForCausalLM.from_config(config).state_dict()
    return {f"{named}.{name[len(prefix) :]}": held[name].detach() for name in held if name.startswith(prefix)}


def _new_layer(config: Any, named: str) -> dict[str, torch.Tensor]:
    """A new layer behind the last of a model, as files have it; `named` is its prefix."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    longer = copy.deepcopy(config)
    longer.num_hidden_layers += 1
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(longer).save_pretrained(folder)
        held = load_file(Path(folder, "model.safetensors"))
    return {name: each for name, each in held.items() if name.startswith(f"{named}.")}


def write_letters(directory: Path, count: int) -> None:
    """Write a tokenizer of `count` tokens beside a checkpoint: three special ones, `LETTERS`, and made-up words."""
    names = ["<unk>", "<s>", "</s>", *LETTERS.replace(" ", "\u0120")]
    _write_tokenizer(directory, [*names, *(f"<{index}>" for index in range(len(names), count))])


_MERGES = [("t", "h"), ("e", "r"), ("a", "n"), ("o", "n"), ("i", "n"), ("r", "e")]
BYTE_VOCABULARY = 3 + 256 + len(_MERGES)
"""Tokens of the tokenizer that `write_byte_tokenizer` writes."""


def write_byte_tokenizer(directory: Path) -> None:
    """Write a tokenizer with every byte beside a checkpoint, so that grammars can be followed."""
    from tokenizers import pre_tokenizers

    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    _write_tokenizer(directory, ["<unk>", "<s>", "</s>", *bytes_, *map("".join, _MERGES)], _MERGES)


def _write_tokenizer(directory: Path, names: Sequence[str], merges: Sequence[tuple[str, str]] = ()) -> None:
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(BPE(vocab={name: index for index, name in enumerate(names)}, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(directory)


def write_lettered(directory: Path, family: str, variant: str, **changes: Any) -> Path:
    """A checkpoint as `write_checkpoint`, with a tokenizer of letters for its whole vocabulary."""
    write_checkpoint(directory, family, variant, **changes)
    config = json.loads((directory / "config.json").read_text())
    write_letters(directory, config.get("text_config", config)["vocab_size"])
    return directory


def load_model(
    directory: Path, dtype: torch.dtype = torch.float32, max_model_len: int | None = None
) -> ReferenceExecutor:
    """The checkpoint as Penstock loads it to serve sequences of this length, on the CPU, computed by torch."""
    files = open_model(directory, gguf_dialect)
    program = load(files.config, Binder(files.source, dtype, "cpu", str(directory)), str(directory), max_model_len)
    return ReferenceExecutor(program, dtype, TorchBackend())


def reference_logits(directory: Path, token_ids: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What transformers makes of a sequence: `[T, V]` float32, one row for each position."""
    with torch.no_grad():
        return _reference(directory, dtype)(torch.tensor([token_ids])).logits[0].float()


def reference_greedy(directory: Path, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """The tokens that transformers in float32 finds most likely after `prompt` and after each of `tokens` but the last.

    The same list as `tokens` if and only if they are its greedy answer to the prompt, by induction over them; one pass
    instead of one for each token.
    """
    model, sequence = _reference(directory, torch.float32), [*prompt, *tokens[:-1]]
    with torch.no_grad(), long_factors_from_the_start(model):
        logits = model(torch.tensor([sequence]), use_cache=False).logits[0, len(prompt) - 1 :]
    return logits.argmax(-1).tolist()


@contextmanager
def long_factors_from_the_start(model: Any) -> Iterator[None]:
    """Keep LongRoPE from changing its factors, and with them all keys, when a sequence outgrows the pretraining's."""
    rotary, config = getattr(getattr(model, "model", model), "rotary_emb", None), model.config
    original = getattr(config, "original_max_position_embeddings", None)
    if getattr(rotary, "rope_type", None) != "longrope" or config.max_position_embeddings <= original:
        yield
        return
    short = rotary.original_inv_freq.clone()
    rotary.original_inv_freq.copy_(ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=original + 1)[0])
    try:
        yield
    finally:
        rotary.original_inv_freq.copy_(short)


def forget_references() -> None:
    """Have transformers read every checkpoint again: one of them has changed."""
    _reference.cache_clear()


@functools.lru_cache(maxsize=2)
def _reference(directory: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    family = json.loads((directory / "config.json").read_text())["model_type"]
    kind = AutoModelForImageTextToText if family in _WHOLE_ALONE else AutoModelForCausalLM
    # by default experts are one grouped product, which refuses widths that are no multiple of 16 bytes
    return kind.from_pretrained(directory, dtype=dtype, experts_implementation="eager").eval()


def randomise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    differences = model.config.model_type.startswith(("qwen3_5", "qwen3_next"))  # of norms from 1
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * _scale(name) / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(noise * 0.3 + _centre(name, differences=differences))
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)


def _soften(model: torch.nn.Module) -> None:
    """Scale what queries are normed to by `1 / sqrt(D)`, as in trained models of a family that does not scale scores.

    Factors at the ends of layers are no parameters; here they differ from 1. An embedding that is the head too is
    small, or every token would be followed by itself.
    """
    tied = model.config.get_text_config().tie_word_embeddings
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("self_attn.q_norm.weight"):
                parameter *= len(parameter) ** -0.5
            elif tied and name.endswith("embed_tokens.weight"):
                parameter *= 0.15
        for index, factor in enumerate(each for name, each in model.named_buffers() if name.endswith("layer_scalar")):
            factor.fill_(0.7 + 0.2 * (index % 3))


def _centre(name: str, *, differences: bool) -> float:
    """The value around which the numbers of a vector lie.

    Steps of a recurrence are short, as in models that were trained: otherwise a head forgets all but its last tokens,
    is now and then nearly zero where their keys are orthogonal to the query, and its norm magnifies roundings.
    """
    if name.endswith("dt_bias"):
        return -3.0
    of_norm = name.endswith(("weight", "router.scale", "per_expert_scale")) and (
        not differences or name.endswith("linear_attn.norm.weight")
    )
    return 1.0 if of_norm else 0.0


_ROUTERS = ("mlp.gate.weight", "mlp.router.weight", "block_sparse_moe.router.weight", "router.proj.weight")


def _scale(name: str) -> float:
    """How large a matrix is.

    Where two experts are nearly equal for the last place, a rounding that swaps them changes the outcome more than any
    other. So routers decide clearly and experts add less than MLPs do; else no two roundings could be compared.
    """
    if name.endswith("router.proj.weight"):
        return 40.0  # what it reads is divided by the root of its width
    if name.endswith(_ROUTERS):
        return 5.0
    if name.endswith("block_sparse_moe.experts.down_proj"):
        return 0.35
    if name.endswith("kv_b_proj.weight"):  # a third product between the stream and a score: else attention is sharp
        return 1.0
    return 0.7 if name.endswith("experts.down_proj") else 2.0


def _choose_by_class(model: torch.nn.Module, unused: int) -> None:
    """Have tokens choose experts by their number modulo `_CLASSES`: with a margin that no rounding bridges.

    The first columns of the stream say which class a token has. Only the embedding writes there. Routers rank experts
    by them, one way for each class, the last `unused` behind all others; what else is in the stream moves logits
    less than from one rank to the next, and so changes weights but not the choice.
    """
    generator = torch.Generator().manual_seed(len(list(model.parameters())))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("embed_tokens.weight"):
                classes = torch.arange(len(parameter)) % _CLASSES
                parameter[:, :_CLASSES] = 4.0 * torch.nn.functional.one_hot(classes, _CLASSES)
            elif name.endswith("post_attention_layernorm.weight"):
                parameter[:_CLASSES] = 1.0
            elif name.endswith(("experts.down_proj", "experts.down_proj_bias")):
                inputs_last = name.endswith("proj") and model.config.model_type != "gpt_oss"
                (parameter.mT if inputs_last else parameter)[..., :_CLASSES] = 0.0
            elif name.endswith("router.bias"):
                parameter *= 0.2
            elif name.endswith(
                ("o_proj.weight", "o_proj.bias", "down_proj.bias", "out_proj.weight", "down_proj.weight")
            ):
                parameter[:_CLASSES] = 0.0
            elif name.endswith(_ROUTERS):
                used = len(parameter) - unused
                ranks = [torch.randperm(used, generator=generator) for _ in range(_CLASSES)]
                parameter *= 0.04
                parameter[:used, :_CLASSES] = torch.stack(ranks, dim=1).float()
                if model.config.model_type == "deepseek_v3":  # so that no sigmoid comes near 1
                    parameter[:used, :_CLASSES] = 0.2 * (parameter[:used, :_CLASSES] - used / 2)
                parameter[used:, :_CLASSES] = -2.0


def _leave_out_experts(model: torch.nn.Module, unused: int, *, pairs: bool) -> None:
    """Have no token choose the last `unused` experts, and make them so large that a trace of them would show.

    Their logits are 0, and those of the others come in `pairs` of a number and its opposite: half of them are above.
    """
    if not unused:
        return
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if pairs and name.endswith(_ROUTERS):
                half = (len(parameter) - unused) // 2
                parameter[half : 2 * half] = -parameter[:half]
                parameter[2 * half :] = 0
            elif ".experts." in name:
                parameter[-unused:] *= 1e4
