"""Parts of answers that several endpoints share: OpenAI's usage object, and log probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterable

from penstock.api_fields.strict_json import JsonObject
from penstock.contract.events import TokenPiece, Usage

__all__ = [
    "LEAST_LOGPROB",
    "chat_usage_object",
    "finite_logprob",
    "logprob_objects",
    "running_usage_object",
    "usage_object",
]

LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent; vLLM's convention."""


def usage_object(usage: Usage) -> JsonObject:
    """Token counts in OpenAI's format."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def running_usage_object(usage: Usage) -> JsonObject:
    """Token counts while an answer is streaming, without details, which are known only at its end."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def chat_usage_object(usage: Usage) -> JsonObject:
    """`usage_object`, plus the number of reasoning tokens."""
    return usage_object(usage) | {"completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens}}


def finite_logprob(logprob: float) -> float:
    """`logprob`, or `LEAST_LOGPROB` if it is infinite or NaN, which JSON cannot represent."""
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


def logprob_objects(tokens: Iterable[TokenPiece]) -> list[JsonObject]:
    """Tokens, each with its top alternatives, in the format of chat completions and responses."""
    return [{**_token_object(token), "top_logprobs": [_token_object(other) for other in token.top]} for token in tokens]


def _token_object(token: TokenPiece) -> JsonObject:
    return {"token": token.text, "logprob": finite_logprob(token.logprob), "bytes": list(token.bytes)}
