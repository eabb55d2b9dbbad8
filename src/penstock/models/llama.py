"""Llama (1 to 3.3) and everything published under its name: `model_type` "llama".

The plain case of the shared decoder; biases are optional. `pretraining_tp` sliced the training across devices and
changes nothing here.
"""

from __future__ import annotations

from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import DecoderParts, read_decoder
from penstock.nn.operations import Operations
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader

__all__ = ["load"]


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    reader.expect("hidden_act", ["silu"], "silu")
    attention_bias = reader.boolean("attention_bias", default=False)
    mlp_bias = reader.boolean("mlp_bias", default=False)
    parts = DecoderParts(read_decoder(reader), weights)

    def layer(index: int, name: str) -> Operations:
        attention = parts.attention(f"{name}.self_attn", index, qkv_bias=attention_bias, output_bias=attention_bias)
        return parts.pre_norm_layer(name, attention, parts.mlp(f"{name}.mlp", bias=mlp_bias))

    return parts.program(layer)
