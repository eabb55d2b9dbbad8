"""Qwen2 and Qwen2.5: `model_type` "qwen2".

The shared decoder; queries, keys and values always have biases, the output projection never.
"""

from __future__ import annotations

from penstock.models.config_reader import ConfigReader
from penstock.models.decoder_config import layer_window, read_decoder
from penstock.nn.causal_lm import CausalLM
from penstock.nn.decoder import Decoder
from penstock.nn.parameters import Parameters

__all__ = ["load"]


def load(reader: ConfigReader, parameters: Parameters) -> CausalLM:
    """Build the model; see `families.load`."""
    return Decoder.bind(read_decoder(reader, window=layer_window(reader), qkv_bias=True), parameters)
