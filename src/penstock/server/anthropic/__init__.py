"""Anthropic's endpoints: messages and token counts, and Anthropic's form of errors."""

from __future__ import annotations

from penstock.server.anthropic.messages import routes
from penstock.server.anthropic.schemas import SCHEMAS

__all__ = ["SCHEMAS", "routes"]
