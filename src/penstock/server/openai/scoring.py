"""`/v1/score` and `/v1/rerank`: text similarity, in the formats of vLLM's and Jina's endpoints of these names.

There are no reranking models here: a score is the cosine similarity, in -1..1, of the two texts' embeddings by the
served model. `/score`, `/rerank` and `/v2/rerank` are aliases under vLLM's other paths.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import Any

from fastapi import Request, Response

from penstock.api_fields.fields import BOOLEAN, INTEGER, TEXT, TEXTS, Field, Kind, Neutrals, join_path, read_fields
from penstock.api_fields.fitted_fields import fitted
from penstock.api_fields.request_options import USER, check_prompt_chars, read_options, served_name
from penstock.api_fields.strict_json import JsonObject
from penstock.contract.embedding import vector_floats
from penstock.contract.errors import InvalidParameter
from penstock.contract.events import Usage
from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.contract.request import EngineRequest, TextPrompt
from penstock.server.delivery.output_stream import OutputStream
from penstock.server.delivery.parsed_request import ParsedRequest
from penstock.server.delivery.serving import Serving
from penstock.server.http.failures import json_response
from penstock.server.http.openapi import answers, request_body
from penstock.server.http.response_writer import ResponseWriter
from penstock.server.http.route import Route
from penstock.server.openai.embeddings import most_tokens, wait_for_vectors

__all__ = [
    "NEUTRAL_SCORING",
    "RERANK_FIELDS",
    "SCORE_FIELDS",
    "ScoringRequest",
    "parse_rerank",
    "parse_score",
    "routes",
]

_DOCUMENT = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "object",
            "properties": {"text": {"type": "string", "minLength": 1}},
            "required": ["text"],
            "additionalProperties": False,
        },
    ]
}
DOCUMENTS = Kind(
    "a list of texts, or of objects with a text",
    {"type": "array", "items": _DOCUMENT, "minItems": 1},
    lambda value: isinstance(value, list),
)
_SHARED = (
    Field("model", TEXT, "The served model's name; the served model when left out."),
    Field(
        "truncate_prompt_tokens",
        INTEGER,
        "Keep so many tokens of each text, those around it and its first; -1: as many as the context has.",
    ),
    USER,
    Field("priority", INTEGER, "Lower runs earlier, where the server schedules by priority; else it must be 0."),
    Field("cache_salt", TEXT, "Texts share cached work only with prompts of the same salt."),
)
SCORE_FIELDS = (
    Field("text_1", TEXTS, "What is compared: a text, with every other; or as many texts as there are others."),
    Field("text_2", TEXTS, "What it is compared with."),
    *_SHARED,
)
RERANK_FIELDS = (
    Field("query", TEXT, "What the documents are compared with."),
    Field("documents", DOCUMENTS, "What is put in order."),
    Field("top_n", INTEGER, "How many of the best are returned; all when left out, or for 0."),
    Field("return_documents", BOOLEAN, "Whether results repeat their documents; true when left out."),
    *_SHARED,
)
NEUTRAL_SCORING: Neutrals = {
    "activation": (False,),
    "add_special_tokens": (True,),
    "instruction": ("",),
    "max_tokens_per_doc": (0,),
    "mm_processor_kwargs": ({},),
    "request_id": (),
    "softmax": (False,),
    "truncation_side": ("right",),
    "use_activation": (False,),
}

Answer = Callable[[list[float], Usage], JsonObject]


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """The texts to embed, the pairs of them to compare, and the function that builds the answer from the cosines."""

    parsed: ParsedRequest
    pairs: tuple[tuple[int, int], ...]
    answer: Answer


def parse_score(body: JsonObject, response_id: str, card: ModelCard, limits: RequestLimits) -> ScoringRequest:
    """Parse the body of a `/v1/score` request.

    Raises:
        RequestError: the request cannot be served; names the field.
    """
    model = served_name(body, card, limits)
    given = read_fields(body, SCORE_FIELDS, NEUTRAL_SCORING)
    one, other = (_texts(given, name) for name in ("text_1", "text_2"))
    if len(one) not in (1, len(other)):
        message = "text_1 must be one text, or as many as text_2 has."
        raise InvalidParameter("text_1", message)
    pairs = tuple((0 if len(one) == 1 else index, len(one) + index) for index in range(len(other)))
    head: JsonObject = {"id": response_id, "object": "list", "created": int(time.time()), "model": model}

    def answer(cosines: list[float], usage: Usage) -> JsonObject:
        scores = [{"index": index, "object": "score", "score": cosine} for index, cosine in enumerate(cosines)]
        return head | {"data": scores, "usage": _usage(usage)}

    paths = [*_paths("text_1", given["text_1"]), *_paths("text_2", given["text_2"])]
    parsed = _parsed(given, response_id, model, list(zip(paths, [*one, *other], strict=True)), card, limits)
    return ScoringRequest(parsed, pairs, answer)


def parse_rerank(body: JsonObject, response_id: str, card: ModelCard, limits: RequestLimits) -> ScoringRequest:
    """Parse the body of a `/v1/rerank` request.

    Raises:
        RequestError: the request cannot be served; names the field.
    """
    model = served_name(body, card, limits)
    given = read_fields(body, RERANK_FIELDS, NEUTRAL_SCORING)
    for name in ("query", "documents"):
        if not given.get(name):
            raise InvalidParameter(name, f"{name} is missing.", code="missing_value")
    documents = [_document(value, f"documents.{index}") for index, value in enumerate(given["documents"])]
    top, shown = given.get("top_n", 0), given.get("return_documents", True)
    if top < 0:
        raise InvalidParameter("top_n", "top_n must not be negative.")

    def answer(cosines: list[float], usage: Usage) -> JsonObject:
        best = sorted(range(len(cosines)), key=lambda index: (-cosines[index], index))[: top or None]
        results = [
            {"index": index, "relevance_score": cosines[index]}
            | ({"document": {"text": documents[index]}} if shown else {})
            for index in best
        ]
        return {"id": response_id, "model": model, "results": results, "usage": _usage(usage)}

    texts = [("query", given["query"]), *((f"documents.{index}", text) for index, text in enumerate(documents))]
    parsed = _parsed(given, response_id, model, texts, card, limits)
    return ScoringRequest(parsed, tuple((0, 1 + index) for index in range(len(documents))), answer)


def _texts(given: JsonObject, name: str) -> list[str]:
    value: str | list[str] = given.get(name, [])
    if not value:
        raise InvalidParameter(name, f"{name} is missing.", code="missing_value")
    return [value] if isinstance(value, str) else value


def _paths(name: str, value: str | list[str]) -> list[str]:
    return [name] if isinstance(value, str) else [join_path(name, index) for index in range(len(value))]


def _document(value: Any, path: str) -> str:
    text = value
    if isinstance(value, dict):
        text = read_fields(value, (Field("text", TEXT, ""),), {}, path).get("text")
    if not isinstance(text, str):
        raise InvalidParameter(path, f"{path} must be a text, or an object with a text.", code="invalid_type")
    return text


def _parsed(
    given: JsonObject,
    response_id: str,
    model: str,
    texts: Sequence[tuple[str, str]],
    card: ModelCard,
    limits: RequestLimits,
) -> ParsedRequest:
    """Build a request for the embeddings of `texts`, given as (path of the field, text)."""
    if len(texts) > limits.max_embedding_inputs:
        where = texts[-1][0].partition(".")[0]
        raise InvalidParameter(where, f"{where}: at most {limits.max_embedding_inputs} texts are compared at once.")
    most, options = most_tokens(given, card), read_options(given, {}, {}, card, limits)
    for path, text in texts:
        if not text:
            raise InvalidParameter(path, f"{path} is empty: there is nothing to compare.")
        check_prompt_chars(len(text), path, card, limits)
    spec = replace(card.embedding, normalize=True)
    requests = tuple(
        EngineRequest(
            id=f"{response_id}-{index}",
            prompt=TextPrompt(text),
            priority=options.priority,
            tenant=options.tenant,
            cache_salt=options.cache_salt,
            embedding=spec,
            most_prompt_tokens=most,
        )
        for index, (_, text) in enumerate(texts)
    )
    return ParsedRequest(
        id=response_id,
        requests=requests,
        prompt_fields=tuple(path for path, _ in texts),
        at_once=limits.max_sequences,
        model=model,
        user=options.tenant,
    )


def _usage(usage: Usage) -> JsonObject:
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}


@dataclass(frozen=True, slots=True)
class _ScoringDelivery:
    """Sends all scores in one JSON object, once the last vector has been computed."""

    wanted: ScoringRequest
    seconds: float

    async def deliver(self, outputs: OutputStream, writer: ResponseWriter) -> None:
        """Wait for every vector, then compute and send the scores."""
        await wait_for_vectors(outputs, len(self.wanted.parsed.requests), self.seconds)
        vectors = {index: vector_floats(vector) for index, vector in outputs.vectors.items()}
        cosines = [_cosine(vectors[one], vectors[other]) for one, other in self.wanted.pairs]
        await writer.respond(json_response(200, self.wanted.answer(cosines, outputs.usage)))

    async def fail(self, error: JsonObject, usage: Usage, writer: ResponseWriter) -> None:
        """Do nothing: the answer is sent at once, so it cannot fail after it has started."""


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Cosine of two vectors of length 1, clamped to -1..1 against rounding; 0 if one of them is the zero vector."""
    cosine: float = sum(map(mul, one, other))
    return max(-1.0, min(1.0, cosine))


def routes(serving: Serving) -> tuple[Route, ...]:
    """`POST /v1/score` and `POST /v1/rerank`, and their aliases under vLLM's other paths."""
    card, limits = serving.card, serving.limits

    async def answered(http_request: Request, prefix: str, parse: Callable[..., ScoringRequest]) -> Response:
        response_id = prefix + secrets.token_hex(16)
        wanted = await serving.read(http_request, lambda body: parse(body, response_id, serving.card_now, limits))
        parsed = serving.bind(wanted.parsed, http_request)
        return serving.respond(parsed, _ScoringDelivery(wanted, serving.live.seconds_for(parsed.requests[0])))

    async def score(http_request: Request) -> Response:
        """The similarity of pairs of texts: the cosine of their embeddings."""
        return await answered(http_request, "score-", parse_score)

    async def rerank(http_request: Request) -> Response:
        """Rank documents by their similarity to a query: the cosine of their embeddings."""
        return await answered(http_request, "rerank-", parse_rerank)

    scoring = request_body(fitted(SCORE_FIELDS, card), NEUTRAL_SCORING, "text_1", "text_2")
    ranking = request_body(fitted(RERANK_FIELDS, card), NEUTRAL_SCORING, "query", "documents")
    return (
        Route("POST", "/v1/score", score, answers("Scores"), scoring, queued=True),
        Route("POST", "/score", score, documented=False, queued=True),
        Route("POST", "/v1/rerank", rerank, answers("Ranking"), ranking, queued=True),
        Route("POST", "/rerank", rerank, documented=False, queued=True),
        Route("POST", "/v2/rerank", rerank, documented=False, queued=True),
    )
