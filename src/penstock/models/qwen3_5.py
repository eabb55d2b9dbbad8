"""Qwen 3.5 and 3.6: `model_type` "qwen3_5", checkpoints that hold a vision model beside `qwen3_5_text`.

Text alone is computed: the vision model is left out by name.
"""

from __future__ import annotations

from penstock.models import qwen3_5_text
from penstock.models.config_reader import ConfigReader
from penstock.models.text_part import text_config, text_weights
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader

__all__ = ["load"]


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the text model; see `families.load`."""
    text = text_config(reader, "qwen3_5_text")
    return qwen3_5_text.load(text, text_weights(weights, ("visual.",)))
