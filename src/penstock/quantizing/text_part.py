"""The text model of a checkpoint that sees or hears too, as a GGUF file has it: alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.weights.files import ModelFiles

__all__ = ["text_part"]


def text_part(files: ModelFiles) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """The config of the text model, and what its names begin with in the checkpoint, by what they begin with alone.

    For a checkpoint of text alone its own config, and nothing. See `models.text_part`.
    """
    config, section = files.config, files.config.get("text_config")
    if not isinstance(section, Mapping):
        return config, {}
    tied = {"tie_word_embeddings": config["tie_word_embeddings"]} if "tie_word_embeddings" in config else {}
    text = {**tied, **section, "model_type": section.get("model_type", f"{config.get('model_type')}_text")}
    if "model.language_model.embed_tokens.weight" in files.source.names():
        return text, {"model.": "model.language_model."}
    if "model.embed_tokens.weight" in files.source.names():
        return text, {}
    return text, {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
