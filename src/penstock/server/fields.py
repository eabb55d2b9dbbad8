"""Request fields: their names, JSON types and documentation, and the law that none is silently ignored.

Decides which fields a body may hold: those that are implemented (`Field`), and those that other servers know and this
one does not (`NEUTRAL_*`), which are accepted only at values that ask for nothing. Everything else is refused by name.
The OpenAPI document is derived from the same tables. Knows neither limits nor what the fields mean together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.contract.errors import InvalidParameter
from penstock.server.strict_json import JsonObject, printable

__all__ = [
    "BOOLEAN",
    "INTEGER",
    "LABELS",
    "NEUTRAL_CHAT",
    "NEUTRAL_COMPLETION",
    "NEUTRAL_EMBEDDINGS",
    "NEUTRAL_GENERATE",
    "NEUTRAL_MESSAGE",
    "NEUTRAL_PART",
    "NEUTRAL_STREAM_OPTIONS",
    "NUMBER",
    "OBJECT",
    "TEXT",
    "TEXTS",
    "TOKEN_IDS",
    "Field",
    "Kind",
    "Neutrals",
    "join_path",
    "read_fields",
    "read_object",
]

Neutrals = Mapping[str, tuple[Any, ...]]
"""Field name -> the values that ask for nothing. `null` is always one and is not listed."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A JSON type: how it is called, how OpenAPI writes it, and what belongs to it."""

    name: str
    schema: JsonObject
    accepts: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Field:
    """A field that is implemented. `null` means the default, as if it were absent."""

    name: str
    kind: Kind
    doc: str


def _is_text_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_integer(value: Any) -> bool:
    return type(value) is int  # a JSON true is no 1


def _is_labels(value: Any) -> bool:
    if not isinstance(value, dict) or len(value) > MAX_LABELS:
        return False
    return all(
        len(key) <= MAX_LABEL_KEY and isinstance(text, str) and len(text) <= MAX_LABEL_VALUE
        for key, text in value.items()
    )


MAX_LABELS, MAX_LABEL_KEY, MAX_LABEL_VALUE = 16, 64, 512  # OpenAI's own limits of `metadata`

TEXT = Kind("a string", {"type": "string"}, lambda value: isinstance(value, str))
INTEGER = Kind("an integer", {"type": "integer"}, _is_integer)
NUMBER = Kind("a number", {"type": "number"}, lambda value: type(value) in (int, float))
BOOLEAN = Kind("a boolean", {"type": "boolean"}, lambda value: isinstance(value, bool))
OBJECT = Kind("an object", {"type": "object"}, lambda value: isinstance(value, dict))
TEXTS = Kind(
    "a string or a list of strings",
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    lambda value: isinstance(value, str) or _is_text_list(value),
)
TOKEN_IDS = Kind(
    "a list of integers",
    {"type": "array", "items": {"type": "integer", "minimum": 0}},
    lambda value: isinstance(value, list) and all(map(_is_integer, value)),
)
LABELS = Kind(
    f"an object of at most {MAX_LABELS} strings, keys of up to {MAX_LABEL_KEY} characters, values of {MAX_LABEL_VALUE}",
    {
        "type": "object",
        "maxProperties": MAX_LABELS,
        "propertyNames": {"maxLength": MAX_LABEL_KEY},
        "additionalProperties": {"type": "string", "maxLength": MAX_LABEL_VALUE},
    },
    _is_labels,
)

_NEUTRAL_COMMON: dict[str, tuple[Any, ...]] = {
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

NEUTRAL_CHAT: Neutrals = _NEUTRAL_COMMON | {
    "add_special_tokens": (False,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),  # with no functions there is none to call
    "functions": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
    "return_prompt_text": (False,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}

NEUTRAL_COMPLETION: Neutrals = _NEUTRAL_COMMON | {
    "add_special_tokens": (True,),
    "prompt_embeds": (),
    "suffix": ("",),
}

NEUTRAL_EMBEDDINGS: Neutrals = {
    "add_generation_prompt": (False,),
    "add_special_tokens": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "embed_dtype": ("float32",),
    "endianness": ("little",),
    "media_io_kwargs": ({},),
    "messages": (),
    "mm_processor_kwargs": ({},),
    "request_id": (),
    "truncation_side": ("right",),
}

NEUTRAL_GENERATE: Neutrals = _NEUTRAL_COMMON | {
    "logprobs": (),
    "logprobs_mode": (),
    "n": (1,),
    "response_format": ({"type": "text"},),
    "stream_options": (),
}

NEUTRAL_STREAM_OPTIONS: Neutrals = {"continuous_usage_stats": (False,), "include_obfuscation": (False,)}

NEUTRAL_MESSAGE: Neutrals = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
}

NEUTRAL_PART: Neutrals = {"cache_control": (), "prompt_cache_breakpoint": ()}


def read_fields(body: JsonObject, fields: Sequence[Field], neutrals: Neutrals, path: str = "") -> JsonObject:
    """The implemented fields of `body` that are not null, each of its kind.

    Raises:
        InvalidParameter: a field is unknown, is not supported at the value it has, or has the wrong type.
    """
    kinds = {field.name: field.kind for field in fields}
    given: JsonObject = {}
    for name, value in body.items():
        where = join_path(path, printable(name))
        if name not in kinds:
            _refuse_unless_neutral(name, value, neutrals, where)
        elif value is not None:
            if not kinds[name].accepts(value):
                raise InvalidParameter(where, f"{where} must be {kinds[name].name}.", code="invalid_type")
            given[name] = value
    return given


def read_object(
    value: Any, fields: Sequence[Field], path: str, *required: str, neutrals: Neutrals | None = None
) -> JsonObject:
    """`read_fields` of a nested object, in which the `required` fields must be.

    Raises:
        InvalidParameter: as `read_fields`; or it is no object, or lacks a field.
    """
    if not isinstance(value, dict):
        raise InvalidParameter(path, f"{path} must be an object.", code="invalid_type")
    given = read_fields(value, fields, neutrals or {}, path)
    for name in required:
        if name not in given:
            where = join_path(path, name)
            raise InvalidParameter(where, f"{where} is missing.", code="missing_value")
    return given


def join_path(path: str, name: str | int) -> str:
    """A dotted path to a field, such as `messages.0.content`."""
    return f"{path}.{name}" if path else str(name)


def _refuse_unless_neutral(name: str, value: Any, neutrals: Neutrals, where: str) -> None:
    if name not in neutrals:
        raise InvalidParameter(where, f"Unknown parameter: {where!r}.", code="unknown_parameter")
    if value is None or any(_same(value, neutral) for neutral in neutrals[name]):
        return
    allowed = " or ".join(map(_literal, (*neutrals[name], None)))
    message = f"{where!r} is not supported by this server; leave it out (or send {allowed})."
    raise InvalidParameter(where, message, code="unsupported_parameter")


def _same(value: Any, neutral: Any) -> bool:
    """Equality of JSON values: 0 is 0.0, but false is not 0."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _literal(value: Any) -> str:
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value).replace("'", '"')
