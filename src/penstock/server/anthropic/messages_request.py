"""`POST /v1/messages` and `/v1/messages/count_tokens`: their fields, and request parsing.

`system` becomes the first turn, `stop_sequences` become stop strings, and an assistant turn at the end is continued.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.api_fields.certificate import CERTIFICATE
from penstock.api_fields.chat_options import ChatOptions
from penstock.api_fields.do_sample import DO_SAMPLE
from penstock.api_fields.fields import BOOLEAN, INTEGER, OBJECT, TEXT, Field, Kind, Neutrals, read_fields, read_object
from penstock.api_fields.reasoning import Variables, level_variables
from penstock.api_fields.request_options import check_prompt_chars, read_options, sampling_fields, served_name
from penstock.api_fields.strict_json import JsonObject
from penstock.contract.errors import InvalidParameter
from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.contract.request import ChatPrompt, Message
from penstock.server.anthropic.messages_content import (
    BLOCKS,
    CACHE_FIELD,
    TURNS,
    check_cache_control,
    read_text,
    read_turns,
)
from penstock.server.anthropic.messages_tools import MESSAGE_TOOL_FIELDS, THINKING, read_message_tools, read_thinking
from penstock.server.delivery.parsed_request import ParsedRequest

__all__ = [
    "COUNT_FIELDS",
    "MESSAGES_FIELDS",
    "NEUTRAL_COUNT",
    "NEUTRAL_MESSAGES",
    "parse_count",
    "parse_messages",
]

SAMPLING = ("temperature", "top_k", "top_p")

STRINGS = Kind(
    "a list of strings",
    {"type": "array", "items": {"type": "string", "minLength": 1}},
    lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
)
MAX_TOKENS = Kind("an integer", {"type": "integer", "minimum": 1}, INTEGER.accepts, INTEGER.canonical)
METADATA = Kind(
    "an object",
    {"type": "object", "properties": {"user_id": {"type": ["string", "null"]}}, "additionalProperties": False},
    lambda value: isinstance(value, dict),
)
EFFORTS = ("low", "medium", "high", "xhigh", "max")
OUTPUT_CONFIG = Kind(
    "an object",
    {
        "type": "object",
        "properties": {
            "effort": {"enum": [*EFFORTS, None]},
            "format": {
                "anyOf": [
                    {
                        "type": "object",
                        "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
                        "required": ["type", "schema"],
                        "additionalProperties": False,
                    },
                    {"type": "null"},
                ]
            },
        },
        "additionalProperties": False,
    },
    lambda value: isinstance(value, dict),
)

_PROMPT_FIELDS = (
    Field("model", TEXT, "The served model's name; the served model when left out."),
    Field("messages", TURNS, "The conversation; where it ends with an assistant's turn, that is continued."),
    Field("system", BLOCKS, "The system prompt."),
    Field(
        "output_config",
        OUTPUT_CONFIG,
        "format: a JSON schema that the answer follows to the letter. effort: how much the model thinks, where its chat"
        " template has a variable for that.",
    ),
    CACHE_FIELD,
    *MESSAGE_TOOL_FIELDS,
    THINKING,
)
MESSAGES_FIELDS = (
    *_PROMPT_FIELDS,
    Field("max_tokens", MAX_TOKENS, "Most tokens to generate; where the context holds fewer, as many as fit."),
    Field("metadata", METADATA, "user_id: the `enduser.id` of the request's span, and its tenant. Not logged."),
    Field("stop_sequences", STRINGS, "Texts that end the answer."),
    Field("stream", BOOLEAN, "Answer in events."),
    CERTIFICATE,
    *(field for field in sampling_fields() if field.name in (*SAMPLING, DO_SAMPLE.name)),
)
COUNT_FIELDS = _PROMPT_FIELDS
_NEUTRAL_PROMPT: dict[str, tuple[Any, ...]] = {
    "context_management": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "user_profile_id": (),
    "workspace_id": (),
}
NEUTRAL_COUNT: Neutrals = _NEUTRAL_PROMPT
NEUTRAL_MESSAGES: Neutrals = _NEUTRAL_PROMPT | {
    "container": (),
    "diagnostics": (),
    "inference_geo": (),
    "service_tier": ("auto", "standard_only"),
}

_METADATA_FIELDS = (Field("user_id", TEXT, "On whose behalf."),)
_OUTPUT_FIELDS = (
    Field("effort", TEXT, "How much to think."),
    Field("format", OBJECT, "The form of the answer."),
)
_FORMAT_FIELDS = (Field("type", TEXT, "Always json_schema."), Field("schema", OBJECT, "The JSON schema."))


def parse_messages(body: JsonObject, response_id: str, card: ModelCard, limits: RequestLimits) -> ParsedRequest:
    """Parse the body of a `/v1/messages` request.

    Raises:
        RequestError: the request cannot be served; names the field.
    """
    model = served_name(body, card, limits)
    given = read_fields(body, MESSAGES_FIELDS, NEUTRAL_MESSAGES)
    if "max_tokens" not in given:
        raise InvalidParameter("max_tokens", "max_tokens is missing.", code="missing_value")
    chat, form = _conversation(given, card, limits)
    metadata = read_fields(given.get("metadata", {}), _METADATA_FIELDS, {}, "metadata")
    wanted = {name: given[name] for name in ("max_tokens", DO_SAMPLE.name, *SAMPLING) if name in given}
    wanted["max_tokens"] = min(wanted["max_tokens"], card.max_model_len)  # agents ask for 32,000 whatever the model
    wanted |= {"stop": given.get("stop_sequences") or None, "user": metadata.get("user_id", "")}
    wanted["structured_outputs"] = form
    wanted["thinking_token_budget"] = given.get("thinking", {}).get("budget_tokens")
    schema = "output_config.format.schema"
    aliases = {
        "stop": "stop_sequences",
        "user": "metadata.user_id",
        "thinking_token_budget": "thinking.budget_tokens",
    }
    aliases |= {"structured_outputs": schema, "structured_outputs.json": schema}
    options = read_options(
        {name: value for name, value in wanted.items() if value is not None}, {}, aliases, card, limits
    )
    request = chat.applied(options.request(response_id, chat.prompt))
    return ParsedRequest(
        id=response_id,
        requests=(replace(request, certified=given.get("certificate", False)),),
        stream=given.get("stream", False),
        aliases=aliases | chat.offer.aliases,
        model=model,
        user=options.tenant,
    )


def parse_count(body: JsonObject, card: ModelCard, limits: RequestLimits) -> ChatOptions:
    """Parse the body of a `/v1/messages/count_tokens` request into its conversation.

    Raises:
        RequestError: the request cannot be served; names the field.
    """
    served_name(body, card, limits)
    return _conversation(read_fields(body, COUNT_FIELDS, NEUTRAL_COUNT), card, limits)[0]


def _conversation(given: JsonObject, card: ModelCard, limits: RequestLimits) -> tuple[ChatOptions, JsonObject | None]:
    """The conversation, and the `structured_outputs` of its answer (None for free text)."""
    if not card.has_chat_template:
        message = "The served model has no chat template; use /v1/completions."
        raise InvalidParameter("messages", message, code="unsupported_model")
    check_cache_control(given, "")
    turns = read_turns(given.get("messages", []), limits)
    continues = _continues(turns)
    if "system" in given:
        turns.insert(0, Message("system", read_text(given["system"], "system")))
    offer = read_message_tools(given, limits)
    reasoning, variables = read_thinking(given, card)
    level, form = _output(given.get("output_config", {}), card)
    prompt = ChatPrompt(
        tuple(turns),
        tools=offer.tools,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        template_variables=tuple((variables | level).items()),
    )
    check_prompt_chars(prompt.num_chars, "messages", card, limits)
    return ChatOptions.made(prompt, offer, reasoning), form


def _continues(turns: list[Message]) -> bool:
    """Whether the last turn is an assistant's, whose text the answer continues.

    Raises:
        InvalidParameter: the last turn ends with calls, which cannot be continued.
    """
    if turns[-1].tool_calls:
        raise InvalidParameter("messages", "messages: the results of the last message's calls are missing.")
    return turns[-1].role == "assistant"


def _output(config: JsonObject, card: ModelCard) -> tuple[Variables, JsonObject | None]:
    read = read_fields(config, _OUTPUT_FIELDS, {}, "output_config")
    level: Variables = {}
    if "effort" in read:
        if read["effort"] not in EFFORTS:
            message = f"output_config.effort must be one of {', '.join(EFFORTS)}."
            raise InvalidParameter("output_config.effort", message)
        level = level_variables(read["effort"], card, "output_config.effort")
    if "format" not in read:
        return level, None
    form = read_object(read["format"], _FORMAT_FIELDS, "output_config.format", "type", "schema")
    if form["type"] != "json_schema":
        raise InvalidParameter("output_config.format.type", "output_config.format.type must be json_schema.")
    return level, {"json": form["schema"]}
