"""OpenAI's endpoints: chat, completions, responses, embeddings and models; `/generate` takes the same fields."""

from __future__ import annotations

from penstock.server.delivery.serving import Serving
from penstock.server.http.route import Route
from penstock.server.openai import chat, completions, embeddings, generate, models, responses, scoring
from penstock.server.openai.schemas import SCHEMAS

__all__ = ["SCHEMAS", "routes"]


def routes(serving: Serving) -> tuple[Route, ...]:
    """Every endpoint of this room."""
    modules = (chat, completions, generate, models, embeddings, scoring, responses)
    return tuple(route for module in modules for route in module.routes(serving))
