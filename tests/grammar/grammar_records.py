"""Schemas of the kind that people write: records, events, trees, unions, tables; each of a form of its own."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
REAL: Schema = {"type": "number"}
TRUTH: Schema = {"type": "boolean"}


def record(required: dict[str, Schema], optional: dict[str, Schema] | None = None, **more: Any) -> Schema:
    """A closed object."""
    made = {"type": "object", "properties": required | (optional or {}), "required": list(required)}
    return made | {"additionalProperties": False} | more


def listed(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items} | more


def text(**more: Any) -> Schema:
    return TEXT | more


def whole(**more: Any) -> Schema:
    return WHOLE | more


def real(**more: Any) -> Schema:
    return REAL | more


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


def any_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def tagged(tag: str, **fields: Schema) -> Schema:
    return record({"type": {"const": tag}} | fields)


def defined(name: str, schema: Schema, **more: Schema) -> Schema:
    return {"$ref": f"#/$defs/{name}", "$defs": {name: schema} | more}


def to(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


MONEY = record({"amount": real(minimum=0, multipleOf=0.01), "currency": text(pattern="^[A-Z]{3}$")})
POINT = record({"lat": real(minimum=-90, maximum=90), "lon": real(minimum=-180, maximum=180)})

VALUES: list[Schema] = [
    text(format="duration"),
    text(format="hostname"),
    text(format="ipv6"),
    text(format="uri"),
    text(pattern=".*foo"),
    text(pattern="^.*end[.]$"),
    text(pattern="^[a-z]*z$"),
    text(pattern="^(\\+[1-9][0-9]{1,3} )?[0-9]{3}-[0-9]{4}$"),
    text(pattern="^#[0-9a-fA-F]{6}$"),
    text(pattern="^[A-Z][a-z]+( [A-Z][a-z]+){1,3}$"),
    text(pattern="^(?:[01][0-9]|2[0-3]):[0-5][0-9]$"),
    text(pattern="^v[0-9]+\\.[0-9]+\\.[0-9]+(-[a-z]+)?$"),
    text(pattern="^(a|bb|ccc){4}$"),
    text(pattern="^\\S+ \\S+$"),
    text(pattern="^[^ ]{5}$"),
    text(pattern="[0-9]", minLength=4),
    text(pattern="^[ab]+$", minLength=3, maxLength=9),
    text(minLength=1),
    text(minLength=40),
    text(minLength=7, maxLength=7),
    text(maxLength=0),
    whole(maximum=-1),
    whole(exclusiveMinimum=9, exclusiveMaximum=12),
    whole(minimum=1000, maximum=1000000, multipleOf=250),
    real(maximum=-0.5),
    real(multipleOf=0.25),
    one_of("a"),
    one_of("low", "medium", "high"),
    one_of(1, 2, 3, 10, 100),
    one_of(True, False),
    one_of([], {}, [[]], {"a": [1, {"b": None}]}),
    one_of("ä", "日本", "😀", 'quo"te', "back\\slash", "line\nbreak"),
    {"const": None},
    {"const": -12.5},
    {"const": "a longer sentence, with punctuation; and (brackets)."},
    {"type": ["null", "boolean"]},
    {"type": ["string", "number", "null"]},
    {"type": ["object", "array"]},
    {"type": ["integer", "string"], "minimum": 5, "minLength": 2},
    any_of(TEXT, WHOLE, TRUTH, {"type": "null"}),
    any_of(text(format="date"), text(format="ipv4"), text(format="uuid")),
    any_of(text(pattern="^[A-Z]{2}[0-9]{2}$"), {"type": "null"}),
    {"oneOf": [whole(maximum=5), text(pattern="^more$")]},
    {"allOf": [text(minLength=2), text(maxLength=6)]},
    {"allOf": [any_of(WHOLE, TEXT), any_of(TEXT, TRUTH)]},
    {},
    {"title": "anything", "description": "no keyword restricts it", "examples": [1]},
]

ARRAYS: list[Schema] = [
    listed(TEXT),
    listed(WHOLE, minItems=3),
    listed(REAL, minItems=2, maxItems=2),
    listed(TRUTH, maxItems=0),
    listed({}, minItems=1, maxItems=2),
    listed(one_of("x", "y"), minItems=4, maxItems=6),
    listed(text(format="date"), minItems=1),
    listed(listed(REAL, minItems=2, maxItems=2), minItems=2),
    listed(listed(listed(WHOLE))),
    listed(any_of(WHOLE, listed(TEXT)), minItems=1),
    {"type": "array", "prefixItems": [TEXT, WHOLE], "items": False},
    {"type": "array", "prefixItems": [TEXT, WHOLE], "items": TRUTH, "minItems": 3},
    {"type": "array", "prefixItems": [one_of("add", "remove"), text(pattern="^/[a-z]+$"), {}], "items": False},
    {"type": "array", "prefixItems": [{"type": "null"}], "minItems": 1, "maxItems": 3},
    {"type": "array"},
    {"type": "array", "minItems": 2},
]

OBJECTS: list[Schema] = [
    {"type": "object"},
    {"type": "object", "minProperties": 1},
    {"type": "object", "maxProperties": 1},
    {"type": "object", "additionalProperties": WHOLE},
    {"type": "object", "additionalProperties": text(maxLength=3), "minProperties": 1},
    {"type": "object", "patternProperties": {"^x-": TEXT}, "additionalProperties": False},
    {"type": "object", "patternProperties": {"^[a-z]{2}$": REAL, "^[0-9]+$": TRUTH}, "additionalProperties": False},
    {"type": "object", "properties": {"id": WHOLE}, "patternProperties": {"^tag": TEXT}, "required": ["id"]},
    {"type": "object", "properties": {"id": WHOLE, "name": TEXT}},
    {"type": "object", "properties": {"id": WHOLE}, "required": ["id"], "additionalProperties": TRUTH},
    record({}, {"a": WHOLE, "b": TEXT, "c": TRUTH}),
    record({"a": WHOLE, "b": TEXT, "c": TRUTH}, minProperties=2),
    record({"": TEXT, " ": WHOLE, "{}": TRUTH}),
    record({"größe": REAL, "日本語": TEXT, "\\": WHOLE}),
    record({"name": text(minLength=1), "age": whole(minimum=0, maximum=150)}),
    record({"name": TEXT}, {"nickname": any_of(TEXT, {"type": "null"})}),
    record({"a": record({"b": record({"c": record({"d": TEXT})})})}),
    record({"first": TEXT, "last": TEXT, "born": text(format="date"), "email": text(format="email")}),
    record({"id": text(format="uuid"), "created": text(format="date-time"), "active": TRUTH}),
    record({"street": TEXT, "zip": text(pattern="^[0-9]{5}$"), "city": TEXT, "country": one_of("DE", "FR", "IT")}),
    record({"price": MONEY, "discount": any_of(real(minimum=0, maximum=1), {"type": "null"})}),
    record({"from": POINT, "to": POINT, "via": listed(POINT, maxItems=3)}),
    record({"question": TEXT, "answers": listed(TEXT, minItems=4, maxItems=4), "correct": whole(minimum=0, maximum=3)}),
    record({"sentiment": one_of("positive", "negative", "neutral"), "confidence": real(minimum=0, maximum=1)}),
    record({"labels": listed(one_of("bug", "docs", "feature")), "priority": whole(minimum=1, maximum=5)}),
    record({"steps": listed(record({"explanation": TEXT, "output": TEXT})), "final_answer": TEXT}),
    record({"thought": text(minLength=10), "action": one_of("search", "answer"), "input": TEXT}),
    record({"summary": text(minLength=60, maxLength=200), "keywords": listed(text(maxLength=12), minItems=2)}),
    record({"title": TEXT, "year": whole(minimum=1800, maximum=2100), "authors": listed(TEXT, minItems=1)}),
    record({"host": text(format="hostname"), "port": whole(minimum=1, maximum=65535), "tls": TRUTH}),
    record({"ip": any_of(text(format="ipv4"), text(format="ipv6")), "allowed": TRUTH}),
    record(
        {"version": {"const": 2}, "kind": {"const": "report"}, "rows": listed(listed(REAL, minItems=3, maxItems=3))}
    ),
    record({"table": listed(record({"x": WHOLE, "y": WHOLE}, {"label": TEXT}), minItems=2, maxItems=5)}),
    record({"query": TEXT, "filters": {"type": "object", "additionalProperties": any_of(TEXT, WHOLE, TRUTH)}}),
    record({"env": {"type": "object", "additionalProperties": TEXT}, "args": listed(TEXT), "cwd": TEXT}),
    record({"name": TEXT, "arguments": record({"city": TEXT, "unit": one_of("C", "F")})}),
    record({"calls": listed(record({"id": text(pattern="^call_[a-z0-9]{8}$"), "name": TEXT}), minItems=1)}),
    record({"color": text(pattern="^#[0-9a-f]{6}$"), "opacity": real(minimum=0, maximum=1), "z": WHOLE}),
    record({"recipe": TEXT, "minutes": whole(minimum=1), "ingredients": listed(record({"item": TEXT, "grams": REAL}))}),
    record({"matrix": listed(listed(one_of(0, 1), minItems=3, maxItems=3), minItems=3, maxItems=3)}),
    record({"weekday": one_of("Mon", "Tue", "Wed", "Thu", "Fri"), "at": text(pattern="^[0-2][0-9]:[0-5][0-9]$")}),
    record(
        {"invoice": text(pattern="^INV-[0-9]{6}$"), "lines": listed(record({"sku": TEXT, "n": WHOLE, "each": MONEY}))}
    ),
    record({"a": {"allOf": [{"type": "object", "properties": {"x": WHOLE}, "required": ["x"]}, {"type": "object"}]}}),
]

UNIONS: list[Schema] = [
    any_of(tagged("circle", radius=REAL), tagged("square", side=REAL)),
    any_of(tagged("text", text=TEXT), tagged("image", url=text(format="uri"), alt=TEXT), tagged("break")),
    any_of(record({"ok": {"const": True}, "value": {}}), record({"ok": {"const": False}, "error": TEXT})),
    any_of(listed(WHOLE), record({"items": listed(WHOLE)})),
    any_of(record({"a": WHOLE}), record({"a": TEXT}), record({"a": listed(TRUTH)})),
    any_of(record({"long": text(minLength=30)}), record({"short": TRUTH})),
    {"oneOf": [tagged("create", name=TEXT), tagged("delete", id=WHOLE), tagged("list")]},
    {"oneOf": [{"type": "null"}, record({"id": WHOLE, "next": any_of(WHOLE, {"type": "null"})})]},
    record({"event": any_of(tagged("login", user=TEXT), tagged("click", x=WHOLE, y=WHOLE)), "at": text(format="time")}),
    record({"result": any_of({"type": "null"}, MONEY), "log": listed(any_of(TEXT, tagged("warning", message=TEXT)))}),
    listed(any_of(tagged("move", by=WHOLE), tagged("turn", degrees=one_of(90, 180, 270))), minItems=2),
]

RECURSIVE: list[Schema] = [
    defined("tree", record({"v": WHOLE, "kids": listed(to("tree"))})),
    defined("list", any_of({"type": "null"}, record({"head": TEXT, "tail": to("list")}))),
    defined("json", any_of({"type": "null"}, TRUTH, WHOLE, TEXT, listed(to("json")))),
    defined("expr", any_of(REAL, record({"op": one_of("+", "*"), "left": to("expr"), "right": to("expr")}))),
    defined("folder", record({"name": TEXT}, {"folders": listed(to("folder")), "files": listed(TEXT)})),
    defined("even", any_of({"type": "null"}, record({"odd": to("odd")})), odd=record({"even": to("even")})),
    defined("html", any_of(TEXT, record({"tag": one_of("p", "b"), "children": listed(to("html"))}))),
    defined("person", record({"name": TEXT, "parents": listed(to("person"), maxItems=2)})),
    defined("nest", listed(to("nest"))),
    record({"logic": to("logic")}, **{"$defs": {"logic": any_of(TRUTH, record({"not": to("logic")}))}}),
    record(
        {"comment": to("comment")},
        **{"$defs": {"comment": record({"by": TEXT, "text": TEXT}, {"replies": listed(to("comment"))})}},
    ),
    {"definitions": {"id": whole(minimum=1)}, **listed({"$ref": "#/definitions/id"}, minItems=2)},
    {"definitions": {"a": text(maxLength=4)}, **record({"x": {"$ref": "#/definitions/a"}, "y": TEXT})},
]

RECORDS: list[Schema] = [*VALUES, *ARRAYS, *OBJECTS, *UNIONS, *RECURSIVE]
