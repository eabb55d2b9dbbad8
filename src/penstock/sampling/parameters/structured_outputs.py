"""`structured_outputs`: the schema, expression, choices or grammar that the answer must match."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.contract.errors import InvalidParameter
from penstock.contract.grammar import JSON_OBJECT, Grammar, GrammarKind
from penstock.contract.limits import DEFAULT_LIMITS
from penstock.sampling.parameter import Home, Parameter

__all__ = ["PARAMETER"]

_WAYS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, slots=True)
class _Form:
    """An object with exactly one of `_WAYS` to specify the form, or a `Grammar`; the canonical form is a `Grammar`."""

    max_chars: int
    max_choices: int

    def check(self, name: str, value: object) -> Grammar | None:
        """The grammar; None where `json_object` is false."""
        if isinstance(value, Grammar):
            return self._bounded(name, value)
        if not isinstance(value, Mapping):
            raise InvalidParameter(name, "must be an object", code="invalid_type")
        for key in value:
            if key not in _WAYS and value[key] is not None:
                raise InvalidParameter(f"{name}.{key}", "is not supported", code="unsupported_parameter")
        given = {key: value[key] for key in _WAYS if value.get(key) is not None}
        if len(given) != 1:
            raise InvalidParameter(name, f"must have exactly one of {', '.join(_WAYS)}")
        ((way, form),) = given.items()
        grammar = self._read(f"{name}.{way}", way, form)
        return grammar and self._bounded(f"{name}.{way}", grammar)

    def schema(self) -> Mapping[str, Any]:
        """An object with exactly one of `_WAYS`."""
        text = {"type": "string", "maxLength": self.max_chars}
        choices = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": self.max_choices}
        ways = {
            "json": {"anyOf": [{"type": "object"}, text]},
            "regex": text,
            "choice": choices,
            "grammar": text,
            "json_object": {"type": "boolean"},
        }
        return {
            "type": "object",
            "properties": ways,
            "minProperties": 1,
            "maxProperties": 1,
            "additionalProperties": False,
        }

    def _read(self, name: str, way: str, form: object) -> Grammar | None:
        match way, form:
            case "json_object", bool():
                return JSON_OBJECT if form else None
            case "json", str():
                return Grammar(GrammarKind.JSON, form)
            case "json", Mapping():
                return Grammar(GrammarKind.JSON, _json(name, form))
            case "choice", list() | tuple() if form and all(isinstance(text, str) and text for text in form):
                if len(form) > self.max_choices:
                    raise InvalidParameter(name, f"may have at most {self.max_choices} entries, got {len(form)}")
                return Grammar(GrammarKind.CHOICE, _json(name, list(form)))
            case (("regex" | "grammar"), str()) if form:
                return Grammar(GrammarKind(way), form)
        wanted = {
            "json": "a JSON schema",
            "json_object": "a boolean",
            "choice": "a list of strings, none of them empty, at least one",
        }
        raise InvalidParameter(name, f"must be {wanted.get(way, 'a string, not empty')}", code="invalid_type")

    def _bounded(self, name: str, grammar: Grammar) -> Grammar:
        if len(grammar.source) > self.max_chars:
            message = f"may have at most {self.max_chars} characters, got {len(grammar.source)}"
            raise InvalidParameter(name, message)
        if any("\ud800" <= character <= "\udfff" for character in grammar.source):
            raise InvalidParameter(name, "must hold valid Unicode text, got an unpaired surrogate")
        return grammar


def _json(name: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParameter(name, f"is not JSON: {error}") from error


PARAMETER = Parameter(
    name="structured_outputs",
    kind=_Form(DEFAULT_LIMITS.max_grammar_chars, DEFAULT_LIMITS.max_grammar_choices),
    default=None,
    neutral=None,
    nullable=True,
    home=Home.REQUEST,
    field="grammar",
    doc="Constrain the form of the answer: an object with exactly one of json (a JSON schema), regex, choice (a list"
    " of strings), grammar (Lark or GBNF) and json_object (true).",
)
