"""What operators use: probes, metrics, version, aborting, the prefix cache, profiles, the request log, spans."""

from __future__ import annotations

from penstock.server.admin import abort, about, metrics, prefix_cache, probes, profile, reference, stats
from penstock.server.admin.metrics import RequestCounter
from penstock.server.admin.schemas import SCHEMAS
from penstock.server.delivery.serving import Serving
from penstock.server.http.route import Route

__all__ = ["SCHEMAS", "routes"]


def routes(serving: Serving, counter: RequestCounter) -> tuple[Route, ...]:
    """Every endpoint of this room; `counter` has counted the HTTP requests that /metrics shows."""
    return (
        *probes.routes(serving),
        *abort.routes(serving),
        *prefix_cache.routes(serving),
        *profile.routes(serving),
        *about.ROUTES,
        *reference.ROUTES,
        *stats.routes(serving),
        *metrics.routes(serving, counter),
    )
