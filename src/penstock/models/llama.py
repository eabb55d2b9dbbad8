"""Llama (1 to 3.3) and everything published under its name: `model_type` "llama".

The plain case of the shared decoder; biases are optional. `pretraining_tp` sliced the training across devices and
changes nothing here.
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
    attention_bias = reader.boolean("attention_bias", default=False)
    config = read_decoder(
        reader,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=reader.boolean("mlp_bias", default=False),
    )
    return Decoder.bind(config, parameters)
