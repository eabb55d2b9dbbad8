"""Mistral: `model_type` "mistral".

The shared decoder, with a sliding window in the first releases. A config without the key has the first release's window
of 4096; null means none.
"""

from __future__ import annotations

from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import MAX_WINDOW, DecoderParts, layer_windows, read_decoder
from penstock.nn.operations import Operations
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader

__all__ = ["load"]


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    reader.expect("hidden_act", ["silu"], "silu")
    window = reader.optional_integer("sliding_window", 1, MAX_WINDOW, absent=4096)
    parts = DecoderParts(read_decoder(reader, windows=layer_windows(reader, window, lambda _: True)), weights)

    def layer(index: int, name: str) -> Operations:
        return parts.pre_norm_layer(name, parts.attention(f"{name}.self_attn", index), parts.mlp(f"{name}.mlp"))

    return parts.program(layer)
