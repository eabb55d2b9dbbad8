"""`POST /detokenize`: the text of token ids."""

from __future__ import annotations

from fastapi import Request, Response

from penstock.api_fields.fields import TEXT, TOKEN_IDS, Field, read_fields
from penstock.api_fields.fitted_fields import fitted
from penstock.api_fields.request_options import served_name
from penstock.api_fields.strict_json import JsonObject
from penstock.contract.errors import InvalidParameter
from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.server.delivery.serving import Serving
from penstock.server.http.failures import json_response
from penstock.server.http.openapi import answers, request_body
from penstock.server.http.route import Route

__all__ = ["DETOKENIZE_FIELDS", "routes", "parse_detokenize"]

DETOKENIZE_FIELDS = (
    Field("model", TEXT, "The served model's name; the served model when left out."),
    Field("tokens", TOKEN_IDS, "The token ids."),
)


def parse_detokenize(body: JsonObject, card: ModelCard, limits: RequestLimits) -> tuple[int, ...]:
    """The token ids in `body`.

    Raises:
        RequestError: `body` is invalid; names the field.
    """
    served_name(body, card, limits)
    given = read_fields(body, DETOKENIZE_FIELDS, {})
    if "tokens" not in given:
        raise InvalidParameter("tokens", "tokens is missing.", code="missing_value")
    tokens: list[int] = given["tokens"]
    if not 1 <= len(tokens) <= limits.max_detokenized_ids:
        raise InvalidParameter("tokens", f"tokens must hold 1..{limits.max_detokenized_ids} ids, not {len(tokens)}.")
    for index, token in enumerate(tokens):
        if not 0 <= token < card.vocab_size:
            where = f"tokens.{index}"
            raise InvalidParameter(where, f"{where} must lie in 0..{card.vocab_size - 1}.")
    return tuple(tokens)


def routes(serving: Serving) -> tuple[Route, ...]:
    """`POST /detokenize`."""
    card, limits = serving.card, serving.limits
    extra = request_body(fitted(DETOKENIZE_FIELDS, card), {}, "tokens")

    async def detokenize(http_request: Request) -> Response:
        """The text of token ids, control tokens included."""
        tokens = await serving.read(http_request, lambda body: parse_detokenize(body, serving.card_now, limits))
        return json_response(200, {"prompt": await serving.client.detokenize(tokens)})

    return (Route("POST", "/detokenize", detokenize, answers("Detokenized"), extra),)
