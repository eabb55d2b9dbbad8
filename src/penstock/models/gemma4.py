"""Gemma 4: `model_type` "gemma4", multimodal checkpoints with a `gemma4_text`.

Only text is computed: the vision and audio towers and their projectors are left out by name. In GGUF files the
architecture "gemma4" is the text model of every size.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.contract.errors import ModelFileError
from penstock.models import gemma4_text
from penstock.models.config_reader import ConfigReader
from penstock.models.gemma2 import GGUF as GEMMA2_GGUF
from penstock.models.text_part import text_config, text_weights
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader
from penstock.weights.gguf_conversion import GgufWriting
from penstock.weights.gguf_decoder import heads_and_width
from penstock.weights.gguf_dialect import GgufDialect
from penstock.weights.gguf_keys import GgufKeys
from penstock.weights.source import TensorSource

__all__ = ["GGUF", "load"]

_TOWERS = ("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio.")
_SLIDING, _FULL = "sliding_attention", "full_attention"
_FREQUENCIES, _STILL = "rope_freqs.weight", 1e30


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the text model; see `families.load`."""
    return gemma4_text.load(text_config(reader, "gemma4_text"), text_weights(weights, _TOWERS))


def _gguf_settings(keys: GgufKeys) -> dict[str, Any]:
    """For values that files omit see llama.cpp's `gemma4.cpp`; for the keys that are written, `Gemma4Model`."""
    layers, (heads, width) = keys.size("block_count"), heads_and_width(keys)
    types = _layer_types(keys, layers)
    head_dim, full_dim = (_head_dim(keys, which) for which in ("_swa", ""))
    kv_heads = keys.sizes("attention.head_count_kv", layers)
    of_layers = {
        str(index): {"head_dim": full_dim, "num_key_value_heads": kv_heads[index]}
        for index, kind in enumerate(types)
        if kind == _FULL
    }
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": next(
            (kv_heads[index] for index, kind in enumerate(types) if kind == _SLIDING), kv_heads[0]
        ),
        "head_dim": head_dim,
        "per_layer_config": of_layers,
        "attention_k_eq_v": not keys.has_tensor(f"blk.{types.index(_FULL)}.attn_v.weight") if _FULL in types else False,
        "layer_types": types,
        "sliding_window": keys.size("attention.sliding_window"),
        "max_position_embeddings": keys.size("context_length"),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
        "final_logit_softcapping": keys.real("final_logit_softcapping")
        if keys.has("final_logit_softcapping")
        else None,
        "rope_parameters": {
            _SLIDING: {"rope_type": "default", "rope_theta": keys.real("rope.freq_base_swa", 10000.0)},
            _FULL: _full_rope(keys, full_dim),
        },
        **_widths_of_mlps(keys, layers),
        **_own_inputs(keys),
        **_experts(keys),
    }


def _layer_types(keys: GgufKeys, layers: int) -> list[str]:
    key = "attention.sliding_window_pattern"
    slides = keys.get(key)
    if not isinstance(slides, tuple) or len(slides) != layers or any(type(each) is not bool for each in slides):
        raise keys.fail(key, f"must say of {layers} layers whether they slide, got {reprlib.repr(slides)}")
    return [_SLIDING if each else _FULL for each in slides]


def _head_dim(keys: GgufKeys, which: str) -> int:
    """The head width of sliding layers (`_swa`) or of the others; keys, values and the rotated part must be equal."""
    width = keys.size(f"attention.key_length{which}")
    for key in (f"attention.value_length{which}", f"rope.dimension_count{which}"):
        if keys.size(key, width) != width:
            raise keys.fail(key, f"{keys.size(key)} differs from the head's width {width}; that is not supported")
    return width


def _full_rope(keys: GgufKeys, head_dim: int) -> dict[str, Any]:
    """The rope of layers with full attention; pairs that do not rotate have a factor that makes their angles vanish."""
    factors = keys.vector(_FREQUENCIES) or (1.0,) * (head_dim // 2)
    turning = sum(factor == 1.0 for factor in factors)
    if len(factors) != head_dim // 2 or any(factor < _STILL / 2 for factor in factors[turning:]):
        wanted = f"must hold {head_dim // 2} factors, ones and then {_STILL:g}"
        raise ModelFileError(keys.file, _FREQUENCIES, wanted)
    share = 2 * turning / head_dim
    if int(share * head_dim // 2) != turning:
        share = math.nextafter(share, 1.0)
    theta = keys.real("rope.freq_base", 10000.0)
    return {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": share}


def _widths_of_mlps(keys: GgufKeys, layers: int) -> dict[str, Any]:
    """MLP widths: one for all layers, or double in the last layers, which read the keys of others."""
    widths, shared = keys.sizes("feed_forward_length", layers), 0
    if keys.has("attention.shared_kv_layers") and keys.get("attention.shared_kv_layers") != 0:
        shared = keys.size("attention.shared_kv_layers")
    double = shared > 0 and widths[-1] == 2 * widths[0]
    own = max(layers - shared, 0)
    if widths != (widths[0],) * own + (widths[-1] if double else widths[0],) * (layers - own):
        raise keys.fail("feed_forward_length", f"widths {reprlib.repr(widths)} are not supported")
    return {"intermediate_size": widths[0], "num_kv_shared_layers": shared, "use_double_wide_mlp": double}


def _own_inputs(keys: GgufKeys) -> dict[str, Any]:
    key = "embedding_length_per_layer_input"
    if not keys.has(key) or keys.get(key) == 0:
        return {"hidden_size_per_layer_input": 0}
    rows = keys.rows("per_layer_token_embd.weight")
    return {"hidden_size_per_layer_input": keys.size(key), "vocab_size_per_layer_input": rows}


def _experts(keys: GgufKeys) -> dict[str, Any]:
    if not keys.has("expert_count") or keys.get("expert_count") == 0:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": keys.size("expert_count"),
        "top_k_experts": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
    }


def _file_settings(config: Mapping[str, Any], source: TensorSource) -> dict[str, Any]:
    """The inverse of `_gguf_settings`; widths come from tensors, because configs spell them in several ways."""
    layers, window = config["num_hidden_layers"], config.get("sliding_window", 512)
    slides = [each == _SLIDING for each in config["layer_types"]]
    shared, head_dim = config.get("num_kv_shared_layers") or 0, config.get("head_dim", 256)
    full_dim = source.shape(f"model.layers.{slides.index(False)}.self_attn.q_norm.weight")[0]
    widths = [full_dim if not each else head_dim for each in slides]
    heads = [source.shape(f"model.layers.{n}.self_attn.k_proj.weight")[0] // widths[n] for n in range(layers - shared)]
    of_kind = dict(zip(slides, heads, strict=False))
    ropes = config["rope_parameters"]
    lengths = {f"{key}{which}": width for which, width in (("", full_dim), ("_swa", head_dim)) for key in _LENGTHS}
    mixture = bool(config.get("enable_moe_block"))
    return lengths | {
        "attention.head_count_kv": [of_kind[each] for each in slides],
        "attention.shared_kv_layers": shared,
        "attention.sliding_window": window,
        "attention.sliding_window_pattern": slides,
        "embedding_length_per_layer_input": config.get("hidden_size_per_layer_input") or 0,
        "expert_count": config["num_experts"] if mixture else None,
        "expert_feed_forward_length": config["moe_intermediate_size"] if mixture else None,
        "expert_used_count": config["top_k_experts"] if mixture else None,
        "feed_forward_length": [source.shape(f"model.layers.{n}.mlp.gate_proj.weight")[0] for n in range(layers)],
        "rope.freq_base": float(ropes[_FULL]["rope_theta"]),
        "rope.freq_base_swa": float(ropes[_SLIDING]["rope_theta"]) if any(slides) else None,
    }


def _frequencies(config: Mapping[str, Any], source: TensorSource) -> dict[str, Tensor]:
    """Frequency factors: ones, and for pairs that do not rotate a factor that makes their angles vanish."""
    full = config["layer_types"].index(_FULL)
    pairs = source.shape(f"model.layers.{full}.self_attn.q_norm.weight")[0] // 2
    turning = int(pairs * config["rope_parameters"][_FULL].get("partial_rotary_factor", 1.0))
    return {_FREQUENCIES: torch.tensor([1.0] * turning + [_STILL] * (pairs - turning))}


_LENGTHS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
_LAYER = "model.layers.{layer}"

GGUF = GgufDialect(
    architecture="gemma4",
    model_type="gemma4_text",
    tensors={
        **GEMMA2_GGUF.tensors,
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
        "blk.{layer}.attn_q_norm": f"{_LAYER}.self_attn.q_norm",
        "blk.{layer}.attn_k_norm": f"{_LAYER}.self_attn.k_norm",
        "blk.{layer}.inp_gate": f"{_LAYER}.per_layer_input_gate",
        "blk.{layer}.proj": f"{_LAYER}.per_layer_projection",
        "blk.{layer}.post_norm": f"{_LAYER}.post_per_layer_input_norm",
        "blk.{layer}.ffn_gate_inp": f"{_LAYER}.router.proj",
        "blk.{layer}.pre_ffw_norm_2": f"{_LAYER}.pre_feedforward_layernorm_2",
        "blk.{layer}.post_ffw_norm_1": f"{_LAYER}.post_feedforward_layernorm_1",
        "blk.{layer}.post_ffw_norm_2": f"{_LAYER}.post_feedforward_layernorm_2",
    },
    metadata=_gguf_settings,
    whole={
        "blk.{layer}.layer_output_scale.weight": f"{_LAYER}.layer_scalar",
        "blk.{layer}.ffn_gate_inp.scale": f"{_LAYER}.router.scale",
        "blk.{layer}.ffn_down_exps.scale": f"{_LAYER}.router.per_expert_scale",
        "blk.{layer}.ffn_gate_up_exps.weight": f"{_LAYER}.experts.gate_up_proj",
        "blk.{layer}.ffn_down_exps.weight": f"{_LAYER}.experts.down_proj",
    },
    writing=GgufWriting(_file_settings, vectors=_frequencies),
)
