"""`GET /v1/requests/{id}/latency` and `/steps`: where a recent request's time went, and the steps it lived through.

For each of the last requests that the engine served, its ids, its times and the ids of the requests that it waited for
are remembered; no text, no tokens. A caller sees only its own requests, and not what they waited for: only an admin
does. Confined to one event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from fastapi import Request, Response

from penstock.api_fields.step_views import step_object
from penstock.api_fields.strict_json import JsonObject
from penstock.api_fields.timings import parts_object
from penstock.contract.measurements import NO_PARTS, LatencyParts
from penstock.server.delivery.observation import RequestRecord
from penstock.server.delivery.serving import Clients
from penstock.server.http.caller import caller_of
from penstock.server.http.failures import HttpRefusal, json_response
from penstock.server.http.openapi import answers
from penstock.server.http.route import Route

__all__ = ["MOST", "RecentLatencies", "routes"]

MOST = 1000
"""How many requests are remembered: each takes a few hundred bytes."""

UNKNOWN = 404


@dataclass(frozen=True, slots=True)
class _Told:
    """What is remembered of a request that is over."""

    tenant: str
    id: str
    request_id: str
    route: str
    status: int
    seconds: float
    parts: LatencyParts
    requests: frozenset[str]
    """The ids of its requests to the engine."""

    def body(self, *, admin: bool) -> JsonObject:
        """The JSON that describes it."""
        body: JsonObject = {
            "id": self.id,
            "request_id": self.request_id,
            "route": self.route,
            "status": self.status,
            "wall_ms": round(self.seconds * 1000, 3),
            "parts_ms": parts_object(self.parts),
        }
        return body | {"behind": list(self.parts.behind)} if admin else body


class RecentLatencies:
    """An observer that remembers where the time of the last requests went.

    Args:
        most: how many to remember; beyond that the oldest is forgotten.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._told: OrderedDict[str, _Told] = OrderedDict()  # by the answer's id
        self._answers: dict[str, str] = {}  # answer's id by request id, which a caller may reuse

    def __call__(self, record: RequestRecord) -> None:
        """Remember a request that is over, if the engine said where its time went."""
        if record.parsed is None or record.parts == NO_PARTS:
            return
        parsed = record.parsed
        tenant, seconds = parsed.requests[0].tenant, record.seconds
        ids = frozenset([each.id for each in parsed.requests])
        told = _Told(tenant, parsed.id, record.id, record.route, record.status, seconds, record.parts, ids)
        self._told[parsed.id] = told
        self._told.move_to_end(parsed.id)
        self._answers[record.id] = parsed.id
        if len(self._told) > self._most:
            _, oldest = self._told.popitem(last=False)
            if self._answers.get(oldest.request_id) == oldest.id:
                del self._answers[oldest.request_id]

    def find(self, named: str) -> _Told | None:
        """The request whose answer has this id, or else the last one with this request id; None if there is none."""
        return self._told.get(named) or self._told.get(self._answers.get(named, ""))


def routes(recent: RecentLatencies, clients: Clients) -> tuple[Route, ...]:
    """Both endpoints; `clients` are the engines that may have computed a request."""

    async def request_latency(http_request: Request, request_id: str) -> Response:
        """Where the time of a finished request went, by its answer's id or its request id."""
        told = _find(recent, http_request, request_id)
        return json_response(200, told.body(admin=caller_of(http_request.scope).admin))

    async def request_steps(http_request: Request, request_id: str) -> Response:
        """The steps that a finished request lived through, with its own part in each."""
        told = _find(recent, http_request, request_id)
        for client in clients():
            found = await client.recent_steps(requests=told.requests)
            if found.steps:
                steps = [step_object(step) for step in found.steps]
                return json_response(200, {"id": told.id, "cut": found.cut, "steps": steps})
        message = "No step of this request is remembered: later ones took their place, or its answer was cached."
        raise HttpRefusal(UNKNOWN, message, code="steps_not_found")

    path = "/v1/requests/{request_id}"
    return (
        Route("GET", f"{path}/latency", request_latency, answers("RequestLatency", 401, 403, 404)),
        Route("GET", f"{path}/steps", request_steps, answers("RequestSteps", 400, 401, 403, 404, 503)),
    )


def _find(recent: RecentLatencies, http_request: Request, request_id: str) -> _Told:
    """The remembered request, if this caller may see it.

    Raises:
        HttpRefusal: there is none.
    """
    caller, told = caller_of(http_request.scope), recent.find(request_id)
    if told is None or not (caller.admin or caller.name == told.tenant):
        message = "No such request is remembered: it is not over, it is long over, or it was another caller's."
        raise HttpRefusal(UNKNOWN, message, code="request_not_found")
    return told
