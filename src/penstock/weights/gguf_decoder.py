"""What the GGUF files of Llama-like families have in common: tensor names, and settings translated to Hugging Face's.

Decides what the shared keys mean. Does not know families: each family calls these functions and adds its own settings.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.contract.errors import ModelFileError
from penstock.weights.gguf_dialect import Arrangement
from penstock.weights.gguf_keys import GgufKeys

__all__ = [
    "DECODER_TENSORS",
    "INTERLEAVED",
    "attending_layers",
    "decoder_settings",
    "head_counts",
    "heads_and_width",
    "refuse_window",
    "rope_scaling",
]

_LAYER = "model.layers.{layer}"

_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"

DECODER_TENSORS: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{layer}.attn_norm": f"{_LAYER}.input_layernorm",
    "blk.{layer}.attn_q": f"{_LAYER}.self_attn.q_proj",
    "blk.{layer}.attn_k": f"{_LAYER}.self_attn.k_proj",
    "blk.{layer}.attn_v": f"{_LAYER}.self_attn.v_proj",
    "blk.{layer}.attn_output": f"{_LAYER}.self_attn.o_proj",
    "blk.{layer}.ffn_norm": f"{_LAYER}.post_attention_layernorm",
    "blk.{layer}.ffn_gate": f"{_LAYER}.mlp.gate_proj",
    "blk.{layer}.ffn_up": f"{_LAYER}.mlp.up_proj",
    "blk.{layer}.ffn_down": f"{_LAYER}.mlp.down_proj",
}
"""The tensors of a Llama, as `GgufDialect.tensors` has them."""

INTERLEAVED: Mapping[str, Arrangement] = {
    "blk.{layer}.attn_q.weight": Arrangement.INTERLEAVED_QUERY,
    "blk.{layer}.attn_q.bias": Arrangement.INTERLEAVED_QUERY,
    "blk.{layer}.attn_k.weight": Arrangement.INTERLEAVED_KEY,
    "blk.{layer}.attn_k.bias": Arrangement.INTERLEAVED_KEY,
}
"""Arrangements of families with query and key rows in the order of Llama's release, which rotates adjacent pairs."""


def decoder_settings(
    keys: GgufKeys,
    *,
    partial_rotary: bool = False,
    layer_norm_key: str | None = None,
    kv_heads: int = 0,
    inner_size: int = 0,
) -> dict[str, Any]:
    """The settings that Llama-like families share, without sliding windows.

    Args:
        keys: the file's keys.
        partial_rotary: whether the family may rotate only part of each head (`rope.dimension_count`).
        layer_norm_key: Hugging Face's key for the epsilon of a family with layer norms; None for RMS norms.
        kv_heads: key heads of every attention layer (`attending_layers`); 0 for a family in which all layers attend.
        inner_size: MLP width if the file may omit it, because all layers have experts; 0 if the file must have it.
    """
    heads, width = heads_and_width(keys)
    kv_heads = kv_heads or keys.size("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise keys.fail("attention.head_count_kv", f"{kv_heads} does not divide {heads} heads")
    if not keys.has("attention.key_length") and width % heads:
        raise keys.fail("embedding_length", f"{width} is no multiple of {heads} heads")
    head_dim = keys.size("attention.key_length", width // heads)
    rotated = keys.size("rope.dimension_count", head_dim)
    if rotated > head_dim or (rotated < head_dim and not partial_rotary):
        raise _other_width(keys, "rope.dimension_count", head_dim)
    if keys.size("attention.value_length", head_dim) != head_dim:
        raise _other_width(keys, "attention.value_length", head_dim)
    config = {
        "num_hidden_layers": keys.size("block_count"),
        "hidden_size": width,
        "intermediate_size": keys.size("feed_forward_length", inner_size),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rope_theta": keys.real("rope.freq_base", 10000.0),
        "max_position_embeddings": keys.size("context_length"),
        "hidden_act": "silu",
    }
    if layer_norm_key is None:
        config["rms_norm_eps"] = keys.real("attention.layer_norm_rms_epsilon")
    else:
        config[layer_norm_key] = keys.real("attention.layer_norm_epsilon")
    if rotated < head_dim:
        config["partial_rotary_factor"] = _share(rotated, head_dim)
    scaling = rope_scaling(keys, rotated)
    return config | ({"rope_scaling": scaling} if scaling else {})


def attending_layers(keys: GgufKeys) -> tuple[int, list[bool]]:
    """For a hybrid model: the key heads of each attention layer, and which layers attend. The others have none."""
    key = "attention.head_count_kv"
    counts = keys.sizes(key, keys.size("block_count"))
    found = set(counts) - {0}
    if len(found) != 1:
        raise keys.fail(key, f"must be 0 or one number in all layers, got {reprlib.repr(counts)}")
    return found.pop(), [count > 0 for count in counts]


def head_counts(
    config: Mapping[str, Any], attends: Sequence[bool] | None, indices: Sequence[int] | None = None
) -> list[int]:
    """The inverse of `attending_layers`: key heads of each layer, 0 for a layer without attention.

    Args:
        config: the checkpoint's config.
        attends: which layers attend; None if `indices` says so, or if all do.
        indices: indices of the layers that attend.
    """
    layers = config["num_hidden_layers"]
    if attends is None:
        attends = [indices is None or layer in indices for layer in range(layers)]
    return [config.get("num_key_value_heads") or config["num_attention_heads"] if each else 0 for each in attends]


def _other_width(keys: GgufKeys, key: str, head_dim: int) -> ModelFileError:
    return keys.fail(key, f"{keys.size(key)} differs from the head's width {head_dim}; that is not supported")


def _share(rotated: int, head_dim: int) -> float:
    """The `partial_rotary_factor` from which transformers gets `rotated`: it rounds `head_dim * factor` down."""
    share = rotated / head_dim
    return share if int(head_dim * share) == rotated else math.nextafter(share, 1.0)


def heads_and_width(keys: GgufKeys) -> tuple[int, int]:
    """The number of query heads, and the hidden size, which may not be less."""
    heads, width = keys.size("attention.head_count"), keys.size("embedding_length")
    if heads > width:
        raise keys.fail("attention.head_count", f"{heads} heads are more than the {width} numbers they share")
    return heads, width


def refuse_window(keys: GgufKeys) -> None:
    """Refuse a window shorter than the context, for families whose files do not say which layers use it."""
    window, context = keys.window(), keys.size("context_length")
    if window is not None and window < context:
        raise keys.fail(
            "attention.sliding_window",
            f"a window of {window} below the context of {context} is not supported: nothing says which layers have it",
        )


def rope_scaling(keys: GgufKeys, rotated: int, *, beside: Sequence[str] = ()) -> dict[str, Any]:
    """The `rope_scaling` entry; empty for none.

    `linear`, `yarn` and `longrope` are returned in Hugging Face's form, per-frequency factors (`rope_freqs.weight`,
    which divide the inverse frequencies) as `{"rope_type": "factors", "factors": [...]}`, and anything else under its
    own name, for the model to refuse.

    Args:
        keys: the file's keys.
        rotated: number of elements of a head that are rotated.
        beside: entries that the family reads itself.
    """
    if keys.has_tensor(_LONG_FACTORS) or keys.has_tensor(_SHORT_FACTORS):
        return _longrope(keys)
    entries, factors = keys.rope_scaling(), keys.vector("rope_freqs.weight")
    entries = {key: value for key, value in entries.items() if key not in beside}
    # like llama.cpp: a factor alone means linear scaling
    kind = entries.pop("type", "linear" if "factor" in entries else "none")
    if factors:
        if kind != "none":
            raise keys.fail("rope.scaling.type", f"{reprlib.repr(kind)} with rope_freqs.weight is not supported")
        if len(factors) != rotated // 2 or not all(math.isfinite(factor) and factor > 0 for factor in factors):
            raise ModelFileError(keys.file, "rope_freqs.weight", f"must hold {rotated // 2} positive factors")
    if kind == "yarn":
        return _yarn(keys, entries)
    if kind not in ("none", "linear"):
        return {"rope_type": str(kind)} | entries
    for key in sorted(set(entries) - {"factor", "finetuned", "original_context_length"}):
        raise keys.fail(f"rope.scaling.{key}", f"is not supported together with scaling type {kind}")
    if factors:
        return {"rope_type": "factors", "factors": list(factors)}
    return {"rope_type": "linear", "factor": keys.real("rope.scaling.factor")} if kind == "linear" else {}


def _yarn(keys: GgufKeys, entries: dict[str, Any]) -> dict[str, Any]:
    """YaRN's settings; llama.cpp always rounds the ramp's limits to whole pairs, as transformers does by default."""
    names = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    known = {"factor", "original_context_length", "finetuned", *names}
    for key in sorted(set(entries) - known):
        raise keys.fail(f"rope.scaling.{key}", "is not supported together with scaling type yarn")
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": keys.real("rope.scaling.factor")}
    if "original_context_length" in entries:
        scaling["original_max_position_embeddings"] = keys.size("rope.scaling.original_context_length")
    for stored, name in names.items():
        if stored in entries:
            scaling[name] = keys.real(f"rope.scaling.{stored}")
    return scaling


def _longrope(keys: GgufKeys) -> dict[str, Any]:
    """Phi-3's LongRoPE: two tensors of factors, and the attention factor if the conversion wrote it."""
    entries = keys.rope_scaling()
    if entries.get("type", "longrope") not in ("longrope", "none"):
        kind = reprlib.repr(entries["type"])
        raise keys.fail("rope.scaling.type", f"{kind} with {_LONG_FACTORS} is not supported")
    for key in sorted(set(entries) - {"type", "finetuned", "original_context_length", "attn_factor"}):
        raise keys.fail(f"rope.scaling.{key}", "is not supported together with scaling type longrope")
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": list(keys.vector(_SHORT_FACTORS)),
        "long_factor": list(keys.vector(_LONG_FACTORS)),
        "original_max_position_embeddings": keys.size("rope.scaling.original_context_length"),
    }
    if "attn_factor" in entries:
        scaling["attention_factor"] = keys.real("rope.scaling.attn_factor")
    return scaling
