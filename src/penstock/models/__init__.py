"""One file per model family, found by its `model_type`."""

from __future__ import annotations

from penstock.models.families import gguf_dialect, load

__all__ = ["gguf_dialect", "load"]
