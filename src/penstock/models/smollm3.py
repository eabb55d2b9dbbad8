"""SmolLM3: `model_type` "smollm3" (Bakouch et al. 2025).

The shared decoder, except that every fourth layer does not rotate its queries and keys (NoPE, Yang et al. 2025); the
config may list other layers. With `use_sliding_window`, the layers without rotation have a window.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import MAX_LAYERS, MAX_WINDOW, DecoderParts, layer_windows, read_decoder
from penstock.nn.operations import Operations
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader
from penstock.weights.gguf_decoder import DECODER_TENSORS, INTERLEAVED, decoder_settings
from penstock.weights.gguf_dialect import GgufDialect
from penstock.weights.gguf_keys import GgufKeys

__all__ = ["GGUF", "load"]

_INTERVAL = 4


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    reader.expect("hidden_act", ["silu"], "silu")
    attention_bias = reader.boolean("attention_bias", default=False)
    mlp_bias = reader.boolean("mlp_bias", default=False)
    rotated = _read_rotated(reader)
    config = read_decoder(reader, tied=True, windows=_read_windows(reader, rotated), rope_theta=2e6)
    parts = DecoderParts(config, weights)

    def layer(index: int, name: str) -> Operations:
        attention = parts.attention(f"{name}.self_attn", index, qkv_bias=attention_bias, output_bias=attention_bias)
        if not rotated[index]:
            attention = replace(attention, rope=None)
        return parts.pre_norm_layer(name, attention, parts.mlp(f"{name}.mlp", bias=mlp_bias))

    return parts.program(layer)


def _read_rotated(reader: ConfigReader) -> tuple[bool, ...]:
    """Whether each layer is rotated. Despite its name, `no_rope_layers` has a 1 for each rotated layer."""
    layers = reader.integer("num_hidden_layers", 1, MAX_LAYERS)
    if not reader.is_set("no_rope_layers"):
        interval = reader.integer("no_rope_layer_interval", 1, MAX_WINDOW, default=_INTERVAL)
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    flags = reader.integers("no_rope_layers", 0, 1)
    if len(flags) < layers:
        raise reader.error("no_rope_layers", f"must have a 0 or 1 for each of {layers} layers, got {len(flags)}")
    return tuple(flag == 1 for flag in flags[:layers])


def _read_windows(reader: ConfigReader, rotated: tuple[bool, ...]) -> tuple[int | None, ...]:
    window = None
    if reader.boolean("use_sliding_window", default=False):
        window = reader.optional_integer("sliding_window", 1, MAX_WINDOW)
    return layer_windows(reader, window, lambda layer: not rotated[layer])


def _gguf_settings(keys: GgufKeys) -> dict[str, Any]:
    """Files do not say which layers are rotated; llama.cpp skips every fourth (`llama-model.cpp`)."""
    return decoder_settings(keys) | {
        "no_rope_layer_interval": _INTERVAL,
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": keys.has_tensor("blk.0.ffn_gate.bias"),
    }


GGUF = GgufDialect(
    architecture="smollm3",
    model_type="smollm3",
    tensors=DECODER_TENSORS,
    metadata=_gguf_settings,
    arrangements=INTERLEAVED,
)
"""Query and key rows are interleaved in every layer, as in a Llama's files."""
