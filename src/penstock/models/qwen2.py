"""Qwen2 and Qwen2.5: `model_type` "qwen2".

The shared decoder, with biases on query, key and value projections and optional windows in its later layers.
"""

from __future__ import annotations

from typing import Any

from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import MAX_WINDOW, DecoderParts, layer_windows, read_decoder
from penstock.nn.operations import Operations
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader
from penstock.weights.gguf_decoder import DECODER_TENSORS, decoder_settings, refuse_window
from penstock.weights.gguf_dialect import GgufDialect
from penstock.weights.gguf_keys import GgufKeys

__all__ = ["GGUF", "gguf_settings", "load", "read_windows"]


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    reader.expect("hidden_act", ["silu"], "silu")
    parts = DecoderParts(read_decoder(reader, windows=read_windows(reader)), weights)

    def layer(index: int, name: str) -> Operations:
        attention = parts.attention(f"{name}.self_attn", index, qkv_bias=True)
        return parts.pre_norm_layer(name, attention, parts.mlp(f"{name}.mlp"))

    return parts.program(layer)


def read_windows(reader: ConfigReader) -> tuple[int | None, ...]:
    """The window of each layer: with `use_sliding_window`, layers from `max_window_layers` on have one."""
    window, first = None, 0
    if reader.boolean("use_sliding_window", default=False):
        window = reader.optional_integer("sliding_window", 1, MAX_WINDOW, absent=4096)
        first = reader.integer("max_window_layers", 0, MAX_WINDOW, default=28)
    return layer_windows(reader, window, lambda layer: layer >= first)


def gguf_settings(keys: GgufKeys) -> dict[str, Any]:
    """The settings of a GGUF file, which cannot say which layers have a window; refuses files with one."""
    refuse_window(keys)
    return decoder_settings(keys)


GGUF = GgufDialect("qwen2", "qwen2", DECODER_TENSORS, gguf_settings)
