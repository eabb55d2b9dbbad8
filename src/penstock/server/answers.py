"""Parts of answers that several endpoints write alike.

Decides OpenAI's usage object and how log probabilities are written. Knows no endpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from penstock.contract.events import TokenPiece, Usage
from penstock.server.strict_json import JsonObject

__all__ = ["LEAST_LOGPROB", "chat_usage_object", "finite_logprob", "logprob_objects", "usage_object"]

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot write; vLLM's convention."""


def usage_object(usage: Usage) -> JsonObject:
    """Token counts as OpenAI writes them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def chat_usage_object(usage: Usage) -> JsonObject:
    """Likewise, of an answer whose reasoning is told apart."""
    return usage_object(usage) | {"completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens}}


def finite_logprob(logprob: float) -> float:
    """`logprob` as JSON can write it."""
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


def logprob_objects(tokens: Iterable[TokenPiece]) -> list[JsonObject]:
    """Tokens with the likeliest ones in their places, as chat and responses have them."""
    return [{**_token_object(token), "top_logprobs": [_token_object(other) for other in token.top]} for token in tokens]


def _token_object(token: TokenPiece) -> JsonObject:
    return {"token": token.text, "logprob": finite_logprob(token.logprob), "bytes": list(token.bytes)}
