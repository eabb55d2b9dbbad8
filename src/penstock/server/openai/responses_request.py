"""`POST /v1/responses`: its fields, request parsing, and the fields that the response repeats.

The conversation consists of the instructions, the previous response's conversation (without its instructions, as at
OpenAI), and the input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.api_fields.certificate import CERTIFICATE
from penstock.api_fields.chat_options import ChatOptions
from penstock.api_fields.do_sample import DO_SAMPLE
from penstock.api_fields.fields import (
    BOOLEAN,
    INTEGER,
    LABELS,
    OBJECT,
    TEXT,
    Field,
    Kind,
    Neutrals,
    one_of,
    read_fields,
)
from penstock.api_fields.reasoning import EFFORT, Variables, effort_variables
from penstock.api_fields.request_options import (
    HINTS,
    SAFETY_IDENTIFIER,
    USER,
    check_prompt_chars,
    read_options,
    sampling_fields,
    served_name,
)
from penstock.api_fields.strict_json import JsonObject, printable
from penstock.contract.errors import InvalidParameter
from penstock.contract.limits import DEFAULT_LIMITS, RequestLimits
from penstock.contract.model import ModelCard
from penstock.contract.request import ChatPrompt, Message
from penstock.contract.tools import ReasoningUse
from penstock.server.delivery.parsed_request import ParsedRequest
from penstock.server.openai.responses_items import INPUT, read_items
from penstock.server.openai.responses_tools import RESPONSE_TOOL_FIELDS, read_response_tools, repeated_tools

__all__ = [
    "COMPACT_FIELDS",
    "COUNT_INPUT_FIELDS",
    "NEUTRAL_COMPACT",
    "NEUTRAL_COUNT_INPUT",
    "NEUTRAL_RESPONSES",
    "RESPONSES_FIELDS",
    "ResponseRequest",
    "check_included",
    "parse_response",
]

SAMPLING = ("temperature", "top_p")
FORMATS = ("text", "json_object", "json_schema")
PLAIN_FORMAT = {"type": "text"}
ALIASES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "logprobs": "top_logprobs",
    "structured_outputs": "text.format",
    "structured_outputs.json": "text.format.schema",
}
"""The names that errors must use here; the engine uses the field names of chat completions."""

_TEXT_FIELDS = (
    Field("format", OBJECT, "The form of the answer."),
    Field("verbosity", one_of("low", "medium", "high"), "How long the answer is to be.", hint=True),
)
_FORMAT_FIELDS = (
    Field("type", TEXT, "text, json_object or json_schema."),
    Field("name", TEXT, "What the schema is called; not used."),
    Field("description", TEXT, "What it is for; not shown to the model."),
    Field("schema", OBJECT, "The JSON schema."),
    Field("strict", BOOLEAN, "Either way the schema is followed to the letter."),
)
_REASONING_FIELDS = (Field("effort", EFFORT, "How much the model thinks."),)
_NEUTRAL_REASONING: Neutrals = {"context": ("auto",), "mode": ("standard",)}
SUMMARIES = ("auto", "concise", "detailed")
_NEUTRAL_SUMMARIES: Neutrals = {"generate_summary": SUMMARIES, "summary": SUMMARIES}
"""For a model that does not think: there is nothing to summarise."""
_NO_SUMMARIES: Neutrals = {"generate_summary": ("auto",), "summary": ("auto",)}
"""For a model that thinks: its reasoning is returned in full."""

REASONING = Kind(
    "an object",
    {"type": "object", "properties": {"effort": {"anyOf": [EFFORT.schema, {"type": "null"}]}}},
    lambda value: isinstance(value, dict),
)
FORM = Kind(
    "an object",
    {
        "type": "object",
        "properties": {
            "format": {
                "type": ["object", "null"],
                "properties": {
                    "type": {"enum": list(FORMATS)},
                    "name": {"type": "string"},
                    "description": {"type": ["string", "null"]},
                    "schema": {"type": "object"},
                    "strict": {"type": ["boolean", "null"]},
                },
                "required": ["type"],
                "additionalProperties": False,
            }
        },
    },
    lambda value: isinstance(value, dict),
)
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
INCLUDES = Kind(
    "a list of strings",
    {"type": "array", "items": {"enum": [LOGPROBS, ENCRYPTED]}},
    lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
)
TOP_LOGPROBS = Kind(
    "an integer",
    {"type": "integer", "minimum": 0, "maximum": DEFAULT_LIMITS.max_logprobs},
    INTEGER.accepts,
    INTEGER.canonical,
)
RESPONSES_FIELDS = (
    Field("model", TEXT, "The served model's name; the served model when left out."),
    Field("input", INPUT, "What is said: text, or items: messages, calls, their results, reasoning."),
    Field("instructions", TEXT, "The system prompt of this response; not carried over to the next."),
    Field("previous_response_id", TEXT, "The response whose conversation this one continues."),
    Field("max_output_tokens", INTEGER, "Most tokens to generate; by default the rest of the model's context."),
    Field("stream", BOOLEAN, "Answer in events."),
    Field("background", BOOLEAN, "Answer at once and go on generating; needs store, and excludes stream."),
    Field(
        "store",
        BOOLEAN,
        "Keep the response while there is room: in memory, with --journal on disk too; the default.",
    ),
    *RESPONSE_TOOL_FIELDS,
    Field(
        "reasoning",
        REASONING,
        "effort: how much the model thinks, where its chat template has a variable for that: a level, or a switch,"
        " which knows none and the rest.",
    ),
    Field("text", FORM, "format: the form of the answer: text, json_object, or json_schema, followed to the letter."),
    Field(
        "include",
        INCLUDES,
        "message.output_text.logprobs: the log probability of each token of the message. reasoning.encrypted_content"
        " changes nothing: reasoning is returned as it is, and taken back so. What else OpenAI can include is of tools"
        " that it runs itself.",
    ),
    Field("top_logprobs", TOP_LOGPROBS, "How many top tokens to return at each position; needs include."),
    Field(
        "metadata", LABELS, "Labels of the caller's own, repeated in the response; attributes of the request's span."
    ),
    USER,
    SAFETY_IDENTIFIER,
    CERTIFICATE,
    *HINTS,
    *(field for field in sampling_fields() if field.name in (*SAMPLING, DO_SAMPLE.name)),
)
NEUTRAL_RESPONSES: Neutrals = {
    "access_programs": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
    "stream_options": ({}, {"include_obfuscation": False}),
    "truncation": ("disabled",),
}


COUNTED = (
    "model",
    "input",
    "instructions",
    "previous_response_id",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning",
    "text",
)
COUNT_INPUT_FIELDS = tuple(field for field in RESPONSES_FIELDS if field.name in COUNTED)
"""Fields of `/v1/responses/input_tokens`."""
NEUTRAL_COUNT_INPUT: Neutrals = {"conversation": (), "personality": (), "truncation": ("disabled",)}
COMPACT_FIELDS = tuple(
    field
    for field in RESPONSES_FIELDS
    if field.name in ("model", "input", "instructions", "previous_response_id", "prompt_cache_key", "service_tier")
)
"""Fields of `/v1/responses/compact`."""
NEUTRAL_COMPACT: Neutrals = {"prompt_cache_options": (), "prompt_cache_retention": ("in_memory",)}


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A parsed request.

    Attributes:
        history: the conversation without the instructions.
        repeated: the request's fields that the response object repeats.
        logprobs: whether messages include the log probabilities of their tokens.
        recalled: how many messages of the conversation come from the previous response.
    """

    parsed: ParsedRequest
    history: tuple[Message, ...]
    repeated: JsonObject
    background: bool
    store: bool
    logprobs: bool = False
    recalled: int = 0


def parse_response(
    body: JsonObject,
    response_id: str,
    card: ModelCard,
    limits: RequestLimits,
    recall: Callable[[str], tuple[Message, ...]],
) -> ResponseRequest:
    """Parse the request body.

    Args:
        body: the request's body.
        response_id: the response's id.
        card: the served model.
        limits: limits on requests.
        recall: returns the conversation of an earlier response, by id.

    Raises:
        RequestError: the request cannot be served; names the field.
    """
    model = served_name(body, card, limits)
    given = read_fields(body, RESPONSES_FIELDS, NEUTRAL_RESPONSES)
    if not card.has_chat_template:
        raise InvalidParameter("input", "The served model has no chat template.", code="unsupported_model")
    background, store, stream = _way_of_answering(given)
    wanted = {name: given[name] for name in (*SAMPLING, DO_SAMPLE.name, "user", "safety_identifier") if name in given}
    if "max_output_tokens" in given:
        wanted["max_tokens"] = given["max_output_tokens"]
    wanted |= _logprobs(given)
    form = _format(given)
    wanted |= _structured(form)
    options = read_options(wanted, {"max_tokens": None}, ALIASES, card, limits)
    recalled = recall(given["previous_response_id"]) if "previous_response_id" in given else ()
    history = _history(given, recalled, limits)
    effort, variables = _effort(given, card)
    chat = _chat(given, history, variables, card, limits)
    request = chat.applied(options.request(response_id, chat.prompt))
    parsed = ParsedRequest(
        response_id,
        (replace(request, certified=given.get("certificate", False)),),
        stream=stream,
        aliases=ALIASES | chat.offer.aliases,
        model=model,
        user=options.tenant,
        metadata=given.get("metadata", {}),
    )
    repeated = _repeated(given) | {name: getattr(options.params, name) for name in SAMPLING}
    repeated |= {"reasoning": {"effort": effort, "summary": None}, "text": {"format": form}}
    return ResponseRequest(parsed, history, repeated, background, store, "logprobs" in wanted, len(recalled))


def _way_of_answering(given: JsonObject) -> tuple[bool, bool, bool]:
    """Read `background`, `store` and `stream`, and check that they go together."""
    background, store, stream = (
        given.get(name, default) for name, default in (("background", False), ("store", True), ("stream", False))
    )
    if background and (stream or not store):
        message = "background needs store, and does not go together with stream."
        raise InvalidParameter("background", message, code="unsupported_parameter")
    return background, store, stream


def _repeated(given: JsonObject) -> JsonObject:
    names = ("instructions", "max_output_tokens", "previous_response_id", "safety_identifier", "user")
    same = {name: given.get(name) for name in names}
    own = {"metadata": given.get("metadata", {}), "top_logprobs": given.get("top_logprobs", 0)}
    return same | own | repeated_tools(given)


def _logprobs(given: JsonObject) -> JsonObject:
    """The `logprobs` parameter (how many alternatives to each token); {} if log probabilities are not requested."""
    included, top = given.get("include", []), given.get("top_logprobs", 0)
    check_included(included)
    if LOGPROBS in included:
        return {"logprobs": top}
    if top:
        raise InvalidParameter("top_logprobs", f"top_logprobs is only allowed together with include: [{LOGPROBS!r}].")
    return {}


def check_included(names: Sequence[str]) -> None:
    """Check the names in `include`.

    Raises:
        InvalidParameter: a name is not supported here.
    """
    for name in names:
        if name not in (LOGPROBS, ENCRYPTED):
            message = f"include: {printable(name)!r} is not supported here; there are {LOGPROBS} and {ENCRYPTED}."
            raise InvalidParameter("include", message, code="unsupported_parameter")


def _history(given: JsonObject, recalled: tuple[Message, ...], limits: RequestLimits) -> tuple[Message, ...]:
    value = given.get("input")
    if value is None or value == []:
        raise InvalidParameter("input", "input is missing.", code="missing_value")
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    return read_items(value, recalled, limits)


def _chat(
    given: JsonObject, history: tuple[Message, ...], variables: Variables, card: ModelCard, limits: RequestLimits
) -> ChatOptions:
    instructions = given.get("instructions")
    turns = history if instructions is None else (Message("system", instructions), *history)
    offer = read_response_tools(given, limits)
    prompt = ChatPrompt(turns, tools=offer.tools, template_variables=tuple(variables.items()))
    check_prompt_chars(prompt.num_chars, "input", card, limits)
    return ChatOptions.made(prompt, offer, ReasoningUse.SPLIT)


def _effort(given: JsonObject, card: ModelCard) -> tuple[str | None, Variables]:
    """The effort, and the template variables that it sets."""
    neutrals = {**_NEUTRAL_REASONING, **(_NO_SUMMARIES if card.thinks else _NEUTRAL_SUMMARIES)}
    rules = read_fields(given.get("reasoning", {}), _REASONING_FIELDS, neutrals, "reasoning")
    if "effort" not in rules:
        return None, {}
    return rules["effort"], effort_variables(rules["effort"], card, "reasoning.effort")


def _format(given: JsonObject) -> JsonObject:
    """`text.format`, checked; plain text by default."""
    text = read_fields(given.get("text", {}), _TEXT_FIELDS, {}, "text")
    form = read_fields(text.get("format", PLAIN_FORMAT), _FORMAT_FIELDS, {}, "text.format")
    if form.get("type") not in FORMATS:
        raise InvalidParameter("text.format.type", f"text.format.type must be one of {', '.join(FORMATS)}.")
    is_schema = form["type"] == "json_schema"
    for name in ("name", "schema"):
        if (name in form) != is_schema:
            message = f"text.format.{name} belongs to the type json_schema, and must be given there."
            raise InvalidParameter(f"text.format.{name}", message, code="missing_value")
    return form


def _structured(form: JsonObject) -> JsonObject:
    """The form as the sampling parameter `structured_outputs`; {} for free text."""
    match form["type"]:
        case "json_schema":
            return {"structured_outputs": {"json": form["schema"]}}
        case "json_object":
            return {"structured_outputs": {"json_object": True}}
    return {}
