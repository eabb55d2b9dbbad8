"""Phi-3, Phi-3.5 and Phi-4 (mini): `model_type` "phi3".

The shared decoder with fused projections, partially rotated heads, LongRoPE for contexts of 128k, and a sliding window
if the config sets one. Which of LongRoPE's factors apply is fixed when the model is loaded; see `families.load`.
"""

from __future__ import annotations

from typing import Any

from penstock.kernels.attention_spec import AttentionSpec
from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import MAX_WINDOW, DecoderParts, layer_windows, read_decoder
from penstock.nn.blocks import Attention, GatedMlp, Projection
from penstock.nn.operations import Heads, Operations
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader
from penstock.weights.gguf_decoder import DECODER_TENSORS, decoder_settings
from penstock.weights.gguf_dialect import GgufDialect
from penstock.weights.gguf_keys import GgufKeys

__all__ = ["GGUF", "load"]


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    reader.expect("hidden_act", ["silu"], "silu")
    reader.expect("attention_bias", [False], False)
    windows = layer_windows(reader, reader.optional_integer("sliding_window", 1, MAX_WINDOW), lambda _: True)
    config = read_decoder(reader, eps=1e-5, windows=windows, partial_rotary=True)
    parts, shape = DecoderParts(config, weights), config.shape
    q_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim

    def attention(layer: int, name: str) -> Attention:
        return Attention(
            heads=Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim),
            qkv=Projection.bind(weights, f"{name}.qkv_proj", q_width + 2 * kv_width, shape.hidden_size),
            output=Projection.bind(weights, f"{name}.o_proj", shape.hidden_size, q_width),
            cache=layer,
            spec=AttentionSpec(shape.head_dim**-0.5, window=config.windows[layer]),
            rope=parts.rope,
        )

    def mlp(name: str) -> GatedMlp:
        inner = config.inner_size
        return GatedMlp(
            gate_up=Projection.bind(weights, f"{name}.gate_up_proj", 2 * inner, shape.hidden_size),
            down=Projection.bind(weights, f"{name}.down_proj", shape.hidden_size, inner),
            inner_size=inner,
        )

    def layer(index: int, name: str) -> Operations:
        return parts.pre_norm_layer(name, attention(index, f"{name}.self_attn"), mlp(f"{name}.mlp"))

    return parts.program(layer)


def _settings(keys: GgufKeys) -> dict[str, Any]:
    return decoder_settings(keys, partial_rotary=True) | {"sliding_window": keys.window()}


_FUSED = {
    "blk.{layer}.attn_qkv": "model.layers.{layer}.self_attn.qkv_proj",
    "blk.{layer}.ffn_up": "model.layers.{layer}.mlp.gate_up_proj",
}
_IN_PARTS = {f"blk.{{layer}}.{name}" for name in ("attn_q", "attn_k", "attn_v", "ffn_gate")}

GGUF = GgufDialect(
    architecture="phi3",
    model_type="phi3",
    tensors={stored: name for stored, name in DECODER_TENSORS.items() if stored not in _IN_PARTS} | _FUSED,
    metadata=_settings,
)
