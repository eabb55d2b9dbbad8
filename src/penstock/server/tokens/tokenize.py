"""`POST /tokenize`: the token ids of a prompt or a conversation.

Both are read by the parsers of the generating endpoints, so the ids are exactly the ones that would be computed.
"""

from __future__ import annotations

from fastapi import Request, Response

from penstock.api_fields.chat_options import PROMPT_FIELDS, read_chat_options
from penstock.api_fields.conversation import MESSAGES
from penstock.api_fields.fields import BOOLEAN, TEXT, Field, Neutrals, read_fields
from penstock.api_fields.fitted_fields import fitted
from penstock.api_fields.prompts import PROMPT, read_prompt
from penstock.api_fields.request_options import served_name
from penstock.api_fields.strict_json import JsonObject
from penstock.contract.errors import InvalidParameter
from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.contract.ports import Tokenized
from penstock.contract.request import Prompt
from penstock.server.delivery.serving import Serving
from penstock.server.http.caller import caller_of
from penstock.server.http.failures import json_response
from penstock.server.http.openapi import answers, request_body
from penstock.server.http.route import Route

__all__ = ["NEUTRAL_TOKENIZE", "TOKENIZE_FIELDS", "routes", "parse_tokenize", "read_chat_prompt"]

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
    """The prompt in `body`, and whether token texts are requested.

    Raises:
        RequestError: `body` is invalid; names the field.
    """
    served_name(body, card, limits)
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
        RequestError: they are invalid, or the model has no chat template; names the field.
    """
    if not card.has_chat_template:
        raise InvalidParameter("messages", "The served model has no chat template.", code="unsupported_model")
    return read_chat_options(given, card, limits).prompt


def routes(serving: Serving) -> tuple[Route, ...]:
    """`POST /tokenize`."""
    card, limits = serving.card, serving.limits
    extra = request_body(fitted(TOKENIZE_FIELDS, serving.card), NEUTRAL_TOKENIZE)

    async def tokenize(http_request: Request) -> Response:
        """The token ids of a prompt or conversation."""
        prompt, strings = await serving.read(http_request, lambda body: parse_tokenize(body, serving.card_now, limits))
        tokenized = await serving.client.tokenize(prompt, caller_of(http_request.scope).name)
        return json_response(200, _answer(tokenized, strings, card))

    return (Route("POST", "/tokenize", tokenize, answers("Tokenized"), extra),)


def _answer(tokenized: Tokenized, strings: bool, card: ModelCard) -> JsonObject:
    texts = [piece.decode("utf-8", errors="replace") for piece in tokenized.pieces] if strings else None
    return {
        "count": len(tokenized.token_ids),
        "max_model_len": card.max_model_len,
        "tokens": list(tokenized.token_ids),
        "token_strs": texts,
    }
