"""`POST /v1/embeddings`: one vector for each text or list of token ids, as OpenAI's endpoint of this name.

A vector is encoded as base64 of float32, or as numbers. Only some inputs of a request are in the engine at once, so
that a long list does not fill its queue.
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

from fastapi import Request, Response

from penstock.api_fields.fields import BOOLEAN, INTEGER, TEXT, Field, Neutrals, one_of, read_fields
from penstock.api_fields.fitted_fields import fitted
from penstock.api_fields.prompts import PROMPTS, check_token_ids, split_prompts
from penstock.api_fields.request_options import USER, check_prompt_chars, read_options, served_name
from penstock.api_fields.strict_json import JsonObject, encode
from penstock.contract.embedding import EmbeddingSpec, Pooling, vector_floats
from penstock.contract.errors import InvalidParameter, PromptTooLong, RequestError
from penstock.contract.events import Usage
from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.contract.request import EngineRequest, Prompt, TextPrompt, TokenPrompt
from penstock.server.delivery.output_stream import OutputStream
from penstock.server.delivery.parsed_request import ParsedRequest
from penstock.server.delivery.serving import Serving
from penstock.server.http.failures import RequestTimedOut
from penstock.server.http.openapi import answers, request_body
from penstock.server.http.response_writer import ResponseWriter
from penstock.server.http.route import Route

__all__ = ["EMBEDDING_FIELDS", "EmbeddingRequest", "most_tokens", "parse_embeddings", "routes", "wait_for_vectors"]

BASE64, FLOAT = "base64", "float"


EMBEDDING_FIELDS = (
    Field("input", PROMPTS, "What to embed: text or token ids, one input or several."),
    Field("model", TEXT, "The served model's name; the served model when left out."),
    Field("encoding_format", one_of(FLOAT, BASE64), "float: lists of numbers. base64: float32, little-endian."),
    Field("dimensions", INTEGER, "How many of the first values are kept; what is left is scaled to length 1 again."),
    Field(
        "pooling",
        one_of(*Pooling),
        "mean: of all positions. last: the last one's. When left out as the model's files say, else mean.",
    ),
    Field(
        "normalize",
        BOOLEAN,
        "Whether vectors are scaled to length 1. When left out as the model's files say, else true.",
    ),
    Field(
        "truncate_prompt_tokens",
        INTEGER,
        "Keep so many tokens of each input, of a text those around it and its first; -1: as many as the context has.",
    ),
    USER,
    Field("priority", INTEGER, "Lower runs earlier, where the server schedules by priority; else it must be 0."),
    Field("cache_salt", TEXT, "Inputs share cached work only with prompts of the same salt."),
)


NEUTRAL_EMBEDDINGS: Neutrals = {
    "add_generation_prompt": (False,),
    "add_special_tokens": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "embed_dtype": ("float32",),
    "endianness": ("little",),
    "media_io_kwargs": ({},),
    "messages": (),
    "mm_processor_kwargs": ({},),
    "request_id": (),
    "truncation_side": ("right",),
}


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A parsed request, and the encoding of its vectors."""

    parsed: ParsedRequest
    encoding_format: str


def parse_embeddings(body: JsonObject, response_id: str, card: ModelCard, limits: RequestLimits) -> EmbeddingRequest:
    """Parse the request body.

    Raises:
        RequestError: the request cannot be served; names the field.
    """
    model = served_name(body, card, limits)
    given = read_fields(body, EMBEDDING_FIELDS, NEUTRAL_EMBEDDINGS)
    spec, most = _spec(given, card), most_tokens(given, card)
    options = read_options(given, {}, {}, card, limits)
    parts = split_prompts(given.get("input"), "input", limits.max_embedding_inputs)
    requests = tuple(
        EngineRequest(
            id=f"{response_id}-{index}",
            prompt=_read_input(part, path, most > 0, card, limits),
            priority=options.priority,
            tenant=options.tenant,
            cache_salt=options.cache_salt,
            embedding=spec,
            most_prompt_tokens=most,
        )
        for index, (path, part) in enumerate(parts)
    )
    fields = tuple(path for path, _ in parts)
    parsed = ParsedRequest(
        response_id, requests, prompt_fields=fields, at_once=limits.max_sequences, model=model, user=options.tenant
    )
    return EmbeddingRequest(parsed, given.get("encoding_format", FLOAT))


def _spec(given: JsonObject, card: ModelCard) -> EmbeddingSpec:
    dimensions = given.get("dimensions")
    if dimensions is not None and not 1 <= dimensions <= card.hidden_size:
        message = f"dimensions must lie in 1..{card.hidden_size}, the size of this model's embeddings."
        raise InvalidParameter("dimensions", message)
    usual = card.embedding
    return EmbeddingSpec(
        Pooling(given.get("pooling", usual.pooling)), given.get("normalize", usual.normalize), dimensions or 0
    )


def most_tokens(given: JsonObject, card: ModelCard) -> int:
    """How many tokens of each input to keep; 0 to reject inputs that are too long."""
    most = given.get("truncate_prompt_tokens")
    if most is None:
        return 0
    if most != -1 and not 1 <= most <= card.max_model_len:
        message = f"truncate_prompt_tokens must be -1 or lie in 1..{card.max_model_len}."
        raise InvalidParameter("truncate_prompt_tokens", message)
    return card.max_model_len if most == -1 else most


def _read_input(value: Any, path: str, cut: bool, card: ModelCard, limits: RequestLimits) -> Prompt:
    """Parse one input: text or token ids. Token ids must fit the context, unless they will be truncated (`cut`)."""
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


def routes(serving: Serving) -> tuple[Route, ...]:
    """`POST /v1/embeddings`."""
    limits = serving.limits
    extra = request_body(fitted(EMBEDDING_FIELDS, serving.card), NEUTRAL_EMBEDDINGS, "input")

    async def embeddings(http_request: Request) -> Response:
        """A vector for each input, in the order of the inputs."""
        response_id = "embd-" + secrets.token_hex(16)
        wanted = await serving.read(
            http_request, lambda body: parse_embeddings(body, response_id, serving.card_now, limits)
        )
        parsed = serving.bind(wanted.parsed, http_request)
        delivery = _EmbeddingDelivery(parsed, wanted.encoding_format, serving.live.seconds_for(parsed.requests[0]))
        return serving.respond(parsed, delivery)

    return (Route("POST", "/v1/embeddings", embeddings, answers("Embeddings"), extra, queued=True),)


async def wait_for_vectors(outputs: OutputStream, count: int, seconds: float) -> None:
    """Read `outputs` until all `count` requests have their vectors, for at most `seconds` (0: no limit).

    Raises:
        RequestTimedOut: its time is up.
        RequestError: the request was aborted.
    """
    try:
        async with asyncio.timeout(seconds or None), aclosing(outputs.stream()) as stream:
            async for _ in stream:
                continue
    except TimeoutError:
        raise RequestTimedOut(seconds) from None
    if len(outputs.vectors) != count:
        raise RequestError("The request was aborted before it had all of its embeddings.", code="aborted")


class _EmbeddingDelivery:
    """Sends all vectors in one JSON object, once the last one has been computed.

    Args:
        seconds: time limit for all of them together; 0 for none.
    """

    def __init__(self, parsed: ParsedRequest, encoding_format: str, seconds: float) -> None:
        self._head: JsonObject = {"id": parsed.id, "object": "list", "created": int(time.time()), "model": parsed.model}
        self._count = len(parsed.requests)
        self._written = WRITTEN[encoding_format]
        self._seconds = seconds

    async def deliver(self, outputs: OutputStream, writer: ResponseWriter) -> None:
        """Wait for every vector, then send them."""
        await wait_for_vectors(outputs, self._count, self._seconds)
        body = await self._body(outputs.vectors, outputs.usage)
        await writer.respond(Response(body, media_type="application/json"))

    async def fail(self, error: JsonObject, usage: Usage, writer: ResponseWriter) -> None:
        """Do nothing: the answer is sent at once, so it cannot fail after it has started."""

    async def _body(self, vectors: dict[int, bytes], usage: Usage) -> bytes:
        """The JSON body, built one vector at a time: thousands in one go would hold up every other answer."""
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
