"""Several models in one server: each is loaded when it is first asked for, and makes room when others need it."""

from __future__ import annotations

from penstock.hosting.host import ModelHost
from penstock.hosting.place import Loaded

__all__ = ["Loaded", "ModelHost"]
