"""StarCoder2: `model_type` "starcoder2" (Lozhkov et al. 2024).

The shared decoder with layer norms, biases on every projection, an MLP without gate, and a window in every layer if the
config sets one.
"""

from __future__ import annotations

from typing import Any

from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import MAX_LAYERS, MAX_WINDOW, DecoderParts, read_decoder
from penstock.nn.blocks import PlainMlp, Projection
from penstock.nn.operations import Activation, NormKind, Operations
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader
from penstock.weights.gguf_decoder import DECODER_TENSORS, decoder_settings
from penstock.weights.gguf_dialect import GgufDialect
from penstock.weights.gguf_keys import GgufKeys

__all__ = ["GGUF", "load"]

_GELU = "gelu_pytorch_tanh"
_EPS = "norm_epsilon"


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    reader.expect("hidden_act", [_GELU], _GELU)
    bias = reader.boolean("use_bias", default=True)
    # ignore `layer_types`: transformers gives all layers the window
    window = reader.optional_integer("sliding_window", 1, MAX_WINDOW)
    windows = (window,) * reader.integer("num_hidden_layers", 1, MAX_LAYERS)
    config = read_decoder(reader, tied=True, eps=1e-5, eps_key=_EPS, norm=NormKind.LAYER, windows=windows)
    parts, hidden, inner = DecoderParts(config, weights), config.shape.hidden_size, config.inner_size

    def layer(index: int, name: str) -> Operations:
        attention = parts.attention(f"{name}.self_attn", index, qkv_bias=bias, output_bias=bias)
        mlp = PlainMlp(
            up=Projection.bind(weights, f"{name}.mlp.c_fc", inner, hidden, bias=bias),
            down=Projection.bind(weights, f"{name}.mlp.c_proj", hidden, inner, bias=bias),
            inner_size=inner,
            activation=Activation.GELU_NEW,
        )
        return parts.pre_norm_layer(name, attention, mlp)

    return parts.program(layer)


def _gguf_settings(keys: GgufKeys) -> dict[str, Any]:
    """Files omit the window, and llama.cpp computes without one; a file that sets one is refused."""
    settings = decoder_settings(keys, layer_norm_key=_EPS)
    return settings | {"hidden_act": _GELU, "use_bias": keys.has_tensor("blk.0.attn_q.bias")}


GGUF = GgufDialect(
    architecture="starcoder2",
    model_type="starcoder2",
    tensors={
        **{name: ours for name, ours in DECODER_TENSORS.items() if "ffn_gate" not in name},
        "blk.{layer}.ffn_up": "model.layers.{layer}.mlp.c_fc",
        "blk.{layer}.ffn_down": "model.layers.{layer}.mlp.c_proj",
    },
    metadata=_gguf_settings,
)
