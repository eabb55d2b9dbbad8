"""`POST /tokenize`: how a prompt or a conversation reads to the model, in token ids.

Decides the request's two forms; both are read by the very parsers of the generating endpoints, so that the ids are
those that these would compute. Generates nothing.
"""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from penstock.contract.errors import InvalidParameter
from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.contract.ports import Tokenized
from penstock.contract.request import Prompt
from penstock.server.chat_terms import PROMPT_FIELDS, read_chat_terms
from penstock.server.completions import PROMPT_SCHEMA, read_prompt
from penstock.server.conversation import MESSAGES
from penstock.server.failures import json_response
from penstock.server.fields import BOOLEAN, TEXT, Field, Kind, Neutrals, read_fields
from penstock.server.fitted_fields import fitted
from penstock.server.openapi import answers, request_body
from penstock.server.parameters import check_model
from penstock.server.serving import Serving
from penstock.server.strict_json import JsonObject

__all__ = ["NEUTRAL_TOKENIZE", "TOKENIZE_FIELDS", "add_routes", "parse_tokenize", "read_chat_prompt"]

PROMPT = Kind("a string or a list of token ids", PROMPT_SCHEMA, lambda value: isinstance(value, str | list))

TOKENIZE_FIELDS = (
    Field("model", TEXT, "The served model's name; the served model when left out."),
    Field("prompt", PROMPT, "The text to tokenise, as /v1/completions reads it; or messages."),
    Field(
        "messages", MESSAGES, "The conversation to render and tokenise, as /v1/chat/completions reads it; or prompt."
    ),
    *PROMPT_FIELDS,
    Field("return_token_strs", BOOLEAN, "Whether to return each token's text as well."),
)
NEUTRAL_TOKENIZE: Neutrals = {
    "add_special_tokens": (),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
}


def parse_tokenize(body: JsonObject, card: ModelCard, limits: RequestLimits) -> tuple[Prompt, bool]:
    """The prompt that `body` holds, and whether token texts are asked for.

    Raises:
        RequestError: it cannot be served; names the field.
    """
    check_model(body, card)
    given = read_fields(body, TOKENIZE_FIELDS, NEUTRAL_TOKENIZE)
    if "prompt" in given and "messages" in given:
        raise InvalidParameter("messages", "Give either prompt or messages, not both.")
    if not given.keys() & {"prompt", "messages"}:
        raise InvalidParameter("prompt", "prompt (or messages) is missing.", code="missing_value")
    strings: bool = given.get("return_token_strs", False)
    if "messages" in given:
        return read_chat_prompt(given, card, limits), strings
    for field in PROMPT_FIELDS:
        if field.name in given:
            raise InvalidParameter(field.name, f"{field.name} belongs to messages; there are none here.")
    return read_prompt(given["prompt"], "prompt", card, limits), strings


def read_chat_prompt(given: JsonObject, card: ModelCard, limits: RequestLimits) -> Prompt:
    """The prompt that the chat endpoint would make of these `messages` and `PROMPT_FIELDS`.

    Raises:
        RequestError: they cannot be served; names the field.
    """
    if not card.has_chat_template:
        raise InvalidParameter("messages", "The served model has no chat template.", code="unsupported_model")
    return read_chat_terms(given, card, limits).prompt


def add_routes(app: FastAPI, serving: Serving) -> None:
    """`POST /tokenize`."""
    card, limits = serving.card, serving.limits
    extra = request_body(fitted(TOKENIZE_FIELDS, serving.card), NEUTRAL_TOKENIZE)

    @app.post("/tokenize", openapi_extra=extra, responses=answers("Tokenized"), response_class=Response)
    async def tokenize(request: Request) -> Response:
        """The token ids of a prompt or conversation."""
        prompt, strings = await serving.read(request, lambda body: parse_tokenize(body, card, limits))
        return json_response(200, _answer(await serving.client.tokenize(prompt), strings, card))


def _answer(tokenized: Tokenized, strings: bool, card: ModelCard) -> JsonObject:
    texts = [piece.decode("utf-8", errors="replace") for piece in tokenized.pieces] if strings else None
    return {
        "count": len(tokenized.token_ids),
        "max_model_len": card.max_model_len,
        "tokens": list(tokenized.token_ids),
        "token_strs": texts,
    }
