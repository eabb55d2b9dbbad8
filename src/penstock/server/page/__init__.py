"""The web page at `/`: its files, and the endpoints that only it uses."""

from __future__ import annotations

from penstock.server.delivery.serving import Serving
from penstock.server.http.route import Route
from penstock.server.page import engine_events, engine_views, files, sampling_controls
from penstock.server.page.schemas import SCHEMAS

__all__ = ["SCHEMAS", "routes"]


def routes(serving: Serving) -> tuple[Route, ...]:
    """Every endpoint of this package."""
    return (
        *sampling_controls.routes(serving),
        *engine_events.routes(serving),
        *engine_views.routes(serving),
        *files.routes(),
    )
