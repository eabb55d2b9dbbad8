"""`POST /generate`: the simple endpoint. A prompt and sampling parameters in, text out.

Decides its few shapes: `{"text", "finish_reason", "usage"}`, or plain text piece by piece. Knows no HTTP.
"""

from __future__ import annotations

from penstock.contract.errors import InvalidParameter
from penstock.contract.events import ChoiceDelta, ChoiceFinished, Usage
from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.server.answers import usage_object
from penstock.server.completions import PROMPT_SCHEMA, read_prompt
from penstock.server.exchange import Exchange
from penstock.server.fields import INTEGER, NEUTRAL_GENERATE, Field, Kind, read_fields
from penstock.server.parameters import COMMON_FIELDS, check_model, max_tokens_alias, read_terms, sampling_fields
from penstock.server.prompt_logprobs import read_prompt_logprobs
from penstock.server.strict_json import JsonObject
from penstock.server.timings import TIMINGS

__all__ = ["GENERATE_FIELDS", "GenerateShape", "parse_generate"]

PROMPT = Kind("a string or a list of token ids", PROMPT_SCHEMA, lambda value: isinstance(value, str | list))

GENERATE_FIELDS = (
    Field("prompt", PROMPT, "What to continue: text or token ids."),
    Field("max_new_tokens", INTEGER, "Another name of max_tokens."),
    TIMINGS,
    *COMMON_FIELDS,
    *sampling_fields("best_of", "logprobs", "logprobs_mode", "n"),
)


def parse_generate(body: JsonObject, exchange_id: str, card: ModelCard, limits: RequestLimits) -> Exchange:
    """The exchange that `body` asks for.

    Raises:
        RequestError: it cannot be served; names the field.
    """
    check_model(body, card)
    given = read_fields(body, GENERATE_FIELDS, NEUTRAL_GENERATE)
    aliases = max_tokens_alias(given, "max_new_tokens")
    terms = read_terms(given, {}, aliases, card, limits)
    if "prompt" not in given:
        raise InvalidParameter("prompt", "prompt is missing.", code="missing_value")
    prompt = read_prompt(given["prompt"], "prompt", card, limits)
    timings, stream = given.get("timings", False), given.get("stream", False)
    if timings and stream:
        raise InvalidParameter("timings", "timings has no place in a stream of plain text; leave out stream.")
    return Exchange(
        id=exchange_id,
        asks=(terms.ask(exchange_id, prompt),),
        stream=stream,
        timings=timings,
        prompt_logprobs=read_prompt_logprobs(terms.params, stream=stream, in_choices=False),
        aliases=aliases | {"messages": "prompt"},
    )


class GenerateShape:
    """The simple endpoint's one object."""

    def whole(self, choices: list[tuple[ChoiceDelta, ChoiceFinished]], usage: Usage) -> JsonObject:
        """The only choice."""
        ((delta, finished),) = choices
        return {"text": delta.text, "finish_reason": finished.reason.value, "usage": usage_object(usage)}
