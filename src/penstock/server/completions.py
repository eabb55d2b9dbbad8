"""`POST /v1/completions`: from a body to an `Exchange`, and from outputs to OpenAI's text completion objects.

Decides the prompt's four spellings and the endpoint's defaults (16 tokens, as OpenAI's). Knows no HTTP.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from penstock.contract.errors import InvalidParameter, PromptTooLong
from penstock.contract.events import ChoiceDelta, ChoiceFinished, TokenPiece, Usage
from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.contract.request import Prompt, TextPrompt, TokenPrompt
from penstock.sampling import SamplingParams
from penstock.server.answers import finite_logprob, usage_object
from penstock.server.exchange import Exchange
from penstock.server.fields import BOOLEAN, NEUTRAL_COMPLETION, Field, Kind, join_path, read_fields
from penstock.server.parameters import (
    COMMON_FIELDS,
    STREAM_OPTIONS,
    check_model,
    check_prompt_chars,
    check_stream_options,
    read_terms,
    sampling_fields,
)
from penstock.server.prompt_logprobs import read_prompt_logprobs
from penstock.server.response_format import RESPONSE_FORMAT, response_format_alias
from penstock.server.strict_json import JsonObject
from penstock.server.timings import TIMINGS

__all__ = [
    "COMPLETION_FIELDS",
    "PROMPTS",
    "PROMPT_SCHEMA",
    "CompletionShape",
    "check_token_ids",
    "parse_completion",
    "read_prompt",
    "split_prompts",
]

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_ONE_PROMPT: list[JsonObject] = [{"type": "string"}, _IDS]
PROMPT_SCHEMA = {"anyOf": _ONE_PROMPT}
PROMPTS = Kind(
    "a string, a list of strings, a list of token ids, or a list of lists of token ids",
    {"anyOf": [*_ONE_PROMPT, *({"type": "array", "items": each, "minItems": 1} for each in _ONE_PROMPT)]},
    lambda value: isinstance(value, str | list),
)

COMPLETION_FIELDS = (
    Field("prompt", PROMPTS, "What to continue: text or token ids, one prompt or several."),
    Field("echo", BOOLEAN, "Begin each choice with the prompt; with logprobs, its tokens have theirs too."),
    STREAM_OPTIONS,
    TIMINGS,
    RESPONSE_FORMAT,
    *COMMON_FIELDS,
    *sampling_fields(),
)


def parse_completion(body: JsonObject, exchange_id: str, card: ModelCard, limits: RequestLimits) -> Exchange:
    """The exchange that `body` asks for.

    Raises:
        RequestError: it cannot be served; names the field.
    """
    check_model(body, card)
    given = read_fields(body, COMPLETION_FIELDS, NEUTRAL_COMPLETION)
    aliases = response_format_alias(given)
    terms, stream = read_terms(given, {"max_tokens": 16}, aliases, card, limits), given.get("stream", False)
    parts = split_prompts(given.get("prompt"), "prompt", limits.max_prompts)
    prompts = [read_prompt(part, path, card, limits) for path, part in parts]
    _check_count(len(prompts), terms.params, limits)
    if stream and terms.params.best_of not in (None, terms.params.n):
        raise InvalidParameter("best_of", "best_of above n has no place in a stream: the best are known at the end.")
    prompt_logprobs = read_prompt_logprobs(terms.params, stream=stream, in_choices=True)
    if terms.echo and terms.params.logprobs is not None:
        most = max(terms.params.logprobs, terms.params.prompt_logprobs or 0)
        terms = replace(terms, params=replace(terms.params, prompt_logprobs=most))
    return Exchange(
        id=exchange_id,
        asks=tuple(terms.ask(f"{exchange_id}-{index}", prompt) for index, prompt in enumerate(prompts)),
        stream=stream,
        include_usage=check_stream_options(given),
        timings=given.get("timings", False),
        prompt_logprobs=prompt_logprobs,
        aliases=aliases | {"messages": "prompt"},
    )


def _check_count(prompts: int, params: SamplingParams, limits: RequestLimits) -> None:
    name, each = ("n", params.n) if params.best_of is None else ("best_of", params.best_of)
    if prompts * each > limits.max_sequences:
        message = f"{prompts} prompts times {name} = {each} is more than {limits.max_sequences} sequences."
        raise InvalidParameter(name, message)


def split_prompts(value: Any, field: str, most: int) -> list[tuple[str, Any]]:
    """Each prompt in a field of kind `PROMPTS` and where it stands; at most `most` of them.

    Raises:
        InvalidParameter: there is none, there are too many, or texts and token ids are mixed.
    """
    if value is None:
        raise InvalidParameter(field, f"{field} is missing.", code="missing_value")
    if isinstance(value, str) or (value and not isinstance(value[0], str | list)):
        return [(field, value)]
    if not value:
        raise InvalidParameter(field, f"{field} must not be an empty list.")
    if len(value) > most:
        raise InvalidParameter(field, f"{field} may hold at most {most} {field}s.")
    if len({type(item) for item in value}) > 1:
        raise InvalidParameter(field, f"{field} must be {PROMPTS.name}, not a mixture.", code="invalid_type")
    return [(f"{field}.{index}", item) for index, item in enumerate(value)]


def read_prompt(value: Any, path: str, card: ModelCard, limits: RequestLimits) -> Prompt:
    """One prompt: text, or token ids of the served vocabulary.

    Raises:
        RequestError: it is neither, or longer than the context.
    """
    if isinstance(value, str):
        check_prompt_chars(len(value), path, card, limits)
        return TextPrompt(value)
    if not isinstance(value, list):
        raise InvalidParameter(path, f"{path} must be a string or a list of token ids.", code="invalid_type")
    if not value:
        raise InvalidParameter(path, f"{path} must hold at least one token id.")
    if len(value) >= card.max_model_len:
        raise PromptTooLong(len(value), card.max_model_len, param=path)
    check_token_ids(value, path, card)
    return TokenPrompt(tuple(value))


def check_token_ids(value: list[Any], path: str, card: ModelCard) -> None:
    """Refuse a list of which an item is no token id of the served vocabulary.

    Raises:
        InvalidParameter: it names the item.
    """
    for index, token in enumerate(value):
        if type(token) is not int or not 0 <= token < card.vocab_size:
            where = join_path(path, index)
            raise InvalidParameter(where, f"{where} must be a token id: an integer in 0..{card.vocab_size - 1}.")


class CompletionShape:
    """OpenAI's `text_completion`, whole or in pieces. One instance an answer."""

    def __init__(self, exchange_id: str, model: str, created: int, logprobs: bool) -> None:
        self._head = {
            "id": exchange_id,
            "object": "text_completion",
            "created": created,
            "model": model,
            "system_fingerprint": None,
        }
        self._logprobs = logprobs

    def whole(self, choices: list[tuple[ChoiceDelta, ChoiceFinished]], usage: Usage) -> JsonObject:
        """The whole `text_completion`."""
        objects = [
            {**self._choice(delta), "finish_reason": finished.reason.value, "stop_reason": finished.stop}
            for delta, finished in choices
        ]
        return {**self._head, "choices": objects, "usage": usage_object(usage)}

    def opening(self, index: int) -> None:
        """Completions have no role to open with."""

    def piece(self, delta: ChoiceDelta) -> JsonObject | None:
        """A chunk with text."""
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
        """The chunk with the usage, which belongs to no choice."""
        return {**self._head, "choices": [], "usage": usage_object(usage)}

    def _choice(self, delta: ChoiceDelta) -> JsonObject:
        logprobs = self._logprobs_object(delta) if self._logprobs else None
        return {"index": delta.choice, "text": delta.text, "logprobs": logprobs, "finish_reason": None}

    def _logprobs_object(self, delta: ChoiceDelta) -> JsonObject:
        tops = [_top_object(token) for token in delta.tokens]
        return {
            "text_offset": [token.start for token in delta.tokens],
            "token_logprobs": [_token_logprob(token) for token in delta.tokens],
            "tokens": [token.text for token in delta.tokens],
            "top_logprobs": tops if any(token.top for token in delta.tokens) else None,
        }


def _token_logprob(token: TokenPiece) -> float | None:
    """A prompt's first token has none: nothing stands before it to predict it from."""
    return None if math.isnan(token.logprob) else finite_logprob(token.logprob)


def _top_object(token: TokenPiece) -> JsonObject | None:
    """Text -> log probability: of the likeliest tokens, then of the chosen one; of equal texts the likelier counts."""
    if math.isnan(token.logprob):
        return None
    texts: JsonObject = {}
    for each in (*token.top, token):
        texts.setdefault(each.text, finite_logprob(each.logprob))
    return texts
