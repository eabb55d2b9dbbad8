"""Qwen3: `model_type` "qwen3".

The shared decoder, with queries and keys normed per head before they are rotated, and 128-wide heads whatever the
hidden size.
"""

from __future__ import annotations

from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import DecoderParts, read_decoder
from penstock.models.qwen2 import gguf_settings, read_windows
from penstock.nn.operations import Operations
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader
from penstock.weights.gguf_decoder import DECODER_TENSORS
from penstock.weights.gguf_dialect import GgufDialect

__all__ = ["GGUF", "load"]


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    reader.expect("hidden_act", ["silu"], "silu")
    bias = reader.boolean("attention_bias", default=False)
    parts = DecoderParts(read_decoder(reader, head_dim=128, windows=read_windows(reader)), weights)
    head_dim = parts.config.shape.head_dim

    def layer(index: int, name: str) -> Operations:
        attn = f"{name}.self_attn"
        norms = parts.norm(f"{attn}.q_norm", head_dim), parts.norm(f"{attn}.k_norm", head_dim)
        attention = parts.attention(attn, index, qkv_bias=bias, output_bias=bias, norms=norms)
        return parts.pre_norm_layer(name, attention, parts.mlp(f"{name}.mlp"))

    return parts.program(layer)


GGUF = GgufDialect(
    architecture="qwen3",
    model_type="qwen3",
    tensors={
        **DECODER_TENSORS,
        "blk.{layer}.attn_q_norm": "model.layers.{layer}.self_attn.q_norm",
        "blk.{layer}.attn_k_norm": "model.layers.{layer}.self_attn.k_norm",
    },
    metadata=gguf_settings,
)
