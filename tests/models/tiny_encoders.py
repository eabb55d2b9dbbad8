"""Tiny random checkpoints of models that look ahead, and what transformers computes from them.

Families that only embed have no head, so `tiny_checkpoints` cannot hold them; causal families with a key that makes
them look both ways are in its `VARIANTS`, and take that key here. Windows are shorter than the prompts of every test.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import randomise, write_checkpoint, write_letters

__all__ = ["BOTH_WAYS", "ENCODERS", "LOOKING_AHEAD", "encoder_cases", "states_of", "write_encoder", "write_modules"]

_IDS: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "pad_token_id": None,
    "max_position_embeddings": 512,
}

ENCODERS: dict[str, dict[str, dict[str, Any]]] = {
    "modernbert": {
        "three_heads_small_window": {
            "hidden_size": 60,
            "num_attention_heads": 3,
            "num_hidden_layers": 4,
            "intermediate_size": 64,
            "local_attention": 10,
            "vocab_size": 101,
        },
        "odd_window_biases_every_second_global": {
            "hidden_size": 80,
            "num_attention_heads": 5,
            "num_hidden_layers": 3,
            "intermediate_size": 52,
            "local_attention": 15,
            "global_attn_every_n_layers": 2,
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "norm_eps": 0.01,
            "vocab_size": 97,
        },
        "one_head_tanh_last_global_own_thetas": {
            "hidden_size": 26,
            "num_attention_heads": 1,
            "num_hidden_layers": 3,
            "intermediate_size": 40,
            "hidden_activation": "gelu_pytorch_tanh",
            "local_attention": 33,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
            "vocab_size": 127,
        },
    },
    "bert": {
        "three_heads_two_types": {
            "hidden_size": 60,
            "num_attention_heads": 3,
            "num_hidden_layers": 3,
            "intermediate_size": 50,
            "vocab_size": 101,
        },
        "one_head_tanh_one_type_large_eps": {
            "hidden_size": 26,
            "num_attention_heads": 1,
            "num_hidden_layers": 4,
            "intermediate_size": 65,
            "hidden_act": "gelu_new",
            "type_vocab_size": 1,
            "layer_norm_eps": 0.01,
            "vocab_size": 97,
        },
        "five_heads_relu_five_types_one_layer": {
            "hidden_size": 80,
            "num_attention_heads": 5,
            "num_hidden_layers": 1,
            "intermediate_size": 33,
            "hidden_act": "relu",
            "type_vocab_size": 5,
            "vocab_size": 127,
        },
    },
    "roberta": {
        "padding_0": {
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_hidden_layers": 3,
            "intermediate_size": 70,
            "type_vocab_size": 1,
            "layer_norm_eps": 1e-5,
            "pad_token_id": 0,
            "max_position_embeddings": 513,
            "vocab_size": 89,
        },
        "one_head_two_types_tanh": {
            "hidden_size": 26,
            "num_attention_heads": 1,
            "num_hidden_layers": 2,
            "intermediate_size": 50,
            "hidden_act": "gelu_new",
            "type_vocab_size": 2,
            "layer_norm_eps": 1e-5,
            "pad_token_id": 1,
            "max_position_embeddings": 514,
            "vocab_size": 97,
        },
        "seven_heads_large_epsilon_padding_5": {
            "hidden_size": 84,
            "num_attention_heads": 7,
            "num_hidden_layers": 3,
            "intermediate_size": 40,
            "type_vocab_size": 1,
            "layer_norm_eps": 1e-2,
            "pad_token_id": 5,
            "max_position_embeddings": 518,
            "vocab_size": 113,
        },
    },
    "xlm-roberta": {
        "three_heads_padding_1": {
            "hidden_size": 60,
            "num_attention_heads": 3,
            "num_hidden_layers": 3,
            "intermediate_size": 64,
            "type_vocab_size": 1,
            "layer_norm_eps": 1e-5,
            "pad_token_id": 1,
            "max_position_embeddings": 514,
            "vocab_size": 103,
        },
        "one_head_far_padding_two_types_tanh": {
            "hidden_size": 22,
            "num_attention_heads": 1,
            "num_hidden_layers": 4,
            "intermediate_size": 37,
            "hidden_act": "gelu_pytorch_tanh",
            "pad_token_id": 60,
            "max_position_embeddings": 573,
            "vocab_size": 77,
        },
        "seven_heads_large_eps": {
            "hidden_size": 84,
            "num_attention_heads": 7,
            "num_hidden_layers": 2,
            "intermediate_size": 128,
            "layer_norm_eps": 0.01,
            "pad_token_id": 1,
            "max_position_embeddings": 514,
            "vocab_size": 131,
        },
    },
}
"""By `model_type`, the settings of each variant."""

_NO_LONGER_CAUSAL = {"is_causal": False}

BOTH_WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "gemma3_text": {
        "wide_heads_tied_small_window": {"use_bidirectional_attention": True, "sliding_window": 12},
        "one_to_one_untied_capped": {"use_bidirectional_attention": True},
        "all_to_one_untied_biases_widest_heads": _NO_LONGER_CAUSAL,
    },
    "llama": {
        "wide_heads_untied": _NO_LONGER_CAUSAL,
        "one_to_one_tied_linear": _NO_LONGER_CAUSAL,
        "all_to_one_biases_llama3": _NO_LONGER_CAUSAL,
    },
    "qwen2": {
        "gqa3_tied": _NO_LONGER_CAUSAL,
        "one_to_one_untied_linear": _NO_LONGER_CAUSAL,
        "all_to_one_window": _NO_LONGER_CAUSAL,
    },
    "mistral": {"all_to_one_small_window": _NO_LONGER_CAUSAL},
    "gemma2": {"wide_heads_tied_small_window": _NO_LONGER_CAUSAL},
}
"""By `model_type` and variant of `tiny_checkpoints`, the settings that make it look both ways."""

LOOKING_AHEAD = [
    (family, variant) for of_all in (ENCODERS, BOTH_WAYS) for family, of in of_all.items() for variant in of
]

_IN_SHORT = {
    ("modernbert", "three_heads_small_window"),
    ("bert", "three_heads_two_types"),
    ("xlm-roberta", "three_heads_padding_1"),
    ("gemma3_text", "wide_heads_tied_small_window"),
    ("qwen2", "all_to_one_window"),
}


def encoder_cases() -> list[Any]:
    """Parameters (family, variant): in `make test` one of each kind, elsewhere all."""
    return [
        pytest.param(each, id="-".join(each), marks=[] if each in _IN_SHORT else pytest.mark.deep)
        for each in LOOKING_AHEAD
    ]


def write_encoder(directory: Path, family: str, variant: str, **changes: Any) -> Path:
    """Write a model without its head, the same one every time, and a tokenizer of letters."""
    from transformers import AutoConfig, AutoModel

    if family in ENCODERS:
        settings = {**_IDS, **ENCODERS[family][variant], **changes}
        model = AutoModel.from_config(AutoConfig.for_model(family, **settings))
        randomise(model, seed=zlib.crc32(f"{family}/{variant}".encode()))
        model.save_pretrained(directory)
    else:
        settings = BOTH_WAYS[family][variant] | changes
        write_checkpoint(directory / "whole", family, variant, **settings)
        AutoModel.from_pretrained(directory / "whole").save_pretrained(directory)
    write_letters(directory, json.loads((directory / "config.json").read_text())["vocab_size"])
    return directory


def states_of(directory: Path, prompt: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Transformers' states behind the last norm, `[T, H]` float32."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(directory, dtype=dtype).eval()
    with torch.no_grad():
        return model(torch.tensor([prompt])).last_hidden_state[0].float()


def write_modules(directory: Path, pooling: dict[str, Any], *kinds: str) -> Path:
    """Write `modules.json` of sentence-transformers: a transformer, this pooling, and modules of these kinds."""
    names = ("Transformer", "Pooling", *kinds)
    modules = [
        {"idx": index, "name": str(index), "path": f"{index}_{name}" if index else "",
         "type": f"sentence_transformers.models.{name}"}
        for index, name in enumerate(names)
    ]  # fmt: skip
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(parents=True, exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **pooling}))
    return directory
