"""The text model of a multimodal checkpoint, which is all that a GGUF file holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.weights.files import ModelFiles

__all__ = ["text_part"]


def text_part(files: ModelFiles) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """The text model's config, and its name prefixes in the checkpoint by the prefixes of a text-only checkpoint.

    For a text-only checkpoint: its own config, and no prefixes. See `models.text_part`.
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
