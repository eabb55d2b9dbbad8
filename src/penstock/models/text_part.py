"""The text model in a multimodal checkpoint: its config, its tensors, and what is left out.

Decides where such checkpoints keep the text model's config and tensors. Families say which parts they leave out.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.models.config_reader import ConfigReader
from penstock.nn.weight_loader import PartLoader, WeightLoader

__all__ = ["text_config", "text_weights"]


def text_config(reader: ConfigReader, model_type: str, *, flat: bool = False) -> ConfigReader:
    """The section `text_config`; if it sets a `model_type`, that must be the given one.

    `tie_word_embeddings` outside the section applies if that is set. With `flat`, a config without the section is
    itself the text model's: older files of some families, and the configs of GGUF files, have this form.
    """
    if flat and not reader.is_set("text_config"):
        return reader
    section = reader.section("text_config")
    section.expect("model_type", [model_type], model_type)
    if not reader.is_set("tie_word_embeddings"):
        return section
    return section.with_defaults({"tie_word_embeddings": reader.boolean("tie_word_embeddings")})


def text_weights(weights: WeightLoader, left_out: Sequence[str]) -> PartLoader:
    """The text model's tensors under their text-only names; tensors that begin with any of `left_out` are left out.

    The prefix in checkpoints is `language_model.model.`, or `model.language_model.` in newer ones; or the text model's
    tensors have their text-only names, with the other parts beside them.
    """

    def begins_with(prefix: str) -> bool:
        """Whether a tensor that all text models have is there; tries two, so that a missing one is reported by name."""
        return any(weights.has(f"{prefix}.{name}.weight") for name in ("embed_tokens", "norm"))

    newer = begins_with("model.language_model")
    for part in left_out:
        weights.leave_out(f"model.{part}" if newer else part)
    if newer:
        return PartLoader(weights, {"model.": "model.language_model."})
    if begins_with("model"):
        return PartLoader(weights, {})
    return PartLoader(weights, {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."})
