"""Files to named tensors: locating, reading, dequantising and binding.

This package exports what finds and fetches models, which needs no torch. Tensors are read by `files` (`open_model`) and
`bind` (`Binder`): importing those imports torch.
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
