"""`POST /v1/completions`: its fields, request parsing, and OpenAI's text completion objects for the answer.

`max_tokens` defaults to 16, as at OpenAI. With 0 nothing is generated: `echo` and `logprobs` then score the prompt.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fastapi import Request, Response

from penstock.api_fields.answers import finite_logprob, usage_object
from penstock.api_fields.certificate import CERTIFICATE, check_certified
from penstock.api_fields.fields import BOOLEAN, Field, Neutrals, read_fields
from penstock.api_fields.fitted_fields import LENGTHS, fitted
from penstock.api_fields.prompt_logprobs import read_prompt_logprobs
from penstock.api_fields.prompts import PROMPTS, read_prompt, split_prompts
from penstock.api_fields.request_options import (
    COMMON_FIELDS,
    NEUTRAL_COMMON,
    STREAM_OPTIONS,
    read_options,
    read_stream_usage,
    sampling_fields,
    served_name,
)
from penstock.api_fields.response_format import RESPONSE_FORMAT, response_format_alias
from penstock.api_fields.strict_json import JsonObject
from penstock.api_fields.timings import TIMINGS
from penstock.contract.errors import InvalidParameter
from penstock.contract.events import ChoiceDelta, ChoiceFinished, TokenPiece, Usage
from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.sampling import SamplingParams
from penstock.server.delivery.deliveries import NOTHING_MORE, chunk_delivery
from penstock.server.delivery.parsed_request import ParsedRequest
from penstock.server.delivery.serving import Serving
from penstock.server.http.openapi import answers, request_body
from penstock.server.http.route import Route

__all__ = ["COMPLETION_FIELDS", "NEUTRAL_COMPLETION", "CompletionFormatter", "parse_completion", "routes"]

COMPLETION_FIELDS = (
    Field("prompt", PROMPTS, "What to continue: text or token ids, one prompt or several."),
    Field("echo", BOOLEAN, "Begin each choice with the prompt; with logprobs, its tokens have theirs too."),
    STREAM_OPTIONS,
    TIMINGS,
    CERTIFICATE,
    RESPONSE_FORMAT,
    *COMMON_FIELDS,
    *sampling_fields(),
)


NEUTRAL_COMPLETION: Neutrals = NEUTRAL_COMMON | {
    "add_special_tokens": (True,),
    "prompt_embeds": (),
    "suffix": ("",),
}


def parse_completion(body: JsonObject, response_id: str, card: ModelCard, limits: RequestLimits) -> ParsedRequest:
    """Parse the request body.

    Raises:
        RequestError: the request cannot be served; names the field.
    """
    model = served_name(body, card, limits)
    given = read_fields(body, COMPLETION_FIELDS, NEUTRAL_COMPLETION)
    aliases = response_format_alias(given)
    prompt_only = given.get("max_tokens") == 0
    if prompt_only:
        given["max_tokens"] = 1  # the engine always generates a token; `prompt_only` leaves it out
    options, stream = read_options(given, {"max_tokens": 16}, aliases, card, limits), given.get("stream", False)
    parts = split_prompts(given.get("prompt"), "prompt", limits.max_prompts)
    prompts = [read_prompt(part, path, card, limits) for path, part in parts]
    _check_count(len(prompts), options.params, limits)
    if stream and options.params.best_of not in (None, options.params.n):
        raise InvalidParameter("best_of", "best_of above n has no place in a stream: the best are known at the end.")
    prompt_logprobs = read_prompt_logprobs(options.params, stream=stream, in_choices=True)
    if options.echo and options.params.logprobs is not None:
        most = max(options.params.logprobs, options.params.prompt_logprobs or 0)
        options = replace(options, params=replace(options.params, prompt_logprobs=most))
    usage, certified = read_stream_usage(given), given.get("certificate", False)
    if certified:
        check_certified(len(prompts), prompt_only=prompt_only)
    requests = (options.request(f"{response_id}-{index}", prompt) for index, prompt in enumerate(prompts))
    return ParsedRequest(
        id=response_id,
        requests=tuple(replace(request, running_usage=usage.running, certified=certified) for request in requests),
        stream=stream,
        include_usage=usage.at_end,
        running_usage=usage.running,
        timings=given.get("timings", False),
        prompt_logprobs=prompt_logprobs,
        aliases=aliases | {"messages": "prompt"},
        model=model,
        user=options.tenant,
        prompt_only=prompt_only,
    )


def _check_count(prompts: int, params: SamplingParams, limits: RequestLimits) -> None:
    name, each = ("n", params.n) if params.best_of is None else ("best_of", params.best_of)
    if prompts * each > limits.max_sequences:
        message = f"{prompts} prompts times {name} = {each} is more than {limits.max_sequences} sequences."
        raise InvalidParameter(name, message)


class CompletionFormatter:
    """OpenAI's `text_completion`, complete or in chunks. One instance per answer."""

    def __init__(self, response_id: str, model: str, created: int, logprobs: bool) -> None:
        self._head = {
            "id": response_id,
            "object": "text_completion",
            "created": created,
            "model": model,
            "system_fingerprint": None,
        }
        self._logprobs = logprobs

    def whole(
        self, choices: list[tuple[ChoiceDelta, ChoiceFinished]], usage: Usage, more: JsonObject = NOTHING_MORE
    ) -> JsonObject:
        """The complete `text_completion`."""
        objects = [
            {**self._choice(delta), "finish_reason": finished.reason.value, "stop_reason": finished.stop}
            for delta, finished in choices
        ]
        return {**self._head, "choices": objects, "usage": usage_object(usage), **more}

    def opening(self, index: int) -> None:
        """Completions have no role to open with."""

    def piece(self, delta: ChoiceDelta) -> JsonObject | None:
        """A chunk with text; None if it would be empty."""
        if not delta.text and not (self._logprobs and delta.tokens):
            return None
        return {**self._head, "choices": [self._choice(delta)]}

    def ending(self, finished: ChoiceFinished) -> JsonObject:
        """The chunk with the finish reason."""
        choice = {
            "index": finished.choice,
            "text": "",
            "logprobs": None,
            "finish_reason": finished.reason.value,
            "stop_reason": finished.stop,
        }
        return {**self._head, "choices": [choice]}

    def usage(self, usage: Usage) -> JsonObject:
        """The chunk with the usage; it has no choices."""
        return {**self._head, "choices": [], "usage": usage_object(usage)}

    def _choice(self, delta: ChoiceDelta) -> JsonObject:
        logprobs = self._logprobs_object(delta) if self._logprobs else None
        return {"index": delta.choice, "text": delta.text, "logprobs": logprobs, "finish_reason": None}

    def _logprobs_object(self, delta: ChoiceDelta) -> JsonObject:
        top = [_top_object(token) for token in delta.tokens]
        return {
            "text_offset": [token.start for token in delta.tokens],
            "token_logprobs": [_token_logprob(token) for token in delta.tokens],
            "tokens": [token.text for token in delta.tokens],
            "top_logprobs": top if any(token.top for token in delta.tokens) else None,
        }


def _token_logprob(token: TokenPiece) -> float | None:
    """The token's log probability; None for the first token of a prompt, which has none."""
    return None if math.isnan(token.logprob) else finite_logprob(token.logprob)


def _top_object(token: TokenPiece) -> JsonObject | None:
    """Text -> log probability of the top tokens and the chosen one; of equal texts, the most likely token's."""
    if math.isnan(token.logprob):
        return None
    texts: JsonObject = {}
    for each in (*token.top, token):
        texts.setdefault(each.text, finite_logprob(each.logprob))
    return texts


def routes(serving: Serving) -> tuple[Route, ...]:
    """`POST /v1/completions`."""

    async def completions(http_request: Request) -> Response:
        """Continue text or token ids, as OpenAI's endpoint of this name."""
        parsed = await serving.parse(http_request, "cmpl-", parse_completion)
        logprobs = parsed.requests[0].sampling.has("logprobs")
        formatter = CompletionFormatter(parsed.id, parsed.model, parsed.created, logprobs)
        return serving.respond(parsed, chunk_delivery(parsed, formatter))

    body = request_body(
        fitted(COMPLETION_FIELDS, serving.card, LENGTHS | {"max_tokens": 0}), NEUTRAL_COMPLETION, "prompt"
    )
    described = answers("Completion", stream="text/event-stream")
    return (Route("POST", "/v1/completions", completions, described, body, queued=True),)
