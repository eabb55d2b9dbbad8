"""Mistral: `model_type` "mistral".

The shared decoder, with a sliding window in the first releases. A config that says nothing of the window has the first
release's 4096; null means none.
"""

from __future__ import annotations

from penstock.models.config_reader import ConfigReader
from penstock.models.decoder_config import read_decoder
from penstock.nn.causal_lm import CausalLM
from penstock.nn.decoder import Decoder
from penstock.nn.parameters import Parameters

__all__ = ["load"]


def load(reader: ConfigReader, parameters: Parameters) -> CausalLM:
    """Build the model; see `families.load`."""
    window = reader.optional_integer("sliding_window", 1, 1 << 30, absent=4096)
    return Decoder.bind(read_decoder(reader, window=window), parameters)
