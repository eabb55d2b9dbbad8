"""Random LoRA adapters in PEFT's layout, and what transformers computes with one merged into its weights."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from penstock.adapter_loading import adapter_slots
from penstock.contract.config import EngineConfig
from penstock.loading import LoadedModel, find_model, load_model
from penstock.nn.adapters import Adapter, sites_of
from penstock.nn.program import Program

__all__ = [
    "adapter_of",
    "linear_modules",
    "load_with_adapters",
    "merged_logits",
    "write_adapter",
]

Sizes = Mapping[str, tuple[int, int]]
"""Outputs and inputs of modules, by name."""


def linear_modules(program: Program) -> dict[str, tuple[int, int]]:
    """The modules that take updates."""
    return {
        module.name: (module.outputs, linear.weight.inputs) for linear in sites_of(program) for module in linear.modules
    }


def write_adapter(
    directory: Path,
    modules: Sizes,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    ranks: Mapping[str, int] | None = None,
    strength: float = 0.3,
    **settings: Any,
) -> Path:
    """Write an adapter of these modules; `ranks`, by the ends of their names, if they have others."""
    directory.mkdir(parents=True, exist_ok=True)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, (outputs, inputs) in sorted(modules.items()):
        own = next((each for end, each in (ranks or {}).items() if name.endswith(end)), rank)
        down = torch.randn(own, inputs, generator=generator) * inputs**-0.5
        up = torch.randn(outputs, own, generator=generator) * strength * own**-0.5
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in modules}),
        "use_rslora": False,
        "rank_pattern": dict(ranks or {}),
        "inference_mode": True,
        "base_model_name_or_path": "somewhere",
        "lora_dropout": 0.05,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config | settings))
    return directory


def load_with_adapters(directory: Path, dtype: str = "float32", **options: Any) -> LoadedModel:
    """A model that takes adapters."""
    config = EngineConfig(model=str(directory), dtype=dtype, lora=("a=/nowhere",), **options)
    return load_model(config, find_model(config), lambda line: None)


def adapter_of(loaded: LoadedModel, directory: Path) -> Adapter:
    """An adapter, loaded for a model."""
    slots = adapter_slots(loaded.config, loaded)
    slots.load("x", str(directory))
    return slots._loaded["x"]


def _scale(config: Mapping[str, Any], name: str, rank: int) -> float:
    alphas = config.get("alpha_pattern") or {}
    alpha = next((each for end, each in alphas.items() if name.endswith(end)), config["lora_alpha"])
    return alpha / math.sqrt(rank) if config["use_rslora"] else alpha / rank


def merged_logits(model: Any, adapter: Path | None, token_ids: Sequence[int], starts: Iterable[str] = ("",)) -> Any:
    """What transformers' float32 `model` makes of a sequence with an adapter in its weights: `[T, V]`.

    `starts`: what the model's own names of modules begin with, before those in the adapter.
    """
    changed: dict[str, torch.Tensor] = {}
    if adapter is not None:
        config = json.loads((adapter / "adapter_config.json").read_text())
        tensors = load_file(adapter / "adapter_model.safetensors")
        modules = dict(model.named_modules())
        for name, down in tensors.items():
            if not name.endswith("lora_A.weight"):
                continue
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            module = next(modules[start + path] for start in starts if start + path in modules)
            up = tensors[name.replace("lora_A", "lora_B")]
            update = (up.double() @ down.double()) * _scale(config, path, len(down))
            transposed = type(module).__name__ == "Conv1D"
            changed[path] = module.weight.data
            module.weight.data = (module.weight.data.double() + (update.T if transposed else update)).float()
    try:
        with torch.no_grad():
            return model(torch.tensor([token_ids])).logits[0].float()
    finally:
        modules = dict(model.named_modules())
        for path, weight in changed.items():
            next(modules[start + path] for start in starts if start + path in modules).weight.data = weight
