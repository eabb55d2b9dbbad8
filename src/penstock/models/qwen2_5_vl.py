"""Qwen2.5-VL: `model_type` "qwen2_5_vl" (Qwen Team 2025).

The text part only, which is the same as in `qwen2_vl`; so are its GGUF files.
"""

from __future__ import annotations

from penstock.models.config_reader import ConfigReader
from penstock.models.qwen2_vl import load_text
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader

__all__ = ["load"]


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the text model; see `families.load`."""
    return load_text(reader, weights, "qwen2_5_vl_text")
