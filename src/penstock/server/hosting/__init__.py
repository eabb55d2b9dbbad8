"""Several models behind one port."""

from __future__ import annotations

from penstock.server.hosting.application import create_hosting_app

__all__ = ["create_hosting_app"]
