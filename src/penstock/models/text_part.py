"""The text model in a checkpoint that sees or hears too: its config, its tensors, and what is left out.

Decides how such checkpoints name the two. Families say which parts they leave out.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.models.config_reader import ConfigReader
from penstock.nn.weight_loader import PartLoader, WeightLoader

__all__ = ["text_config", "text_weights"]


def text_config(reader: ConfigReader, model_type: str, *, flat: bool = False) -> ConfigReader:
    """The section `text_config`, which must be of this type where it says so.

    `tie_word_embeddings` beside it holds where the section does not set one. With `flat`, a config without the section
    is itself the text model's: older files of some families are written so, and what GGUF files say is.
    """
    if flat and not reader.is_set("text_config"):
        return reader
    section = reader.section("text_config")
    section.expect("model_type", [model_type], model_type)
    if not reader.is_set("tie_word_embeddings"):
        return section
    return section.with_defaults({"tie_word_embeddings": reader.boolean("tie_word_embeddings")})


def text_weights(weights: WeightLoader, left_out: Sequence[str]) -> PartLoader:
    """The text model's tensors under the names that it has alone; all that begin with `left_out` are left out.

    Files begin with `language_model.model.` or, as newer ones do, with `model.language_model.`; or the text model has
    the names that it has alone, and the other parts lie beside it.
    """

    def begins_with(prefix: str) -> bool:
        """Whether a tensor that all text models have is there; one of two, so that the other's lack is told by name."""
        return any(weights.has(f"{prefix}.{name}.weight") for name in ("embed_tokens", "norm"))

    newer = begins_with("model.language_model")
    for part in left_out:
        weights.leave_out(f"model.{part}" if newer else part)
    if newer:
        return PartLoader(weights, {"model.": "model.language_model."})
    if begins_with("model"):
        return PartLoader(weights, {})
    return PartLoader(weights, {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."})
