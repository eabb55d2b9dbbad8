"""Gemma 3 from 4B on: `model_type` "gemma3", checkpoints with a vision model and a `gemma3_text`.

Only text is computed: the vision tower and its projector are left out by name. In GGUF files the architecture "gemma3"
is the text model of every size.
"""

from __future__ import annotations

from typing import Any

from penstock.models import gemma3_text
from penstock.models.config_reader import ConfigReader
from penstock.models.gemma2 import GGUF as GEMMA2_GGUF
from penstock.models.text_part import text_config, text_weights
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader
from penstock.weights.gguf_decoder import decoder_settings
from penstock.weights.gguf_dialect import Arrangement, GgufDialect
from penstock.weights.gguf_keys import GgufKeys

__all__ = ["GGUF", "load"]

_VISION = ("vision_tower.", "multi_modal_projector.")
_LAYERS_OF_27B = 62


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the text model; see `families.load`."""
    text = text_config(reader, "gemma3_text")
    if text.is_set("final_logit_softcapping"):  # transformers caps only the text-only model, not the multimodal one
        raise text.error("final_logit_softcapping", "is not implemented beside a vision part")
    return gemma3_text.load(text, text_weights(weights, _VISION))


def _gguf_settings(keys: GgufKeys) -> dict[str, Any]:
    """Files omit the scale of scores, and older ones the RoPE base of local layers; see llama.cpp's `gemma3.cpp`."""
    settings = decoder_settings(keys)
    per_head = settings["hidden_size"] // settings["num_attention_heads"]
    is_largest = settings["num_hidden_layers"] == _LAYERS_OF_27B
    softcap = keys.real("final_logit_softcapping") if keys.has("final_logit_softcapping") else None
    return (
        settings
        | {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": per_head if is_largest else settings["head_dim"],
            "final_logit_softcapping": softcap,
            "rope_local_base_freq": keys.real("rope.freq_base_swa", 10000.0),
        }
        | _windows(keys, settings["num_hidden_layers"])
    )


def _windows(keys: GgufKeys, layers: int) -> dict[str, Any]:
    """By default every sixth layer attends to all positions; without a window, every layer does."""
    window = keys.window()
    if window is None:
        return {"layer_types": ["full_attention"] * layers, "sliding_window": None}
    pattern = "attention.sliding_window_pattern"
    return {"sliding_window": window, "sliding_window_pattern": keys.size(pattern, 6)}


_NORMS = {
    **{name: ours for name, ours in GEMMA2_GGUF.tensors.items() if "norm" in name},
    "blk.{layer}.attn_q_norm": "model.layers.{layer}.self_attn.q_norm",
    "blk.{layer}.attn_k_norm": "model.layers.{layer}.self_attn.k_norm",
}

GGUF = GgufDialect(
    architecture="gemma3",
    model_type="gemma3_text",
    tensors={**GEMMA2_GGUF.tensors, **_NORMS},
    metadata=_gguf_settings,
    arrangements={f"{name}.weight": Arrangement.MINUS_ONE for name in _NORMS},
)
