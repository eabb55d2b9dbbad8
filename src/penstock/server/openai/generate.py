"""`POST /generate`: the simple endpoint. A prompt and sampling parameters in, text out.

The answer is `{"text", "finish_reason", "usage"}`, or plain text when streamed.
"""

from __future__ import annotations

from dataclasses import replace

from fastapi import Request, Response

from penstock.api_fields.answers import usage_object
from penstock.api_fields.certificate import CERTIFICATE
from penstock.api_fields.do_sample import STOP_ON_EOS, move_stop_on_eos
from penstock.api_fields.fields import BOOLEAN, INTEGER, Field, Neutrals, read_fields
from penstock.api_fields.fitted_fields import fitted
from penstock.api_fields.prompt_logprobs import read_prompt_logprobs
from penstock.api_fields.prompts import PROMPT, read_prompt
from penstock.api_fields.request_options import (
    COMMON_FIELDS,
    NEUTRAL_COMMON,
    max_tokens_alias,
    read_options,
    sampling_fields,
    served_name,
)
from penstock.api_fields.strict_json import JsonObject
from penstock.api_fields.timings import TIMINGS
from penstock.contract.errors import InvalidParameter
from penstock.contract.events import ChoiceDelta, ChoiceFinished, Usage
from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.server.delivery.deliveries import NOTHING_MORE, Delivery, TextDelivery, whole_delivery
from penstock.server.delivery.parsed_request import ParsedRequest
from penstock.server.delivery.serving import Serving
from penstock.server.http.openapi import answers, request_body
from penstock.server.http.route import Route

__all__ = ["GENERATE_FIELDS", "NEUTRAL_GENERATE", "GenerateFormatter", "parse_generate", "routes"]

GENERATE_FIELDS = (
    Field("prompt", PROMPT, "What to continue: text or token ids."),
    Field("max_new_tokens", INTEGER, "Another name of max_tokens."),
    Field("echo", BOOLEAN, "Begin the text with the prompt, as RoseInfer's answers do."),
    STOP_ON_EOS,
    TIMINGS,
    CERTIFICATE,
    *COMMON_FIELDS,
    *sampling_fields("best_of", "logprobs", "logprobs_mode", "n"),
)


NEUTRAL_GENERATE: Neutrals = NEUTRAL_COMMON | {
    "logprobs": (),
    "logprobs_mode": (),
    "n": (1,),
    "response_format": ({"type": "text"},),
    "stream_options": (),
}


def parse_generate(body: JsonObject, response_id: str, card: ModelCard, limits: RequestLimits) -> ParsedRequest:
    """Parse the request body.

    Raises:
        RequestError: the request cannot be served; names the field.
    """
    model = served_name(body, card, limits)
    given = read_fields(body, GENERATE_FIELDS, NEUTRAL_GENERATE)
    aliases = max_tokens_alias(given, "max_new_tokens")
    move_stop_on_eos(given)
    options = read_options(given, {}, aliases, card, limits)
    if "prompt" not in given:
        raise InvalidParameter("prompt", "prompt is missing.", code="missing_value")
    prompt = read_prompt(given["prompt"], "prompt", card, limits)
    timings, certified, stream = (given.get(name, False) for name in ("timings", "certificate", "stream"))
    for name, wanted in (("timings", timings), ("certificate", certified)):
        if wanted and stream:
            raise InvalidParameter(name, f"{name} has no place in a stream of plain text; leave out stream.")
    return ParsedRequest(
        id=response_id,
        requests=(replace(options.request(response_id, prompt), certified=certified),),
        stream=stream,
        events=False,
        timings=timings,
        prompt_logprobs=read_prompt_logprobs(options.params, stream=stream, in_choices=False),
        aliases=aliases | {"messages": "prompt"},
        model=model,
        user=options.tenant,
    )


class GenerateFormatter:
    """Formats the simple endpoint's answer."""

    def whole(
        self, choices: list[tuple[ChoiceDelta, ChoiceFinished]], usage: Usage, more: JsonObject = NOTHING_MORE
    ) -> JsonObject:
        """The complete answer: the only choice and the usage."""
        ((delta, finished),) = choices
        said = {"text": delta.text, "finish_reason": finished.reason.value, "usage": usage_object(usage)}
        return said | more


def routes(serving: Serving) -> tuple[Route, ...]:
    """`POST /generate`."""

    async def generate(http_request: Request) -> Response:
        """Continue a prompt; the simple endpoint, plain text when streamed."""
        parsed = await serving.parse(http_request, "gen-", parse_generate)
        delivery: Delivery = TextDelivery() if parsed.stream else whole_delivery(parsed, GenerateFormatter())
        return serving.respond(parsed, delivery)

    body = request_body(fitted(GENERATE_FIELDS, serving.card), NEUTRAL_GENERATE, "prompt")
    return (Route("POST", "/generate", generate, answers("Generated", stream="text/plain"), body, queued=True),)
