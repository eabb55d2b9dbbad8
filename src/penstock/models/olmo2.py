"""OLMo 2: `model_type` "olmo2" (OLMo Team 2024, "2 OLMo 2 Furious", section 3).

The shared decoder with norms after attention and MLP instead of before, and with queries and keys normed over all heads
together before they are rotated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import DecoderConfig, DecoderParts, read_decoder
from penstock.nn.blocks import residual
from penstock.nn.operations import Operations
from penstock.nn.program import Program
from penstock.nn.rope import Rope
from penstock.nn.weight_loader import WeightLoader
from penstock.weights.gguf_decoder import DECODER_TENSORS, decoder_settings
from penstock.weights.gguf_dialect import GgufDialect
from penstock.weights.gguf_keys import GgufKeys

__all__ = ["GGUF", "build", "load"]


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    config = read_decoder(reader, eps=1e-5)
    return build(reader, weights, config, config.rope)


def build(reader: ConfigReader, weights: WeightLoader, config: DecoderConfig, local: Rope) -> Program:
    """Build a model of OLMo 2's layers.

    Args:
        reader: the config.
        weights: the checkpoint.
        config: the shared settings, already read.
        local: the rope of layers with a window.
    """
    reader.expect("hidden_act", ["silu"], "silu")
    bias = reader.boolean("attention_bias", default=False)
    parts = DecoderParts(config, weights)
    shape = parts.config.shape
    q_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim

    def layer(index: int, name: str) -> Operations:
        attn = f"{name}.self_attn"
        norms = parts.norm(f"{attn}.q_norm", q_width), parts.norm(f"{attn}.k_norm", kv_width)
        attention = parts.attention(attn, index, qkv_bias=bias, output_bias=bias, norms=norms, norms_heads=False)
        if config.windows[index] is not None:
            attention = replace(attention, rope=parts.rotary_table(local))
        after_attention = parts.norm(f"{name}.post_attention_layernorm")
        after_mlp = parts.norm(f"{name}.post_feedforward_layernorm")
        return (
            *residual(parts.stream, attention, after=after_attention),
            *residual(parts.stream, parts.mlp(f"{name}.mlp"), after=after_mlp),
        )

    return parts.program(layer)


def _gguf_settings(keys: GgufKeys) -> dict[str, Any]:
    """OLMo 3's files have the architecture `olmo2` too, with a window in three of four layers, or in listed layers."""
    settings, window, pattern = decoder_settings(keys), keys.window(), "attention.sliding_window_pattern"
    if window is None:
        return settings
    settings |= {"model_type": "olmo3", "sliding_window": window}
    if not keys.has(pattern):
        return settings
    slides = keys.get(pattern)
    if not isinstance(slides, tuple) or len(slides) != settings["num_hidden_layers"]:
        raise keys.fail(pattern, "must say of each layer whether it has the window")
    return settings | {"layer_types": ["sliding_attention" if each else "full_attention" for each in slides]}


_NORMS = {
    "blk.{layer}.attn_q_norm": "model.layers.{layer}.self_attn.q_norm",
    "blk.{layer}.attn_k_norm": "model.layers.{layer}.self_attn.k_norm",
    "blk.{layer}.post_attention_norm": "model.layers.{layer}.post_attention_layernorm",
    "blk.{layer}.post_ffw_norm": "model.layers.{layer}.post_feedforward_layernorm",
}
_NOT_BEFORE = ("blk.{layer}.attn_norm", "blk.{layer}.ffn_norm")

GGUF = GgufDialect(
    architecture="olmo2",
    model_type="olmo2",
    tensors={name: ours for name, ours in DECODER_TENSORS.items() if name not in _NOT_BEFORE} | _NORMS,
    metadata=_gguf_settings,
)
