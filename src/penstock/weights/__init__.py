"""Files to named tensors: locating, reading, dequantising and binding.

What finds and fetches models is offered here and needs no torch; what reads tensors is in `files` (`open_model`) and
`bind` (`Binder`), so that only those who read tensors wait for torch.
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
