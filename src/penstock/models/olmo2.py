"""OLMo 2: `model_type` "olmo2" (OLMo Team 2024, "2 OLMo 2 Furious", section 3).

The shared decoder with its norms behind attention and MLP instead of before them, and with queries and keys normed over
all heads together before they are rotated.
"""

from __future__ import annotations

from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import DecoderParts, read_decoder
from penstock.nn.blocks import residual
from penstock.nn.operations import Operations
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader
from penstock.weights.gguf_decoder import DECODER_TENSORS, decoder_settings
from penstock.weights.gguf_dialect import GgufDialect

__all__ = ["GGUF", "load"]


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    reader.expect("hidden_act", ["silu"], "silu")
    bias = reader.boolean("attention_bias", default=False)
    parts = DecoderParts(read_decoder(reader, eps=1e-5), weights)
    shape = parts.config.shape
    q_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim

    def layer(index: int, name: str) -> Operations:
        attn = f"{name}.self_attn"
        norms = parts.norm(f"{attn}.q_norm", q_width), parts.norm(f"{attn}.k_norm", kv_width)
        attention = parts.attention(attn, index, qkv_bias=bias, output_bias=bias, norms=norms, norms_heads=False)
        after_attention = parts.norm(f"{name}.post_attention_layernorm")
        after_mlp = parts.norm(f"{name}.post_feedforward_layernorm")
        return (
            *residual(parts.stream, attention, after=after_attention),
            *residual(parts.stream, parts.mlp(f"{name}.mlp"), after=after_mlp),
        )

    return parts.program(layer)


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
    metadata=decoder_settings,
)
"""OLMo 3 calls its files `olmo2` too; its windows, which nothing here asks for, are refused."""
