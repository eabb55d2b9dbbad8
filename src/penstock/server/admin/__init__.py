"""What operators use: probes, metrics, version, aborting, the prefix cache, profiles, the request log, spans."""

from __future__ import annotations

from penstock.server.admin import abort, about, metrics, prefix_cache, probes, profile, reference, stats
from penstock.server.admin.metrics import RequestCounter
from penstock.server.admin.readiness import Readiness
from penstock.server.admin.schemas import SCHEMAS
from penstock.server.delivery.serving import Serving
from penstock.server.http.route import Route

__all__ = ["SCHEMAS", "probe_routes", "routes"]


def probe_routes(serving: Serving, counter: RequestCounter, readiness: Readiness) -> tuple[Route, ...]:
    """The endpoints for orchestrators; /metrics shows the HTTP requests counted by `counter`."""
    return (*probes.routes(serving.client, readiness), *metrics.routes(serving, counter))


def routes(serving: Serving) -> tuple[Route, ...]:
    """Every other endpoint of this package."""
    return (
        *abort.routes(serving),
        *prefix_cache.routes(serving),
        *profile.routes(serving),
        *about.ROUTES,
        *reference.ROUTES,
        *stats.routes(serving),
    )
