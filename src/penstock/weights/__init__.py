"""Turns model files into named tensors: locates, reads, dequantises and binds them.

This package exports only the part that finds and fetches models and needs no torch. `files` (`open_model`) and `bind`
(`Binder`) read tensors; importing either module imports torch.
"""

from __future__ import annotations

from penstock.weights.catalogue import CATALOGUE, CatalogueModel
from penstock.weights.locate import InstalledModel, default_cache_dir, installed_models, locate
from penstock.weights.pull import pull

__all__ = [
    "CATALOGUE",
    "CatalogueModel",
    "InstalledModel",
    "default_cache_dir",
    "installed_models",
    "locate",
    "pull",
]
