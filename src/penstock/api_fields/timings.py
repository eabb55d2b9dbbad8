"""The `timings` object that a request may ask for: where its time went, with the field names of llama.cpp's server."""

from __future__ import annotations

from penstock.api_fields.fields import BOOLEAN, Field
from penstock.api_fields.strict_json import JsonObject
from penstock.contract.events import Usage
from penstock.contract.measurements import NO_PARTS, PARTS, LatencyParts, Timings

__all__ = ["TIMINGS", "parts_object", "timings_object"]

TIMINGS = Field("timings", BOOLEAN, "End the answer with where its time went: queue, prefill, decode, rates, parts.")


def timings_object(timings: Timings, usage: Usage, num_choices: int, parts: LatencyParts = NO_PARTS) -> JsonObject:
    """Times in milliseconds, rates in tokens per second.

    `prompt_n` counts the prompt tokens that were computed, `cache_n` those found in the prefix cache. Generation rates
    exclude each choice's first token, whose time is in `prompt_ms`; they are null if there was no other token.
    `draft_n` counts the draft tokens that were computed, `draft_n_accepted` the accepted ones among them. `parts_ms`
    divides the whole wall time among `parts`; null if these are `NO_PARTS`.
    """
    computed = usage.prompt_tokens - usage.cached_tokens
    later = max(0, usage.completion_tokens - num_choices)
    return {
        "queue_ms": _ms(timings.queue),
        "cache_n": usage.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": _ms(timings.prefill),
        "prompt_per_second": _rate(computed, timings.prefill),
        "predicted_n": usage.completion_tokens,
        "predicted_ms": _ms(timings.decode),
        "predicted_per_token_ms": _ms(timings.decode / later) if later else None,
        "predicted_per_second": _rate(later, timings.decode),
        "draft_n": timings.drafted,
        "draft_n_accepted": timings.accepted,
        "total_ms": _ms(timings.total),
        "parts_ms": None if parts == NO_PARTS else parts_object(parts),
    }


def parts_object(parts: LatencyParts) -> JsonObject:
    """Milliseconds of each part, of the whole as `total`, and of each reason to wait in the queue."""
    spent: JsonObject = {name: _ms(getattr(parts, name)) for name in PARTS}
    return spent | {"total": _ms(parts.total), "queue_for": {reason: _ms(each) for reason, each in parts.queue_for}}


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3) + 0.0  # + 0.0 turns a rounded -0.0 into 0.0


def _rate(count: int, seconds: float) -> float | None:
    return round(count / seconds, 3) if count and seconds > 0 else None
