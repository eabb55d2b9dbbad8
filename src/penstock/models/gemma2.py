"""Gemma 2: `model_type` "gemma2" (Riviere et al. 2024, section 2).

Attention and MLP have a norm before and another after, norms multiply by one plus their weight, embeddings are scaled
by the root of the hidden size, scores and logits are soft-capped, and every other layer has a sliding window, starting
with the first. The config sets the scale of scores, and heads are 256 wide whatever the hidden size.
"""

from __future__ import annotations

from typing import Any

from penstock.kernels.attention_spec import AttentionSpec
from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import MAX_WIDTH, MAX_WINDOW, DecoderParts, layer_windows, read_decoder
from penstock.nn.blocks import Normalization, residual
from penstock.nn.operations import Activation, Operations
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader
from penstock.weights.gguf_decoder import DECODER_TENSORS, decoder_settings
from penstock.weights.gguf_dialect import Arrangement, GgufDialect
from penstock.weights.gguf_keys import GgufKeys

__all__ = ["GGUF", "load"]

_GELU = "gelu_pytorch_tanh"
_SMALLEST_CAP, _LARGEST_CAP = 1e-3, 1e6
_LAYERS_OF_27B = 46


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the model; see `families.load`."""
    # Files have both keys, and if they differ, there is no telling which one the model was trained with.
    for key in ("hidden_activation", "hidden_act"):
        reader.expect(key, [_GELU], _GELU)
    reader.expect("use_bidirectional_attention", [False], False)
    bias = reader.boolean("attention_bias", default=False)
    scale = reader.number("query_pre_attn_scalar", 1e-3, MAX_WIDTH, default=256) ** -0.5
    softcap = _read_cap(reader, "attn_logit_softcapping", 50.0)
    logit_softcap = _read_cap(reader, "final_logit_softcapping", 30.0)
    parts = DecoderParts(read_decoder(reader, head_dim=256, tied=True, windows=_read_windows(reader)), weights)

    def layer(index: int, name: str) -> Operations:
        def norm(part: str) -> Normalization:
            return parts.norm(f"{name}.{part}", plus_one=True)

        spec = AttentionSpec(scale, softcap, parts.config.windows[index])
        attention = parts.attention(f"{name}.self_attn", index, qkv_bias=bias, output_bias=bias, spec=spec)
        mlp = parts.mlp(f"{name}.mlp", activation=Activation.GELU_NEW_AND_MUL)
        before_attention, after_attention = norm("input_layernorm"), norm("post_attention_layernorm")
        before_mlp, after_mlp = norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")
        return (
            *residual(parts.stream, attention, before=before_attention, after=after_attention),
            *residual(parts.stream, mlp, before=before_mlp, after=after_mlp),
        )

    hidden = parts.config.shape.hidden_size
    return parts.program(layer, embedding_scale=hidden**0.5, plus_one=True, softcap=logit_softcap)


def _read_cap(reader: ConfigReader, key: str, absent: float) -> float | None:
    return reader.optional_number(key, _SMALLEST_CAP, _LARGEST_CAP, absent)


def _read_windows(reader: ConfigReader) -> tuple[int | None, ...]:
    """The window of each layer: every other layer has one, starting with the first, unless `layer_types` is set."""
    window = reader.optional_integer("sliding_window", 1, MAX_WINDOW, absent=4096)
    if window is None and not reader.is_set("layer_types"):
        raise reader.error("sliding_window", "is null, but every other layer of this family slides; set layer_types")
    return layer_windows(reader, window, lambda layer: layer % 2 == 0)


def _gguf_settings(keys: GgufKeys) -> dict[str, Any]:
    """Files omit the scale of scores; llama.cpp infers it from the number of layers (`gemma2.cpp`)."""
    settings = decoder_settings(keys)
    per_head = settings["hidden_size"] // settings["num_attention_heads"]
    return settings | {
        "hidden_act": _GELU,
        "query_pre_attn_scalar": per_head if settings["num_hidden_layers"] == _LAYERS_OF_27B else settings["head_dim"],
        "attn_logit_softcapping": keys.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.real("final_logit_softcapping", 30.0),
        "sliding_window": keys.size("attention.sliding_window", 4096),
    }


_NORMS = {
    "output_norm": "model.norm",
    "blk.{layer}.attn_norm": "model.layers.{layer}.input_layernorm",
    "blk.{layer}.post_attention_norm": "model.layers.{layer}.post_attention_layernorm",
    "blk.{layer}.ffn_norm": "model.layers.{layer}.pre_feedforward_layernorm",
    "blk.{layer}.post_ffw_norm": "model.layers.{layer}.post_feedforward_layernorm",
}

GGUF = GgufDialect(
    architecture="gemma2",
    model_type="gemma2",
    tensors={**DECODER_TENSORS, **_NORMS},
    metadata=_gguf_settings,
    arrangements={f"{name}.weight": Arrangement.MINUS_ONE for name in _NORMS},
)
