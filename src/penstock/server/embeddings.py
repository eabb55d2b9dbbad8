"""`POST /v1/embeddings`: texts or token ids in, one vector for each out, as OpenAI's endpoint of this name.

Decides the input's four spellings, how a vector is written (float32, in base64 or as numbers) and that the inputs of a
request are embedded some at once, the others after them, so that a long list fills no queue. Knows no model.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response

from penstock.contract.embedding import EmbeddingSpec, Pooling, vector_floats
from penstock.contract.errors import InvalidParameter, PromptTooLong, RequestError
from penstock.contract.events import Usage
from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.contract.request import EngineRequest, Prompt, TextPrompt, TokenPrompt
from penstock.server.caller import caller_of
from penstock.server.completions import PROMPTS, check_token_ids, split_prompts
from penstock.server.delivery import EngineResponse, Outlet
from penstock.server.exchange import Exchange, Replies
from penstock.server.failures import RequestTimedOut
from penstock.server.fields import BOOLEAN, INTEGER, NEUTRAL_EMBEDDINGS, TEXT, Field, Kind, read_fields
from penstock.server.fitted_fields import fitted
from penstock.server.openapi import answers, request_body
from penstock.server.parameters import check_model, check_prompt_chars, read_terms
from penstock.server.serving import Serving
from penstock.server.strict_json import JsonObject, encode

__all__ = ["EMBEDDING_FIELDS", "EmbeddingRequest", "add_routes", "parse_embeddings"]

BASE64, FLOAT = "base64", "float"


def _one_of(*words: str) -> Kind:
    name = "one of " + ", ".join(words)
    return Kind(name, {"type": "string", "enum": list(words)}, lambda value: isinstance(value, str) and value in words)


EMBEDDING_FIELDS = (
    Field("input", PROMPTS, "What to embed: text or token ids, one input or several."),
    Field("model", TEXT, "The served model's name; the served model when left out."),
    Field("encoding_format", _one_of(FLOAT, BASE64), "float: lists of numbers. base64: float32, little-endian."),
    Field("dimensions", INTEGER, "How many of the first values are kept; what is left is scaled to length 1 again."),
    Field("pooling", _one_of(*Pooling), "mean (when left out): of all positions. last: the last one's."),
    Field("normalize", BOOLEAN, "Whether vectors are scaled to length 1; true when left out."),
    Field(
        "truncate_prompt_tokens", INTEGER, "Keep so many first tokens of each input; -1: as many as the context has."
    ),
    Field("user", TEXT, "On whose behalf: passed to the engine as the request's tenant. Not logged, not stored."),
    Field("priority", INTEGER, "Lower runs earlier, where the server schedules by priority; else it must be 0."),
    Field("cache_salt", TEXT, "Inputs share cached work only with prompts of the same salt."),
)


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """What a body asks for, and how its vectors are written."""

    exchange: Exchange
    encoding_format: str


def parse_embeddings(body: JsonObject, exchange_id: str, card: ModelCard, limits: RequestLimits) -> EmbeddingRequest:
    """The request that `body` holds.

    Raises:
        RequestError: it cannot be served; names the field.
    """
    check_model(body, card)
    given = read_fields(body, EMBEDDING_FIELDS, NEUTRAL_EMBEDDINGS)
    spec, most = _spec(given, card), _most_tokens(given, card)
    terms = read_terms(given, {}, {}, card, limits)
    parts = split_prompts(given.get("input"), "input", limits.max_embedding_inputs)
    asks = tuple(
        EngineRequest(
            id=f"{exchange_id}-{index}",
            prompt=_read_input(part, path, most > 0, card, limits),
            priority=terms.priority,
            tenant=terms.tenant,
            cache_salt=terms.cache_salt,
            embedding=spec,
            most_prompt_tokens=most,
        )
        for index, (path, part) in enumerate(parts)
    )
    fields = tuple(path for path, _ in parts)
    exchange = Exchange(exchange_id, asks, prompt_fields=fields, at_once=limits.max_sequences)
    return EmbeddingRequest(exchange, given.get("encoding_format", FLOAT))


def _spec(given: JsonObject, card: ModelCard) -> EmbeddingSpec:
    dimensions = given.get("dimensions")
    if dimensions is not None and not 1 <= dimensions <= card.hidden_size:
        message = f"dimensions must lie in 1..{card.hidden_size}, the size of this model's embeddings."
        raise InvalidParameter("dimensions", message)
    pooling = Pooling(given.get("pooling", EmbeddingSpec().pooling))
    return EmbeddingSpec(pooling, given.get("normalize", True), dimensions or 0)


def _most_tokens(given: JsonObject, card: ModelCard) -> int:
    """How many tokens of an input are kept; 0 where one that is too long is refused."""
    most = given.get("truncate_prompt_tokens")
    if most is None:
        return 0
    if most != -1 and not 1 <= most <= card.max_model_len:
        message = f"truncate_prompt_tokens must be -1 or lie in 1..{card.max_model_len}."
        raise InvalidParameter("truncate_prompt_tokens", message)
    return card.max_model_len if most == -1 else most


def _read_input(value: Any, path: str, cut: bool, card: ModelCard, limits: RequestLimits) -> Prompt:
    """One input: a text, or token ids; no more of these than the context has room for, unless they will be `cut`."""
    if not isinstance(value, str | list):
        raise InvalidParameter(path, f"{path} must be a string or a list of token ids.", code="invalid_type")
    if not value:
        raise InvalidParameter(path, f"{path} is empty: there is nothing to embed.")
    if isinstance(value, str):
        check_prompt_chars(len(value), path, card, limits)
        return TextPrompt(value)
    if len(value) > card.max_model_len and not cut:
        raise PromptTooLong(len(value), card.max_model_len, param=path, generates=False)
    check_token_ids(value, path, card)
    return TokenPrompt(tuple(value))


def add_routes(app: FastAPI, serving: Serving) -> None:
    """`POST /v1/embeddings`."""
    card, limits = serving.card, serving.limits
    extra = request_body(fitted(EMBEDDING_FIELDS, serving.card), NEUTRAL_EMBEDDINGS, "input")

    @app.post("/v1/embeddings", openapi_extra=extra, responses=answers("Embeddings"), response_class=Response)
    async def embeddings(request: Request) -> Response:
        """A vector for each input, in their order."""
        answer_id = "embd-" + secrets.token_hex(16)
        asked = await serving.read(request, lambda body: parse_embeddings(body, answer_id, card, limits))
        exchange = caller_of(request.scope).bind(asked.exchange)
        delivery = _EmbeddingDelivery(exchange, asked.encoding_format, card.name, serving.access.request_seconds)
        return EngineResponse(serving.client, exchange, delivery)


class _EmbeddingDelivery:
    """All vectors in one JSON object, once the last one is there.

    Args:
        seconds: how long all of them together may take; 0 for any time.
    """

    def __init__(self, exchange: Exchange, encoding_format: str, model: str, seconds: float) -> None:
        self._head: JsonObject = {"id": exchange.id, "object": "list", "created": int(time.time()), "model": model}
        self._count = len(exchange.asks)
        self._written = WRITTEN[encoding_format]
        self._seconds = seconds

    async def deliver(self, replies: Replies, outlet: Outlet) -> None:
        """Wait for every vector, then send them."""
        try:
            async with asyncio.timeout(self._seconds or None), aclosing(replies.stream()) as stream:
                async for _ in stream:
                    continue
        except TimeoutError:
            raise RequestTimedOut(self._seconds) from None
        if len(replies.vectors) != self._count:
            raise RequestError("The request was aborted before it had all of its embeddings.", code="aborted")
        body = await self._body(replies.vectors, replies.usage)
        await outlet.respond(Response(body, media_type="application/json"))

    async def fail(self, error: JsonObject, usage: Usage, outlet: Outlet) -> None:
        """A whole answer is sent at once: when it has started, there is nothing left that could fail."""

    async def _body(self, vectors: dict[int, bytes], usage: Usage) -> bytes:
        """The JSON, a vector at a time: thousands of them in one go would hold up every other answer."""
        items = []
        for index in range(self._count):
            vector = self._written(vectors[index])
            items.append(encode({"object": "embedding", "index": index, "embedding": vector}))
            await asyncio.sleep(0)
        counts = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
        head, tail = encode(self._head)[:-1], encode({"usage": counts})[1:]
        return head + b',"data":[' + b",".join(items) + b"]," + tail


def _in_base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode("ascii")


WRITTEN: dict[str, Callable[[bytes], Any]] = {FLOAT: vector_floats, BASE64: _in_base64}
