"""Request fields: their names, JSON types and documentation, and the rule that no field is silently ignored.

A body may hold implemented fields (`Field`), and fields that only other servers implement, if their value has no effect
(`Neutrals`). Everything else is refused by name. The OpenAPI document is derived from the same tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.api_fields.strict_json import JsonObject, printable
from penstock.contract.errors import InvalidParameter

__all__ = [
    "BOOLEAN",
    "INTEGER",
    "LABELS",
    "NUMBER",
    "OBJECT",
    "TEXT",
    "TEXTS",
    "TOKEN_IDS",
    "Field",
    "Kind",
    "Neutrals",
    "join_path",
    "one_of",
    "read_fields",
    "read_object",
    "whole_numbers",
]

Neutrals = Mapping[str, tuple[Any, ...]]
"""Field name -> the values without effect. `null` is always one and is not listed."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A JSON type: its name in errors, its JSON schema, a test for its values, and their conversion to one form."""

    name: str
    schema: JsonObject
    accepts: Callable[[Any], bool]
    canonical: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True, slots=True)
class Field:
    """An implemented field. `null` is the same as leaving the field out.

    Attributes:
        hint: whether the field is only a hint: it is accepted and checked, but has no effect on the answer.
    """

    name: str
    kind: Kind
    doc: str
    hint: bool = False


def _is_text_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def whole_numbers(value: Any) -> Any:
    """Convert whole floats such as 5.0 to integers, in lists too: some languages have no integers."""
    if isinstance(value, list):
        return [whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_EXACT else value


def _is_integer(value: Any) -> bool:
    return type(whole_numbers(value)) is int  # not bool: JSON's true is not 1


def _is_labels(value: Any) -> bool:
    if not isinstance(value, dict) or len(value) > MAX_LABELS:
        return False
    return all(
        len(key) <= MAX_LABEL_KEY and isinstance(text, str) and len(text) <= MAX_LABEL_VALUE
        for key, text in value.items()
    )


MAX_EXACT = 2**53  # a larger float may represent several integers
MAX_LABELS, MAX_LABEL_KEY, MAX_LABEL_VALUE = 16, 64, 512  # OpenAI's own limits on `metadata`

TEXT = Kind("a string", {"type": "string"}, lambda value: isinstance(value, str))
INTEGER = Kind("an integer", {"type": "integer"}, _is_integer, whole_numbers)
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
    whole_numbers,
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


def one_of(*words: str) -> Kind:
    """The kind of a field whose value must be one of `words`."""
    schema = {"type": "string", "enum": list(words)}
    return Kind(f"one of {', '.join(words)}", schema, lambda value: isinstance(value, str) and value in words)


def read_fields(body: JsonObject, fields: Sequence[Field], neutrals: Neutrals, path: str = "") -> JsonObject:
    """The implemented fields of `body` that are not null, each of its declared type.

    Raises:
        InvalidParameter: a field is unknown, unsupported at its value, or of the wrong type.
    """
    known = {field.name: field for field in fields}
    given: JsonObject = {}
    for name, value in body.items():
        where = join_path(path, printable(name))
        if name not in known:
            _refuse_unless_neutral(name, value, neutrals, where)
        elif value is not None:
            kind = known[name].kind
            if not kind.accepts(value):
                code = "unsupported_parameter" if known[name].hint else "invalid_type"
                raise InvalidParameter(where, f"{where} must be {kind.name}.", code=code)
            given[name] = kind.canonical(value)
    return given


def read_object(
    value: Any, fields: Sequence[Field], path: str, *required: str, neutrals: Neutrals | None = None
) -> JsonObject:
    """Like `read_fields`, for a nested object that must have the `required` fields.

    Raises:
        InvalidParameter: as for `read_fields`; or the value is not an object, or lacks a required field.
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
    """Whether two JSON values are equal: 0 equals 0.0, but not false."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _literal(value: Any) -> str:
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    return str(value).replace("'", '"') or '""'
