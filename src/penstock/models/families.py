"""Finds the family file for a checkpoint's `model_type`, and lets it build the model.

That file is the module of this package whose name is the `model_type`, with `_` for `-`. Does not know any family; to
add one, add a file with a function `load(reader: ConfigReader, weights: WeightLoader) -> Program` and, for a family
with its own GGUF architecture, the dialect as a constant `GGUF`.
"""

from __future__ import annotations

import importlib
import pkgutil
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from penstock.contract.errors import ModelFileError
from penstock.models.config_reader import ConfigReader
from penstock.nn.looking_ahead import looking_both_ways, why_causal_only
from penstock.nn.program import Program
from penstock.nn.weight_loader import PartLoader, WeightLoader
from penstock.weights.gguf_dialect import GgufDialect
from penstock.weights.quantisation_config import read_quantisation

__all__ = ["FinishingLoader", "families", "gguf_dialect", "load"]

_SHARED = frozenset(
    {
        *(
            "config_reader",
            "decoder",
            "eagle3",
            "families",
            "gemma4_config",
            "latent_attention",
            "predictor",
            "recurrent_mixer",
            "rope_config",
        ),
        "text_part",
    }
)
"""Modules of this package that are not families."""


class FinishingLoader(WeightLoader, Protocol):
    """A loader that can tell whether every tensor of the checkpoint was taken or ignored by name."""

    def finish(self) -> None:
        """Raise if any tensor was neither taken nor ignored."""
        ...


def families() -> list[str]:
    """Every `model_type` that has a file, with `_` for `-`, sorted."""
    found = {module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])}
    return sorted(found - _SHARED)


def load(config: Mapping[str, Any], binder: FinishingLoader, file: str, max_model_len: int | None = None) -> Program:
    """Build the model that `config` describes from the binder's tensors.

    The config is checked as a whole before the first tensor is taken. Checkpoints saved without their head, such as
    embedding models, have tensors without the prefix `model.`; their head is the embedding, so the text that such a
    model generates is meaningless.

    Args:
        config: the checkpoint's configuration, under the keys of Hugging Face's `config.json`.
        binder: hands out the checkpoint's tensors; every one must be taken or ignored by name.
        file: where the config came from, for error messages.
        max_model_len: the longest sequence that will be served; None for the model's own limit. A model with different
            RoPE factors for short and long contexts (LongRoPE) is built for this length, whatever the length of a
            sequence.

    Raises:
        ModelFileError: the `model_type` is unknown, a value is not implemented or out of bounds, or a tensor is
            missing, has a different shape, or was not taken.
    """
    bare = binder.has("embed_tokens.weight")
    if bare and not binder.has("lm_head.weight"):
        config = {**config, "tie_word_embeddings": True}
    reader = ConfigReader(config, file, max_model_len=max_model_len)
    name = reader.text("model_type")
    family = name.replace("-", "_")
    if family not in families():
        raise reader.error("model_type", f"{name!r} is not implemented; there are {', '.join(families())}")
    read_quantisation(config, file)
    causal = reader.boolean("is_causal", default=True)
    weights = PartLoader(binder, {"model.": ""}) if bare else binder
    program: Program = importlib.import_module(f"penstock.models.{family}").load(reader, weights)
    binder.finish()
    if causal or program.looks_ahead:
        return program
    reason = why_causal_only(program)
    if reason is not None:
        raise reader.error("is_causal", f"false is not implemented for this model: {reason}")
    return looking_both_ways(program)


def gguf_dialect(architecture: str, file: str) -> GgufDialect:
    """The dialect of the family whose GGUF files have this `architecture`.

    The family's file usually has the same name except for separators, and is tried first: `qwen3moe` is in
    `qwen3_moe.py`, `gpt-oss` in `gpt_oss.py`. Otherwise all files are searched: `granitehybrid` is in
    `granitemoehybrid.py`.

    Args:
        architecture: the file's `general.architecture`.
        file: its path, for error messages.

    Raises:
        ModelFileError: no family has this architecture.
    """
    names = {name.replace("_", ""): name for name in families()}
    name = names.get(architecture.replace("-", ""))
    dialect = None if name is None else _dialect_of(name)
    if dialect is not None and dialect.architecture == architecture:
        return dialect
    dialects = {each.architecture: each for each in map(_dialect_of, families()) if each is not None}
    if architecture not in dialects:
        known = ", ".join(sorted(dialects))
        raise ModelFileError(file, "general.architecture", f"{reprlib.repr(architecture)} cannot be read; {known} can")
    return dialects[architecture]


def _dialect_of(family: str) -> GgufDialect | None:
    """A family's dialect; None if its files use another family's architecture (Mistral's use `llama`)."""
    dialect: GgufDialect | None = getattr(importlib.import_module(f"penstock.models.{family}"), "GGUF", None)
    return dialect
