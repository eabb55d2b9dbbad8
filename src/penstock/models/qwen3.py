"""Qwen3, dense: `model_type` "qwen3".

The shared decoder; queries and keys are normed over each head. Heads are 128 wide unless the config says otherwise,
whatever the hidden size.
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
    attention_bias = reader.boolean("attention_bias", default=False)
    config = read_decoder(
        reader,
        window=layer_window(reader),
        head_dim=128,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
    )
    return Decoder.bind(config, parameters)
