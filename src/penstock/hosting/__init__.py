"""Several models in one server: each is loaded when first asked for, and unloaded when others need its room."""

from __future__ import annotations

from penstock.hosting.host import ModelHost
from penstock.hosting.place import Loaded

__all__ = ["Loaded", "ModelHost"]
