"""Seed-OSS: `model_type` "seed_oss" (ByteDance Seed Team 2025).

The shared decoder with biases on queries, keys and values, 128-wide heads whatever the hidden size, and a separate key
for the bias of the output projection.
"""

from __future__ import annotations

from typing import Any

from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import DecoderParts, read_decoder
from penstock.nn.operations import Operations
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader
from penstock.weights.gguf_decoder import DECODER_TENSORS, decoder_settings
from penstock.weights.gguf_dialect import GgufDialect
from penstock.weights.gguf_keys import GgufKeys

__all__ = ["GGUF", "load"]


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    reader.expect("hidden_act", ["silu"], "silu")
    qkv_bias = reader.boolean("attention_bias", default=True)
    output_bias = reader.boolean("attention_out_bias", default=False)
    mlp_bias = reader.boolean("mlp_bias", default=False)
    parts = DecoderParts(read_decoder(reader, head_dim=128), weights)

    def layer(index: int, name: str) -> Operations:
        attention = parts.attention(f"{name}.self_attn", index, qkv_bias=qkv_bias, output_bias=output_bias)
        return parts.pre_norm_layer(name, attention, parts.mlp(f"{name}.mlp", bias=mlp_bias))

    return parts.program(layer)


def _gguf_settings(keys: GgufKeys) -> dict[str, Any]:
    return decoder_settings(keys) | {
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "attention_out_bias": keys.has_tensor("blk.0.attn_output.bias"),
        "mlp_bias": keys.has_tensor("blk.0.ffn_gate.bias"),
    }


GGUF = GgufDialect(
    architecture="seed_oss",
    model_type="seed_oss",
    tensors={
        **{name: ours for name, ours in DECODER_TENSORS.items() if not name.endswith("ffn_norm")},
        "blk.{layer}.post_attention_norm": "model.layers.{layer}.post_attention_layernorm",
    },
    metadata=_gguf_settings,
)
"""Files name the norm before the MLP `post_attention_norm`, as in Hugging Face's checkpoints."""
