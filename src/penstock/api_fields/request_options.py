"""The fields that every generating endpoint has, and how they become an `EngineRequest`.

The sampling fields come from `penstock.sampling`, the others are listed here. Decides their limits, and what happens
if one value is given under two names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.api_fields.do_sample import DO_SAMPLE, temperature_of
from penstock.api_fields.fields import (
    BOOLEAN,
    INTEGER,
    OBJECT,
    TEXT,
    Field,
    Kind,
    Neutrals,
    one_of,
    read_fields,
    whole_numbers,
)
from penstock.api_fields.strict_json import JsonObject, printable
from penstock.contract.errors import InvalidParameter, UnknownModel
from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.contract.request import EngineRequest, Prompt
from penstock.sampling import PARAMETERS, SamplingParams
from penstock.sampling.parameter import Parameter

__all__ = [
    "COMMON_FIELDS",
    "HINTS",
    "NEUTRAL_COMMON",
    "NEUTRAL_STREAM_OPTIONS",
    "SAFETY_IDENTIFIER",
    "STREAM_OPTIONS",
    "STREAM_OPTIONS_FIELDS",
    "USER",
    "RequestOptions",
    "StreamUsage",
    "check_prompt_chars",
    "max_tokens_alias",
    "read_options",
    "read_stream_usage",
    "sampling_fields",
    "served_name",
]

MAX_PRIORITY = 2**31 - 1

STREAM_OPTIONS_FIELDS = (
    Field("include_usage", BOOLEAN, "End the stream with a chunk that holds the usage."),
    Field("continuous_usage_stats", BOOLEAN, "Report token counts in every chunk; needs include_usage, as in vLLM."),
)

NEUTRAL_STREAM_OPTIONS: Neutrals = {"include_obfuscation": (False,)}

USER = Field(
    "user",
    TEXT,
    "Who the request is made for: the `enduser.id` of its span; if the server has no API keys, also who gets a share"
    " under the policy `fair`. Not logged.",
)
SAFETY_IDENTIFIER = Field("safety_identifier", TEXT, "Same as user; user wins if both are given.")
COMMON_FIELDS = (
    Field("model", TEXT, "The served model's name; the served model when left out."),
    Field("stream", BOOLEAN, "Send the answer piece by piece, as it is generated."),
    USER,
    Field("priority", INTEGER, "Lower runs earlier if the server schedules by priority; otherwise it must be 0."),
    Field("cache_salt", TEXT, "Share cached work only with prompts that have the same salt."),
)
HINTS = (
    Field(
        "prompt_cache_key",
        TEXT,
        "Which requests share a prefix; the prefix cache finds shared prefixes without it.",
        hint=True,
    ),
    Field(
        "service_tier",
        one_of("auto", "default", "flex", "scale", "priority"),
        "How the vendor's service would schedule and bill the request; this server has one tier.",
        hint=True,
    ),
)
"""Fields that OpenAI's clients and agents send to any server."""
STREAM_OPTIONS = Field("stream_options", OBJECT, "What a stream carries besides text; only with stream: true.")


NEUTRAL_COMMON: dict[str, tuple[object, ...]] = {
    "early_stopping": (False,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logprob_token_ids": (),
    "request_id": (),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "session_id": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
"""Fields of every generating endpoint that only other servers implement, with the values accepted here."""


def sampling_fields(*without: str) -> tuple[Field, ...]:
    """The sampling parameters as request fields, and `do_sample`; type and range are checked by `SamplingParams`."""
    parameters = tuple(
        Field(each.name, Kind("", each.json_schema(), lambda _: True, _canonical(each)), each.doc)
        for each in PARAMETERS
        if each.name not in without
    )
    return (*parameters, DO_SAMPLE)


def _canonical(parameter: Parameter) -> Callable[[Any], Any]:
    """The canonical form of a sampling parameter's values: whole floats become integers if it takes integers."""
    schema = parameter.kind.schema()
    types = {each.get("items", each).get("type") for each in schema.get("anyOf", [schema])}
    return whole_numbers if "integer" in types else _unchanged


def _unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of a request, which apply to each of its prompts."""

    params: SamplingParams
    priority: int
    tenant: str
    cache_salt: str
    echo: bool = False

    def request(self, request_id: str, prompt: Prompt) -> EngineRequest:
        """The engine request for one prompt."""
        return EngineRequest(
            id=request_id,
            prompt=prompt,
            n=self.params.n,
            sampling=self.params.spec(),
            stop=self.params.stop_rules(),
            priority=self.priority,
            tenant=self.tenant,
            cache_salt=self.cache_salt,
            echo=self.echo,
            grammar=self.params.grammar(),
            best_of=self.params.best_of,
            thinking_token_budget=self.params.thinking_token_budget,
        )


def served_name(body: JsonObject, card: ModelCard, limits: RequestLimits) -> str:
    """The model name in a body, which its answer repeats; the served model's main name if the body has none.

    Raises:
        UnknownModel: the body names another model.
        InvalidParameter: the name is too long.
    """
    asked = body.get("model")
    if not isinstance(asked, str):  # a wrong type is refused later, with the other fields
        return card.name
    if len(asked) > limits.max_name_chars:
        raise InvalidParameter("model", f"model may have at most {limits.max_name_chars} characters.")
    if not card.answers_to(asked):
        raise UnknownModel(printable(asked), *card.names, *card.adapters)
    return asked


def check_prompt_chars(count: int, param: str, card: ModelCard, limits: RequestLimits) -> None:
    """Refuse a text too long to fit the context in any tokenisation, before spending time on tokenising it."""
    most = card.max_model_len * limits.max_prompt_chars_per_token
    if count > most:
        message = f"{param} has {count} characters; a context of {card.max_model_len} tokens never holds over {most}."
        raise InvalidParameter(param, message, code="context_length_exceeded")


def max_tokens_alias(given: JsonObject, alias: str) -> dict[str, str]:
    """Move `alias` to `max_tokens` in `given`; returns the field names that errors must use instead.

    Raises:
        InvalidParameter: both are given and differ.
    """
    if alias not in given:
        return {}
    value = given.pop(alias)
    if given.setdefault("max_tokens", value) != value:
        raise InvalidParameter(alias, f"{alias} and max_tokens contradict each other: give one of them.")
    return {"max_tokens": alias}


class StreamUsage(NamedTuple):
    """When a stream reports usage: at its end, and in every chunk before."""

    at_end: bool = False
    running: bool = False


def read_stream_usage(given: JsonObject) -> StreamUsage:
    """The usage reports that `stream_options` asks for.

    Raises:
        InvalidParameter: options are given without a stream, or are unknown, unsupported or contradictory.
    """
    options = given.get("stream_options")
    if options is None:
        return StreamUsage()
    if not given.get("stream", False):
        raise InvalidParameter("stream_options", "stream_options is only allowed together with stream: true.")
    read = read_fields(options, STREAM_OPTIONS_FIELDS, NEUTRAL_STREAM_OPTIONS, "stream_options")
    at_end, running = read.get("include_usage", False), read.get("continuous_usage_stats", False)
    if running and not at_end:
        raise InvalidParameter("stream_options.continuous_usage_stats", "needs include_usage: true beside it.")
    return StreamUsage(at_end, running)


def read_options(
    given: JsonObject, defaults: JsonObject, aliases: Mapping[str, str], card: ModelCard, limits: RequestLimits
) -> RequestOptions:
    """The options in `given`, completed with the endpoint's and the model's defaults.

    Errors use the caller's field names (`aliases`).

    Raises:
        InvalidParameter: a value is out of range, or two values contradict each other.
    """
    names = {each.name for each in PARAMETERS}
    try:
        wanted = {name: value for name, value in given.items() if name in names}
        own: JsonObject = dict(card.sampling_defaults) | defaults
        params = SamplingParams(**(own | wanted | temperature_of(given, own.get("temperature", 1.0))))
        _check_lengths(params, card)
        _check_thinking(params, card)
    except InvalidParameter as error:
        raise InvalidParameter(aliases.get(error.param, error.param), error.message, code=error.code) from None
    _check_counts(params, card, limits)
    return RequestOptions(
        params, _priority(given), _label(given, limits), _cache_salt(given, limits), given.get("echo", False)
    )


def _check_lengths(params: SamplingParams, card: ModelCard) -> None:
    for name in ("max_tokens", "min_tokens"):
        value = getattr(params, name) or 0
        if value > card.max_model_len:
            message = f"{value} is more than this model's context of {card.max_model_len} tokens"
            raise InvalidParameter(name, message, code="context_length_exceeded")


def _check_thinking(params: SamplingParams, card: ModelCard) -> None:
    if params.thinking_token_budget is not None and not card.thinks:
        message = "the served model does not think"
        raise InvalidParameter("thinking_token_budget", message, code="unsupported_parameter")


def _check_counts(params: SamplingParams, card: ModelCard, limits: RequestLimits) -> None:
    rules = params.stop_rules()
    if params.n > limits.max_choices:
        raise InvalidParameter("n", f"n may be at most {limits.max_choices}.")
    if len(rules.strings) > limits.max_stop_strings:
        raise InvalidParameter("stop", f"stop may hold at most {limits.max_stop_strings} strings.")
    if any(len(text) > limits.max_stop_string_chars for text in rules.strings):
        raise InvalidParameter("stop", f"A stop string may have at most {limits.max_stop_string_chars} characters.")
    if len(rules.token_ids) > limits.max_stop_token_ids:
        raise InvalidParameter("stop_token_ids", f"stop_token_ids may hold at most {limits.max_stop_token_ids} ids.")
    for index, token in enumerate(rules.token_ids):
        if not 0 <= token < card.vocab_size:
            where = f"stop_token_ids.{index}"
            raise InvalidParameter(where, f"{where} must lie in 0..{card.vocab_size - 1}.")


def _priority(given: JsonObject) -> int:
    priority: int = given.get("priority", 0)
    if abs(priority) > MAX_PRIORITY:
        raise InvalidParameter("priority", f"priority must lie in {-MAX_PRIORITY}..{MAX_PRIORITY}.")
    return priority


def _label(given: JsonObject, limits: RequestLimits) -> str:
    """`user`, or its successor `safety_identifier`: both say on whose behalf the request is made."""
    for name in ("user", "safety_identifier"):
        if len(given.get(name, "")) > limits.max_name_chars:
            raise InvalidParameter(name, f"{name} may have at most {limits.max_name_chars} characters.")
    tenant: str = given.get("user") or given.get("safety_identifier", "")
    return tenant


def _cache_salt(given: JsonObject, limits: RequestLimits) -> str:
    salt: str = given.get("cache_salt", "")
    if len(salt) > limits.max_cache_salt_chars:
        raise InvalidParameter("cache_salt", f"cache_salt may have at most {limits.max_cache_salt_chars} characters.")
    return salt
