"""`POST /abort_requests`: end answers by the ids that they carry.

Decides that an id is the `id` of an answer (`chatcmpl-...`), that a caller may end only what was asked with its own key
(an admin: everything), and that unknown and finished ids are no error: they may have ended just now.
"""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from penstock.contract.errors import InvalidParameter
from penstock.contract.limits import RequestLimits
from penstock.server.caller import caller_of
from penstock.server.failures import json_response
from penstock.server.fields import Field, Kind, read_fields
from penstock.server.openapi import answers, request_body
from penstock.server.serving import Serving
from penstock.server.strict_json import JsonObject

__all__ = ["ABORT_FIELDS", "add_routes", "parse_abort"]

IDS = Kind(
    "a list of strings",
    {"type": "array", "items": {"type": "string"}, "minItems": 1},
    lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
)
ABORT_FIELDS = (Field("request_ids", IDS, "The ids of the answers to end, as the answers carry them."),)


def parse_abort(body: JsonObject, limits: RequestLimits) -> list[str]:
    """The ids that `body` holds.

    Raises:
        RequestError: it cannot be served; names the field.
    """
    ids: list[str] = read_fields(body, ABORT_FIELDS, {}).get("request_ids", [])
    if not 1 <= len(ids) <= limits.max_aborted_ids:
        raise InvalidParameter("request_ids", f"request_ids must hold 1..{limits.max_aborted_ids} ids, not {len(ids)}.")
    return ids


def add_routes(app: FastAPI, serving: Serving) -> None:
    """`POST /abort_requests`."""
    extra = request_body(ABORT_FIELDS, {}, "request_ids")

    @app.post("/abort_requests", openapi_extra=extra, responses=answers("Aborted"), response_class=Response)
    async def abort_requests(request: Request) -> Response:
        """End answers that are being generated; says which of the ids were."""
        ids = await serving.read(request, lambda body: parse_abort(body, serving.limits))
        caller = caller_of(request.scope)
        tenant = "" if caller.admin else caller.name
        return json_response(
            200, {"aborted": [each for each in ids if await serving.client.abort_answer(each, tenant)]}
        )
