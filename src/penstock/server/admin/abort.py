"""`POST /abort_requests`: end answers by their ids.

An id is the `id` of an answer (`chatcmpl-...`). A caller may end only answers of its own key, an admin any answer.
Unknown and finished ids are not errors, because a request may have ended just now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastapi import Request, Response

from penstock.api_fields.fields import Field, Kind, read_fields
from penstock.api_fields.strict_json import JsonObject
from penstock.contract.errors import InvalidParameter
from penstock.contract.limits import RequestLimits
from penstock.server.delivery.live_requests import LiveRequests
from penstock.server.delivery.serving import read_body_of
from penstock.server.http.access import Access
from penstock.server.http.caller import caller_of
from penstock.server.http.failures import json_response
from penstock.server.http.openapi import answers, request_body
from penstock.server.http.route import Route

__all__ = ["ABORT_FIELDS", "parse_abort", "routes"]

IDS = Kind(
    "a list of strings",
    {"type": "array", "items": {"type": "string"}, "minItems": 1},
    lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
)
ABORT_FIELDS = (Field("request_ids", IDS, "The ids of the answers to end, as the answers carry them."),)


def parse_abort(body: JsonObject, limits: RequestLimits) -> list[str]:
    """The ids in `body`.

    Raises:
        RequestError: `body` is invalid; names the field.
    """
    ids: list[str] = read_fields(body, ABORT_FIELDS, {}).get("request_ids", [])
    if not 1 <= len(ids) <= limits.max_aborted_ids:
        raise InvalidParameter("request_ids", f"request_ids must hold 1..{limits.max_aborted_ids} ids, not {len(ids)}.")
    return ids


def routes(limits: RequestLimits, access: Access, lives: Callable[[], Sequence[LiveRequests]]) -> tuple[Route, ...]:
    """`POST /abort_requests`; `lives` gives the requests of every engine."""
    extra = request_body(ABORT_FIELDS, {}, "request_ids")

    async def abort_requests(http_request: Request) -> Response:
        """End answers that are being generated; lists the ids of those that were."""
        ids = await read_body_of(http_request, lambda body: parse_abort(body, limits), limits, access)
        caller = caller_of(http_request.scope)
        tenant, aborted = "" if caller.admin else caller.name, []
        for each in ids:
            found = [await live.abort_response(each, tenant) for live in lives()]
            aborted += [each] * any(found)
        return json_response(200, {"aborted": aborted})

    return (Route("POST", "/abort_requests", abort_requests, answers("Aborted"), extra),)
