"""The documents of a JSON schema as one automaton over bytes, built without llguidance and without what it judges.

Properties come in their order, at most one space stands where JSON allows space, and only additional names repeat. What
is not built exactly (a schema inside itself several times, large `maxItems`, some bounds) is built wider, never
narrower, so that the shortest text in it (see `grammar_fewest`) is a lower bound, and exact if it is a document.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from functools import partial
from typing import Any

from grammar_automaton import Automaton, Pattern, quoted, unlike
from grammar_digits import Digits
from grammar_formats import FORMATS

Schema = dict[str, Any]

_TYPES = ("null", "boolean", "number", "string", "array", "object")
_UNROLLED = 2
"""How often a definition is built inside itself, and any value inside any value."""


class Documents:
    """The automaton of a schema's documents, from `start` to `end`."""

    def __init__(self, schema: Schema) -> None:
        self.automaton = Automaton()
        self._root = schema
        self.start = self.automaton.state()
        self.end = self._value(self.start, schema, ())

    def accepts(self, text: bytes) -> bool:
        return self.automaton.accepts(self.start, self.end, text)

    def _value(self, at: int, schema: Any, around: tuple[str, ...]) -> int:
        """The state after a value of a schema; `around` names the definitions that it is in."""
        end = self.automaton.state()
        if max((around.count(name) for name in around), default=0) > _UNROLLED:
            for state in (at, end):
                self.automaton.move(state, 0, 255, end)
            return end
        for flat, inside in self._alternatives(schema, around):
            if "const" in flat:
                self.automaton.skip(self._constant(at, flat["const"]), end)
                continue
            for kind in flat["type"]:
                self.automaton.skip(self._of_type(kind)(at, flat, inside), end)
        return end

    def _of_type(self, kind: str) -> Callable[[int, Schema, tuple[str, ...]], int]:
        return getattr(self, f"_{kind}")

    def _alternatives(self, schema: Any, around: tuple[str, ...]) -> list[tuple[Schema, tuple[str, ...]]]:
        """The schema as a union of schemas without unions, intersections and references."""
        if schema is False:
            return []
        if schema is True:
            return [({"type": _TYPES}, (*around, "any"))]
        found, given = [(_flat(schema), around)], schema
        if "$ref" in given:
            inner = self._referred(given["$ref"])
            found = _product(found, self._alternatives(inner, (*around, given["$ref"])))
        for inner in given.get("allOf", ()):
            found = _product(found, self._alternatives(inner, around))
        for keyword in ("anyOf", "oneOf"):
            if keyword in given:
                found = _product(found, [one for inner in given[keyword] for one in self._alternatives(inner, around)])
        for keyword, values in (("enum", given.get("enum")), ("const", [given.get("const")])):
            if keyword in given:
                found = _product(found, [({"const": value, "type": (_type(value),)}, around) for value in values])
        return found

    def _referred(self, reference: str) -> Any:
        schema: Any = self._root
        for name in reference.split("/")[1:]:
            schema = schema[name]
        return schema

    def _gap(self, at: int) -> int:
        """After at most one space."""
        to = self.automaton.state()
        self.automaton.skip(at, to)
        self.automaton.move(at, 0x20, 0x20, to)
        return to

    def _constant(self, at: int, value: Any) -> int:
        match value:
            case dict():
                at = self.automaton.text(at, b"{")
                for number, (name, inner) in enumerate(value.items()):
                    at = self._gap(self.automaton.text(self._gap(at), b",")) if number else self._gap(at)
                    at = self._gap(self.automaton.text(self._gap(self._constant(at, name)), b":"))
                    at = self._constant(at, inner)
                return self.automaton.text(self._gap(at), b"}")
            case list():
                at = self.automaton.text(at, b"[")
                for number, inner in enumerate(value):
                    at = self._gap(self.automaton.text(self._gap(at), b",")) if number else self._gap(at)
                    at = self._constant(at, inner)
                return self.automaton.text(self._gap(at), b"]")
            case str():
                return quoted(self.automaton, at, [Pattern("^" + _literally(value) + "$")])
            case float() if value.is_integer():
                value = int(value)
        return self.automaton.text(at, json.dumps(value).encode())

    def _null(self, at: int, _flat: Schema, _around: tuple[str, ...]) -> int:
        return self.automaton.text(at, b"null")

    def _boolean(self, at: int, _flat: Schema, _around: tuple[str, ...]) -> int:
        end = self.automaton.text(at, b"true")
        self.automaton.skip(self.automaton.text(at, b"false"), end)
        return end

    def _string(self, at: int, flat: Schema, _around: tuple[str, ...]) -> int:
        patterns = [Pattern(one) for one in flat.get("patterns", ())]
        return quoted(self.automaton, at, patterns, flat.get("minLength", 0), flat.get("maxLength"))

    def _integer(self, at: int, flat: Schema, _around: tuple[str, ...]) -> int:
        return self._numbers(at, flat, fractions=False)

    def _number(self, at: int, flat: Schema, _around: tuple[str, ...]) -> int:
        return self._numbers(at, flat, fractions=True)

    def _numbers(self, at: int, flat: Schema, fractions: bool) -> int:
        """The state after a number in the schema's range, built for each sign from a range of absolute values."""
        low, high = flat.get("minimum", (None, False)), flat.get("maximum", (None, False))
        end = self.automaton.state()
        if high[0] is None or high[0] >= 0:
            least = low if low[0] is not None and low[0] > 0 else (Decimal(0), False)
            self._magnitude(at, end, least, high, flat, fractions)
        if low[0] is None or low[0] <= 0:
            least = (-high[0], high[1]) if high[0] is not None and high[0] < 0 else (Decimal(0), False)
            most = (None if low[0] is None else -low[0], low[1])
            self._magnitude(self.automaton.text(at, b"-"), end, least, most, flat, fractions)
        return end

    def _magnitude(self, at: int, end: int, low: Any, high: Any, flat: Schema, fractions: bool) -> None:
        step = flat.get("multipleOf", Decimal("0.1"))
        modulus = int(step) if step == int(step) and not fractions else 1
        powers = fractions and not {"minimum", "maximum"} & flat.keys()
        Digits(self.automaton, end, low, high, modulus, fractions, powers).build(at)

    def _array(self, at: int, flat: Schema, around: tuple[str, ...]) -> int:
        first, items = flat.get("prefixItems", []), flat.get("items", True)
        least, most = flat.get("minItems", 0), flat.get("maxItems")
        loop = max(len(first), least, 1)
        end = self.automaton.state()
        before = [self.automaton.state() for _ in range(loop + 1)]  # after a comma, or at the beginning
        self.automaton.skip(self._gap(self.automaton.text(at, b"[")), before[0])
        for count in range(loop + 1):
            if count == 0 and least == 0:
                self.automaton.skip(self.automaton.text(before[0], b"]"), end)
            if most is not None and count >= most:
                break
            after = self._gap(self._value(before[count], first[count] if count < len(first) else items, around))
            if count + 1 >= least:
                self.automaton.skip(self.automaton.text(after, b"]"), end)
            comma = self._gap(self.automaton.text(after, b","))
            if most is None or count + 1 < most:
                self.automaton.skip(comma, before[min(count + 1, loop)])
        return end

    def _object(self, at: int, flat: Schema, around: tuple[str, ...]) -> int:
        members = list(self._members(flat))
        least, most = flat.get("minProperties", 0), flat.get("maxProperties")
        cap = max(1, least, most or 0)
        end = self.automaton.state()
        # Indexed by the members passed, then by the members written: the state behind the last one and a space.
        places = [[self.automaton.state() for _ in range(cap + 1)] for _ in range(len(members) + 1)]
        self.automaton.skip(self._gap(self.automaton.text(at, b"{")), places[0][0])
        for number, (name, value, further, required) in enumerate(members):
            for count in range(cap + 1):
                if not required:
                    self.automaton.skip(places[number][count], places[number + 1][count])
            for count in range(1, cap + 1):
                entry = self.automaton.state()
                after = self._gap(self.automaton.text(self._gap(name(at=entry)), b":"))
                after = self._gap(self._value(after, value, around))
                self.automaton.skip(after, places[further][count])
                for before in {count - 1, cap if count == cap else count - 1}:
                    if most is not None and before >= most:
                        continue
                    here = places[number][before]
                    self.automaton.skip(self._gap(self.automaton.text(here, b",")) if before else here, entry)
        for count in range(least, cap + 1):
            self.automaton.skip(self.automaton.text(places[-1][count], b"}"), end)
        return end

    def _members(self, flat: Schema) -> Iterator[tuple[Callable[..., int], Any, int, bool]]:
        """Each member: the writer of its name, its schema, the number of the first that may follow, if it must come."""
        properties, required = flat.get("properties", {}), flat.get("required", [])
        patterns, others = flat.get("patternProperties", {}), flat.get("additionalProperties", True)
        taken = dict.fromkeys((*properties, *required))
        for number, name in enumerate(taken):
            write = partial(self._name, name=name)
            yield write, properties.get(name, others), number + 1, name in required
        for pattern, value in patterns.items():  # in any order, any number of times
            yield partial(quoted, self.automaton, patterns=[Pattern(pattern)]), value, len(taken), False
        write = partial(unlike, self.automaton, taken=taken) if taken else partial(quoted, self.automaton)
        yield write, others, len(taken) + len(patterns), False

    def _name(self, at: int, name: str) -> int:
        return self.automaton.text(at, json.dumps(name, ensure_ascii=False).encode())


def _type(value: Any) -> str:
    names = {bool: "boolean", type(None): "null", str: "string", list: "array", dict: "object", int: "integer"}
    return names.get(type(value), "number")


def _literally(text: str) -> str:
    return "".join(f"\\U{ord(character):08x}" for character in text)


def _flat(schema: Schema) -> Schema:
    """What a schema's own keywords say, in one form, without what it says through other schemas."""
    types = schema.get("type", _TYPES)
    flat = {"type": (types,) if isinstance(types, str) else tuple(types)}
    for keyword in ("minimum", "maximum"):
        exclusive = "exclusive" + keyword.capitalize()
        bounds = [(Decimal(str(schema[one])), one == exclusive) for one in (keyword, exclusive) if one in schema]
        if bounds:
            flat[keyword] = _tighter(keyword, *bounds)
    if "multipleOf" in schema:
        flat["multipleOf"] = Decimal(str(schema["multipleOf"]))
    patterns = [schema[one] for one in ("pattern",) if one in schema]
    patterns += [f"^({FORMATS[schema[one]]})$" for one in ("format",) if one in schema]
    same = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "items", "prefixItems")
    same += ("properties", "required", "patternProperties", "additionalProperties")
    return flat | {"patterns": patterns} | {keyword: schema[keyword] for keyword in same if keyword in schema}


def _tighter(keyword: str, *bounds: tuple[Decimal, bool]) -> tuple[Decimal, bool]:
    pick = max if keyword == "minimum" else min
    value = pick(value for value, _ in bounds)
    return value, any(is_open for bound, is_open in bounds if bound == value)


TopLogprobs = list[tuple[Schema, tuple[str, ...]]]


def _product(left: TopLogprobs, right: TopLogprobs) -> TopLogprobs:
    pairs = [(_meet(one, two), max(inside, within, key=len)) for one, inside in left for two, within in right]
    return [(flat, around) for flat, around in pairs if flat["type"]]


def _meet(one: Schema, two: Schema) -> Schema:
    """One schema that says what both say."""
    if "const" in one and "const" in two and json.dumps(one["const"]) != json.dumps(two["const"]):
        return {"type": ()}
    met = one | two | {"type": _common(one["type"], two["type"])}
    met["patterns"] = [*one.get("patterns", ()), *two.get("patterns", ())]
    for keyword in one.keys() & two.keys():
        match keyword:
            case "minimum" | "maximum":
                met[keyword] = _tighter(keyword, one[keyword], two[keyword])
            case "minLength" | "minItems" | "minProperties":
                met[keyword] = max(one[keyword], two[keyword])
            case "maxLength" | "maxItems" | "maxProperties":
                met[keyword] = min(one[keyword], two[keyword])
            case "required":
                met[keyword] = [*dict.fromkeys((*one[keyword], *two[keyword]))]
            case "items" | "additionalProperties":
                met[keyword] = _both(one[keyword], two[keyword])
    return met | _members_of_both(one, two) | _first_of_both(one, two)


def _both(one: Any, two: Any) -> Any:
    return False if one is False or two is False else {"allOf": [part for part in (one, two) if part is not True]}


def _members_of_both(one: Schema, two: Schema) -> Schema:
    names = dict.fromkeys((*one.get("properties", {}), *two.get("properties", {})))
    sides = [(side.get("properties", {}), side.get("additionalProperties", True)) for side in (one, two)]
    return {"properties": {name: _both(*(inner.get(name, others) for inner, others in sides)) for name in names}}


def _first_of_both(one: Schema, two: Schema) -> Schema:
    count = max(len(side.get("prefixItems", ())) for side in (one, two))
    sides = [[*side.get("prefixItems", ()), *[side.get("items", True)] * count] for side in (one, two)]
    return {"prefixItems": [_both(sides[0][at], sides[1][at]) for at in range(count)]}


def _common(one: Sequence[str], two: Sequence[str]) -> tuple[str, ...]:
    whole = ("integer",) if {"integer", "number"} <= {*one, *two} and "integer" not in {*one} & {*two} else ()
    same = tuple(kind for kind in one if kind in two)
    return same if "number" in same else same + whole
