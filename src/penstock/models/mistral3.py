"""Mistral Small 3.1 and 3.2: `model_type` "mistral3", checkpoints with a vision model and a Mistral.

Only text is computed: the vision tower and its projector are left out by name. What remains is `mistral`; its GGUF
files have the architecture `llama`. Ministral 3 has a different text model, "ministral3", which scales queries by their
position: it is refused by that name.
"""

from __future__ import annotations

from penstock.models import mistral
from penstock.models.config_reader import ConfigReader
from penstock.models.text_part import text_config, text_weights
from penstock.nn.program import Program
from penstock.nn.weight_loader import WeightLoader

__all__ = ["load"]

_VISION = ("vision_tower.", "multi_modal_projector.")


def load(reader: ConfigReader, weights: WeightLoader) -> Program:
    """Build the text model; see `families.load`."""
    text = text_config(reader, "mistral")
    if not reader.is_set("tie_word_embeddings") and not text.is_set("tie_word_embeddings"):
        text = text.with_defaults({"tie_word_embeddings": True})  # a stored head that differs is used all the same
    return mistral.load(text, text_weights(weights, _VISION))
