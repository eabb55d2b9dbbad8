"""`POST /apply-template`: a conversation as the model's chat template renders it."""

from __future__ import annotations

from fastapi import Request, Response

from penstock.api_fields.chat_options import PROMPT_FIELDS
from penstock.api_fields.conversation import MESSAGES
from penstock.api_fields.fields import TEXT, Field, Neutrals, read_fields
from penstock.api_fields.fitted_fields import fitted
from penstock.api_fields.request_options import served_name
from penstock.api_fields.strict_json import JsonObject
from penstock.contract.errors import InvalidParameter
from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.contract.request import Prompt
from penstock.server.delivery.serving import Serving
from penstock.server.http.caller import caller_of
from penstock.server.http.failures import json_response
from penstock.server.http.openapi import answers, request_body
from penstock.server.http.route import Route
from penstock.server.tokens.tokenize import read_chat_prompt

__all__ = ["NEUTRAL_TEMPLATE", "TEMPLATE_FIELDS", "routes", "parse_template"]

TEMPLATE_FIELDS = (
    Field("model", TEXT, "The served model's name; the served model when left out."),
    Field("messages", MESSAGES, "The conversation, as /v1/chat/completions reads it."),
    *PROMPT_FIELDS,
)
NEUTRAL_TEMPLATE: Neutrals = {"chat_template": ()}


def parse_template(body: JsonObject, card: ModelCard, limits: RequestLimits) -> Prompt:
    """The conversation in `body`.

    Raises:
        RequestError: `body` is invalid; names the field.
    """
    served_name(body, card, limits)
    given = read_fields(body, TEMPLATE_FIELDS, NEUTRAL_TEMPLATE)
    if "messages" not in given:
        raise InvalidParameter("messages", "messages is missing.", code="missing_value")
    return read_chat_prompt(given, card, limits)


def routes(serving: Serving) -> tuple[Route, ...]:
    """`POST /apply-template`."""
    limits = serving.limits
    extra = request_body(fitted(TEMPLATE_FIELDS, serving.card), NEUTRAL_TEMPLATE, "messages")

    async def apply_template(http_request: Request) -> Response:
        """The text that the model would be given for a conversation."""
        prompt = await serving.read(http_request, lambda body: parse_template(body, serving.card_now, limits))
        tokenized = await serving.client.tokenize(prompt, caller_of(http_request.scope).name)
        return json_response(200, {"prompt": tokenized.text})

    return (Route("POST", "/apply-template", apply_template, answers("Rendered"), extra),)
