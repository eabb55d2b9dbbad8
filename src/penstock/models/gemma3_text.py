"""Gemma 3's text model: `model_type` "gemma3_text" (Gemma Team 2025, section 2); the 1B is published as text only.

Gemma 2's layer without soft caps on scores; queries and keys are normed per head, and five of six layers have a sliding
window. Windowed layers use their own RoPE base, unscaled; the sixth a larger one, scaled linearly in larger models.
EmbeddingGemma (Schechter Vera et al. 2025) is the same with bidirectional attention: half of each window is ahead.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.contract.model import ModelShape
from penstock.kernels.attention_spec import AttentionSpec
from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import MAX_LAYERS, MAX_WIDTH, MAX_WINDOW, DecoderParts, layer_windows, read_decoder
from penstock.models.rope_config import read_layer_rope
from penstock.nn.blocks import Normalization, residual
from penstock.nn.operations import Activation, Operations
from penstock.nn.program import Program
from penstock.nn.rope import Rope
from penstock.nn.weight_loader import WeightLoader

__all__ = ["load"]

_GELU = "gelu_pytorch_tanh"
_SIZES = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}
"""Defaults for keys that the text part of a published config may omit, from transformers' `Gemma3TextConfig`."""

_GLOBAL_THETA, _LOCAL_THETA = 1e6, 1e4
_PATTERN = 6


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    reader = reader.with_defaults(_SIZES)
    reader.expect("hidden_activation", [_GELU], _GELU)
    both_ways = reader.boolean("use_bidirectional_attention", default=False)
    if both_ways:
        reader.expect("is_causal", [True], True)  # false would mean a different window
    if reader.is_set("attn_logit_softcapping"):  # transformers reads it and does not use it
        raise reader.error("attn_logit_softcapping", "is not implemented: this family has no soft cap of scores")
    softcap = reader.optional_number("final_logit_softcapping", 1e-3, 1e6)
    bias = reader.boolean("attention_bias", default=False)
    scale = reader.number("query_pre_attn_scalar", 1e-3, MAX_WIDTH, default=256) ** -0.5
    config = read_decoder(
        reader,
        head_dim=256,
        tied=True,
        windows=_read_windows(reader, both_ways=both_ways),
        rope=lambda shape: _global_rope(reader, shape),
    )
    local_rope = read_layer_rope(
        reader,
        "sliding_attention",
        config.shape.head_dim,
        config.shape.max_positions,
        theta=_LOCAL_THETA,
        theta_key="rope_local_base_freq",
        scaled=False,
    )
    parts, head_dim = DecoderParts(config, weights), config.shape.head_dim

    def layer(index: int, name: str) -> Operations:
        def norm(part: str, width: int = 0) -> Normalization:
            return parts.norm(f"{name}.{part}", width, plus_one=True)

        window = config.windows[index]
        ahead = 0 if not both_ways else None if window is None else window - 1
        spec = AttentionSpec(scale, window=window, ahead=ahead)
        norms = norm("self_attn.q_norm", head_dim), norm("self_attn.k_norm", head_dim)
        attention = parts.attention(f"{name}.self_attn", index, qkv_bias=bias, output_bias=bias, spec=spec, norms=norms)
        if spec.window is not None:
            attention = replace(attention, rope=parts.rotary_table(local_rope))
        mlp = parts.mlp(f"{name}.mlp", activation=Activation.GELU_NEW_AND_MUL)
        before_attention, after_attention = norm("input_layernorm"), norm("post_attention_layernorm")
        before_mlp, after_mlp = norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")
        return (
            *residual(parts.stream, attention, before=before_attention, after=after_attention),
            *residual(parts.stream, mlp, before=before_mlp, after=after_mlp),
        )

    scale_of_embeddings = config.shape.hidden_size**0.5
    return parts.program(layer, embedding_scale=scale_of_embeddings, plus_one=True, softcap=softcap)


def _global_rope(reader: ConfigReader, shape: ModelShape) -> Rope:
    return read_layer_rope(reader, "full_attention", shape.head_dim, shape.max_positions, theta=_GLOBAL_THETA)


def _read_windows(reader: ConfigReader, *, both_ways: bool) -> tuple[int | None, ...]:
    """The window of each layer; every sixth has none, unless `layer_types` or `sliding_window_pattern` say otherwise.

    In a bidirectional model `sliding_window` counts both directions, so half of it lies behind.
    """
    keys = [key for key in ("sliding_window_pattern", "_sliding_window_pattern") if reader.is_set(key)]
    pattern = reader.integer(keys[0] if keys else "sliding_window_pattern", 1, MAX_LAYERS, default=_PATTERN)
    window = reader.optional_integer("sliding_window", 1, MAX_WINDOW, absent=4096)
    if window is None and not reader.is_set("layer_types"):
        raise reader.error("sliding_window", "is null, but most layers of this family slide; set layer_types")
    if both_ways and window is not None:
        window = window // 2 + 1
    return layer_windows(reader, window, lambda layer: (layer + 1) % pattern != 0)
