"""Anthropic's endpoints: messages and token counts, and Anthropic's error format."""

from __future__ import annotations

from penstock.server.anthropic.messages import routes
from penstock.server.anthropic.schemas import SCHEMAS

__all__ = ["SCHEMAS", "routes"]
