"""What operators and gateways use: probes, metrics, what is served, aborting, prefix cache, adapters, profiles, log."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.contract.limits import RequestLimits
from penstock.contract.ports import EngineClient
from penstock.server.admin import abort, about, adapters, latency, model_info, prefix_cache, profile, reference, stats
from penstock.server.admin.latency import RecentLatencies
from penstock.server.admin.schemas import SCHEMAS
from penstock.server.delivery.live_requests import LiveRequests
from penstock.server.delivery.serving import Clients, Serving
from penstock.server.http.access import Access
from penstock.server.http.route import Route

__all__ = ["SCHEMAS", "common_routes", "routes"]


def routes(serving: Serving, recent: RecentLatencies) -> tuple[Route, ...]:
    """The endpoints of a server of one model, except probes and metrics; `recent` is one of the server's observers."""

    def clients() -> tuple[EngineClient]:
        return (serving.client,)

    return (
        *profile.routes(serving),
        *adapters.routes(serving),
        *model_info.routes(serving),
        *reference.ROUTES,
        *common_routes(serving.limits, serving.access, clients, lambda: (serving.live,), recent),
    )


def common_routes(
    limits: RequestLimits,
    access: Access,
    clients: Clients,
    lives: Callable[[], Sequence[LiveRequests]],
    recent: RecentLatencies,
) -> tuple[Route, ...]:
    """The endpoints that concern all engines of a server at once, and their requests."""
    return (
        *abort.routes(limits, access, lives),
        *prefix_cache.routes(clients),
        *about.ROUTES,
        *stats.routes(clients),
        *latency.routes(recent, clients),
    )
