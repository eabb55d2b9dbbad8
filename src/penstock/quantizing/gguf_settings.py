"""Translates a checkpoint's config to the keys of a GGUF file; RoPE scaling is half of the work.

Decides names and values. Building the model from the file shows whether any setting was lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.nn.operations import Rotate
from penstock.nn.program import Program
from penstock.nn.rope import Llama3Scaling, Rope, RotaryTable
from penstock.weights.gguf_from_huggingface import settings_of

__all__ = ["file_settings"]


def file_settings(
    config: Mapping[str, Any], program: Program, architecture: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The file's keys, and the tensors that are settings."""
    windows = [cache.window for cache in program.caches if cache.window is not None]
    tables = [operation.table for operation in program.operations() if isinstance(operation, Rotate)]
    rotated = tables[0].width if tables else 0
    keys = settings_of(config, program.shape, max(windows, default=None), rotated, architecture)
    if not rotated:
        return keys, {}
    sections = config.get("rope_parameters") or {}
    if "full_attention" in sections:
        local = sections.get("sliding_attention", {}).get("rope_theta") or config.get("rope_local_base_freq")
        sections = sections["full_attention"]
    else:
        local = config.get("rope_local_base_freq")
    section = {**sections, **(config.get("rope_scaling") or {})}
    theta = section.get("rope_theta") or config.get("rope_theta")
    if theta:
        keys[f"{architecture}.rope.freq_base"] = float(theta)
    if local and windows:
        keys[f"{architecture}.rope.freq_base_swa"] = float(local)
    scaling, factors = _scaling(section, config, float(theta or 10000.0), tables[0])
    return keys | {f"{architecture}.rope.scaling.{key}": value for key, value in scaling.items()}, factors


def _scaling(
    section: Mapping[str, Any], config: Mapping[str, Any], theta: float, table: RotaryTable
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Keys under `rope.scaling.`, and per-frequency factors as tensors."""
    original = section.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    original = int(original or config["max_position_embeddings"])
    match section.get("rope_type") or section.get("type") or "default":
        case "linear":
            return {"type": "linear", "factor": float(section["factor"])}, {}
        case "llama3":
            scaling = Llama3Scaling(
                section["factor"], section["low_freq_factor"], section["high_freq_factor"], original
            )
            plain, scaled = (rope.inverse_frequencies(table.width) for rope in (Rope(theta), Rope(theta, scaling)))
            return {}, {"rope_freqs.weight": plain / scaled}
        case "yarn":
            factor = float(section.get("factor") or config["max_position_embeddings"] / original)
            keys = {"type": "yarn", "factor": factor, "original_context_length": original}
            limits = {"beta_fast": 32.0, "beta_slow": 1.0}
            return keys | {f"yarn_{name}": float(section.get(name) or limits[name]) for name in limits}, {}
        case "longrope" | "su":
            amplitude = float(table.rows(torch.tensor([0]))[0][0, 0])  # at position 0 all angles are 0
            return {"original_context_length": original, "attn_factor": amplitude}, {
                f"rope_factors_{length}.weight": torch.tensor(section[f"{length}_factor"], dtype=torch.float32)
                for length in ("long", "short")
            }
    return {}, {}
