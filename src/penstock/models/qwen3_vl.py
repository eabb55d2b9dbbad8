"""Qwen3-VL: `model_type` "qwen3_vl", checkpoints with a vision model and a Qwen3 (Qwen Team 2025).

Only text is computed: the vision model is left out by name, and with it the image features that it adds to the first
layers ("deepstack"). What remains is `qwen3`: rotary pairs are assigned to the axes of an image in turn, and for text
all axes have the same position. GGUF files of the architecture "qwen3vl" hold only the text model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.models import qwen3
from penstock.models.config_reader import ConfigReader
from penstock.models.qwen2 import gguf_settings
from penstock.models.rope_config import without_image_axes
from penstock.models.text_part import text_config, text_weights
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader
from penstock.weights.gguf_conversion import GgufWriting
from penstock.weights.gguf_dialect import GgufDialect
from penstock.weights.gguf_keys import GgufKeys

__all__ = ["GGUF", "VISION", "accept_image_keys", "axes_of_images", "load", "read_text"]

VISION = ("visual.",)
"""Name prefixes of the parts that are left out."""


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the text model; see `families.load`."""
    text = read_text(reader, "qwen3_vl_text")
    return qwen3.load(text, text_weights(weights, VISION))


def read_text(reader: ConfigReader, model_type: str) -> ConfigReader:
    """The text model's config, as a Qwen3's, with Qwen3-VL's own defaults."""
    text = without_image_axes(text_config(reader, model_type, flat=True))
    text.expect("use_sliding_window", [False], False)  # transformers does not read it here
    return text.with_defaults({"rope_theta": 500000.0})


def accept_image_keys(keys: GgufKeys) -> None:
    """Accept a file's keys for images: the pairs of each axis, and the number of deepstack layers."""
    for key in ("rope.dimension_sections", "n_deepstack_layers"):
        if keys.has(key):
            keys.get(key)


def axes_of_images(config: Mapping[str, Any], default: Sequence[int]) -> dict[str, Any]:
    """The key of a GGUF file that llama.cpp requires: the number of pairs for each axis, with 0 for the unused fourth.

    Args:
        config: the text model's config.
        default: the family's default for `mrope_section`.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope.dimension_sections": [*rope.get("mrope_section", default), 0]}


def _gguf_settings(keys: GgufKeys) -> dict[str, Any]:
    accept_image_keys(keys)
    return gguf_settings(keys)


GGUF = GgufDialect(
    architecture="qwen3vl",
    model_type="qwen3_vl",
    tensors=qwen3.GGUF.tensors,
    metadata=_gguf_settings,
    writing=GgufWriting(lambda config, _: axes_of_images(config, (24, 20, 20))),
)
