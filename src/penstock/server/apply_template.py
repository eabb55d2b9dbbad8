"""`POST /apply-template`: a conversation as the model's chat template writes it. Generates nothing."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from penstock.contract.errors import InvalidParameter
from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.contract.request import Prompt
from penstock.server.chat_terms import PROMPT_FIELDS
from penstock.server.conversation import MESSAGES
from penstock.server.failures import json_response
from penstock.server.fields import TEXT, Field, Neutrals, read_fields
from penstock.server.fitted_fields import fitted
from penstock.server.openapi import answers, request_body
from penstock.server.parameters import check_model
from penstock.server.serving import Serving
from penstock.server.strict_json import JsonObject
from penstock.server.tokenize import read_chat_prompt

__all__ = ["NEUTRAL_TEMPLATE", "TEMPLATE_FIELDS", "add_routes", "parse_template"]

TEMPLATE_FIELDS = (
    Field("model", TEXT, "The served model's name; the served model when left out."),
    Field("messages", MESSAGES, "The conversation, as /v1/chat/completions reads it."),
    *PROMPT_FIELDS,
)
NEUTRAL_TEMPLATE: Neutrals = {"chat_template": ()}


def parse_template(body: JsonObject, card: ModelCard, limits: RequestLimits) -> Prompt:
    """The conversation that `body` holds.

    Raises:
        RequestError: it cannot be served; names the field.
    """
    check_model(body, card)
    given = read_fields(body, TEMPLATE_FIELDS, NEUTRAL_TEMPLATE)
    if "messages" not in given:
        raise InvalidParameter("messages", "messages is missing.", code="missing_value")
    return read_chat_prompt(given, card, limits)


def add_routes(app: FastAPI, serving: Serving) -> None:
    """`POST /apply-template`."""
    card, limits = serving.card, serving.limits
    extra = request_body(fitted(TEMPLATE_FIELDS, serving.card), NEUTRAL_TEMPLATE, "messages")

    @app.post("/apply-template", openapi_extra=extra, responses=answers("Rendered"), response_class=Response)
    async def apply_template(request: Request) -> Response:
        """The text that the model would be given for a conversation."""
        prompt = await serving.read(request, lambda body: parse_template(body, card, limits))
        return json_response(200, {"prompt": (await serving.client.tokenize(prompt)).text})
