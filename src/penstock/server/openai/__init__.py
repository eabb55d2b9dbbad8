"""OpenAI's endpoints (chat, completions, responses, embeddings, models), scoring, and `/generate`."""

from __future__ import annotations

from penstock.server.delivery.serving import Serving
from penstock.server.http.route import Route
from penstock.server.openai import chat, completions, embeddings, generate, models, responses, scoring
from penstock.server.openai.schemas import SCHEMAS

__all__ = ["SCHEMAS", "routes"]


def routes(serving: Serving) -> tuple[Route, ...]:
    """All routes of this package."""
    modules = (chat, completions, generate, models, embeddings, scoring, responses)
    return tuple(route for module in modules for route in module.routes(serving))
