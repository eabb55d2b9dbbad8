"""Endpoints that show how text becomes tokens: tokenize, detokenize, apply-template. They generate nothing."""

from __future__ import annotations

from penstock.server.delivery.serving import Serving
from penstock.server.http.route import Route
from penstock.server.tokens import apply_template, detokenize, tokenize
from penstock.server.tokens.schemas import SCHEMAS

__all__ = ["SCHEMAS", "routes"]


def routes(serving: Serving) -> tuple[Route, ...]:
    """Every endpoint of this package."""
    modules = (tokenize, detokenize, apply_template)
    return tuple(route for module in modules for route in module.routes(serving))
