"""Qwen3-VL: `model_type` "qwen3_vl", checkpoints that hold a vision model beside a Qwen3 (Qwen Team 2025).

Text alone is computed: the vision model is left out by name, with what it adds to the first layers at the places of an
image ("deepstack"). What is left is `qwen3`: its pairs of a head take turns to follow the axes of an image, which are
one and the same position where there is none. GGUF files of the architecture "qwen3vl" hold the text model alone.
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
"""The parts that are left out."""


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the text model; see `families.load`."""
    text = read_text(reader, "qwen3_vl_text")
    return qwen3.load(text, text_weights(weights, VISION))


def read_text(reader: ConfigReader, model_type: str) -> ConfigReader:
    """The text model's config, in the terms of a Qwen3's, with the defaults that a Qwen3-VL has of its own."""
    text = without_image_axes(text_config(reader, model_type, flat=True))
    text.expect("use_sliding_window", [False], False)  # transformers does not read it here
    return text.with_defaults({"rope_theta": 500000.0})


def accept_image_keys(keys: GgufKeys) -> None:
    """Accept what a file says of images: which pairs follow which axis, and how many layers are added to."""
    for key in ("rope.dimension_sections", "n_deepstack_layers"):
        if keys.has(key):
            keys.get(key)


def axes_of_images(config: Mapping[str, Any], default: Sequence[int]) -> dict[str, Any]:
    """The key of a file that llama.cpp wants: how many pairs follow each axis, of which text has no fourth.

    Args:
        config: the text model's.
        default: of the family.
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
