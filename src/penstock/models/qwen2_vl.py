"""Qwen2-VL: `model_type` "qwen2_vl", checkpoints with a vision model and a Qwen2 (Wang et al. 2024).

Only text is computed: the vision model is left out by name. What remains is `qwen2`: rotary pairs are assigned to the
axes of an image in sections, and for text all axes have the same position. Published configs are flat, and the text
model's tensors have their text-only names. GGUF files of the architecture "qwen2vl" hold the text model of a Qwen2-VL
or a Qwen2.5-VL.
"""

from __future__ import annotations

from typing import Any

from penstock.models import qwen2
from penstock.models.config_reader import ConfigReader
from penstock.models.decoder import read_shape
from penstock.models.qwen3_vl import VISION, accept_image_keys, axes_of_images
from penstock.models.rope_config import without_image_axes
from penstock.models.text_part import text_config, text_weights
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader
from penstock.weights.gguf_conversion import GgufWriting
from penstock.weights.gguf_decoder import DECODER_TENSORS
from penstock.weights.gguf_dialect import GgufDialect
from penstock.weights.gguf_keys import GgufKeys

__all__ = ["GGUF", "load", "load_text"]

_DEFAULTS = {"rope_theta": 1000000.0, "rms_norm_eps": 1e-5, "max_window_layers": 80}


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the text model; see `families.load`."""
    return load_text(reader, weights, "qwen2_vl_text")


def load_text(reader: ConfigReader, weights: WeightLoader, model_type: str) -> Program:
    """Build the text model; its config section must have this `model_type` if it sets one."""
    text = without_image_axes(text_config(reader, model_type, flat=True)).with_defaults(_DEFAULTS)
    shape = read_shape(text)
    if shape.head_dim * shape.num_heads != shape.hidden_size:  # transformers does not read `head_dim` here
        raise text.error("head_dim", f"{shape.head_dim} times {shape.num_heads} heads is not {shape.hidden_size}")
    return qwen2.load(text, text_weights(weights, VISION))


def _gguf_settings(keys: GgufKeys) -> dict[str, Any]:
    accept_image_keys(keys)
    return qwen2.gguf_settings(keys)


GGUF = GgufDialect(
    architecture="qwen2vl",
    model_type="qwen2_vl",
    tensors=DECODER_TENSORS,
    metadata=_gguf_settings,
    writing=GgufWriting(lambda config, _: axes_of_images(config, (16, 24, 24))),
)
