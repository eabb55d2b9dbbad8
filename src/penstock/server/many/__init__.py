"""Several models behind one port."""

from __future__ import annotations

from penstock.server.many.application import create_many_app

__all__ = ["create_many_app"]
