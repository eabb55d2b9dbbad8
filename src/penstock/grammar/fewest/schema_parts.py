"""JSON schemas as parts, expanded on demand, in the order of properties that llguidance follows.

Declared properties come in their order, then pattern properties, then additional ones. At most one space is written
where JSON allows whitespace. Recursion is cut at a fixed depth, because the shortest document needs hardly any.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from penstock.grammar.fewest.expression import Expression, Unreadable
from penstock.grammar.fewest.formats import FORMATS
from penstock.grammar.fewest.lexemes import Lexeme, Quoted, Text, Unlike
from penstock.grammar.fewest.parts import COLON, COMMA, SPACES, Part, Piece, constant, text_of
from penstock.grammar.fewest.schema_facts import Schemas, constants, largest, number_of, smallest, type_of, types

__all__ = ["document_of"]

Schema = dict[str, Any]
Path = tuple[tuple[int, ...], ...]
"""The values that enclose a value, outermost first, each as the ids of the schemas that hold for it."""

_MOST_WAYS = 1000
_NESTED = 1
"""How often a value may be nested in one of the same schemas; the shortest document hardly ever needs that."""
_MOST_REFERENCES = 32
"""Steps through `$ref`, `allOf`, `anyOf` and `oneOf` with no value in between; more count as a circular reference."""


def document_of(schema: Any) -> Part:
    """A document of `schema`, which llguidance must accept.

    Expanding the part raises `Unreadable` if the schema uses something unsupported.
    """
    return _Values(schema).of((schema,))


class _Values:
    """The values of a root schema and its subschemas, each made once."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._made: dict[tuple[Path, tuple[int, ...]], _Value] = {}
        self._expressions: dict[tuple[str, bool], Expression] = {}
        self._strings: dict[Any, Quoted] = {}
        self.text = self.string(frozenset(), 0, None)

    def of(self, schemas: Schemas, path: Path = ()) -> _Value:
        """A value for which all `schemas` hold, which are subschemas of the root; `path` has the enclosing values."""
        key = tuple(id(schema) for schema in schemas if schema is not True)
        if (path, key) not in self._made:
            schemas = schemas if path.count(key) <= _NESTED else (False,)
            self._made[path, key] = _Value(self, schemas, (*path, key))
        return self._made[path, key]

    def expression(self, source: str, anywhere: bool) -> Expression:
        """The expression, made once."""
        key = source, anywhere
        if key not in self._expressions:
            self._expressions[key] = Expression(source, anywhere)
        return self._expressions[key]

    def string(self, patterns: frozenset[tuple[str, bool]], least: int, most: int | None) -> Quoted:
        """A string of `least` to `most` characters that all `patterns` (source, anywhere) match, made once."""
        key = patterns, least, most
        if key not in self._strings:
            conditions = [self.expression(*pattern) for pattern in sorted(patterns)]
            self._strings[key] = Quoted(conditions, least, most)
        return self._strings[key]

    def plain(self, schemas: Schemas, references: int = 0) -> list[Schemas]:
        """The ways in which all `schemas` can hold, with references, `allOf` and unions resolved.

        Each way is a tuple of schemas; only their other keywords are still to be read.
        """
        ways: list[Schemas] = [()]
        for schema in schemas:
            ways = [(*way, *more) for way, more in product(ways, self._plain(schema, references))]
            if len(ways) > _MOST_WAYS:
                raise Unreadable("too many combinations")
        return ways

    def _plain(self, schema: Any, references: int) -> list[Schemas]:
        if isinstance(schema, bool):
            return [()] if schema else []
        if references > _MOST_REFERENCES:
            raise Unreadable("references in a circle")
        inner = [self.plain((one,), references + 1) for one in schema.get("allOf", ())]
        if "$ref" in schema:
            inner.append(self.plain((self._referred(schema["$ref"]),), references + 1))
        unions = [schema[keyword] for keyword in ("anyOf", "oneOf") if keyword in schema]
        inner += [[way for one in union for way in self.plain((one,), references + 1)] for union in unions]
        return [(schema, *(one for way in ways for one in way)) for ways in product(*inner)]

    def _referred(self, reference: str) -> Any:
        if reference != "#" and not reference.startswith("#/"):
            raise Unreadable(reference)
        found = self._root
        for step in reference.removeprefix("#").split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or name not in found:
                raise Unreadable(reference)
            found = found[name]
        return found


class _Value(Part):
    """A value for which all given schemas hold."""

    def __init__(self, values: _Values, schemas: Schemas, path: Path) -> None:
        self._values = values
        self._schemas = schemas
        self._path = path
        self._ways: list[tuple[Piece, ...]] | None = None

    def ways(self) -> list[tuple[Piece, ...]]:
        """See `Part`."""
        if self._ways is None:
            plain = self._values.plain(self._schemas)
            self._ways = [way for schemas in plain for way in self._of(schemas)]
        return self._ways

    def _of(self, schemas: Schemas) -> Iterator[tuple[Piece, ...]]:
        allowed = types(schemas)
        if any("enum" in schema or "const" in schema for schema in schemas):
            for value in constants(schemas):
                if type_of(value) in allowed or (type_of(value) == "integer" and "number" in allowed):
                    yield tuple(constant(value))
            return
        for kind in allowed:
            yield from self._of_type(kind, schemas)

    def _of_type(self, kind: str, schemas: Schemas) -> Iterator[tuple[Piece, ...]]:
        match kind:
            case "null":
                yield (Text(b"null"),)
            case "boolean":
                yield from ((Text(b"true"),), (Text(b"false"),))
            case "number" | "integer":
                yield (number_of(schemas, kind == "integer"),)
            case "string":
                yield (self._string(schemas),)
            case "array":
                yield (Text(b"["), SPACES, _Array(self._values, schemas, self._path).behind(0))
            case "object":
                yield (Text(b"{"), SPACES, _Object(self._values, schemas, self._path).behind(0, 0))
            case _:
                raise Unreadable(kind)

    def _string(self, schemas: Schemas) -> Lexeme:
        formats = [schema["format"] for schema in schemas if "format" in schema]
        if not FORMATS.keys() >= set(formats):
            raise Unreadable(", ".join(formats))
        patterns = {(schema["pattern"], True) for schema in schemas if "pattern" in schema}
        patterns |= {(FORMATS[one], False) for one in formats}
        return self._values.string(frozenset(patterns), largest(schemas, "minLength"), smallest(schemas, "maxLength"))


class _Array:
    """The arrays for which all given schemas hold."""

    def __init__(self, values: _Values, schemas: Schemas, path: Path) -> None:
        self._values = values
        self._schemas = schemas
        self._path = path
        if any(isinstance(schema.get("items"), list) for schema in schemas):
            raise Unreadable("items")
        self.least, self.most = largest(schemas, "minItems"), smallest(schemas, "maxItems")
        first = max((len(schema.get("prefixItems", ())) for schema in schemas), default=0)
        self._cap = max(self.least, first, 1) if self.most is None else self.most
        self._made: dict[int, _Items] = {}

    def behind(self, count: int) -> _Items:
        """What may follow `count` items; always the same after the first `_cap`."""
        count = min(count, self._cap)
        return self._made.setdefault(count, _Items(self, count))

    def item(self, at: int) -> Part:
        """The value of the item at index `at`."""
        firsts = ((schema.get("prefixItems", ()), schema.get("items", True)) for schema in self._schemas)
        return self._values.of(tuple(first[at] if at < len(first) else items for first, items in firsts), self._path)


class _Items(Part):
    """The rest of an array, after some of its items and an optional space."""

    def __init__(self, array: _Array, count: int) -> None:
        self._array = array
        self._count = count

    def ways(self) -> list[tuple[Piece, ...]]:
        """See `Part`."""
        array, count = self._array, self._count
        found: list[tuple[Piece, ...]] = [(Text(b"]"),)] if count >= array.least else []
        if array.most is None or count < array.most:
            comma = COMMA[1:] if count else ()
            found.append((*comma, array.item(count), SPACES, array.behind(count + 1)))
        return found


@dataclass(frozen=True, slots=True)
class _Member:
    """A member that objects may have; `further` is the place of the first member that may follow it."""

    name: Lexeme
    value: Part
    further: int
    required: bool


class _Object:
    """The objects for which all given schemas hold."""

    def __init__(self, values: _Values, schemas: Schemas, path: Path) -> None:
        self._values = values
        self._schemas = schemas
        self._path = path
        self.least, self.most = largest(schemas, "minProperties"), smallest(schemas, "maxProperties")
        self._cap = max(1, self.least, self.most or 0)
        self.members = list(self._members())
        self._made: dict[tuple[int, int], _Members] = {}

    def behind(self, place: int, count: int) -> _Members:
        """What may follow `count` members, where the next one is at `place` or later."""
        key = place, min(count, self._cap)
        return self._made.setdefault(key, _Members(self, *key))

    def _members(self) -> Iterator[_Member]:
        names = dict.fromkeys(name for schema in self._schemas for name in schema.get("properties", ()))
        required = dict.fromkeys(name for schema in self._schemas for name in schema.get("required", ()))
        patterns = dict.fromkeys(one for schema in self._schemas for one in schema.get("patternProperties", ()))
        taken = dict.fromkeys((*names, *required))
        for place, name in enumerate(taken):
            yield _Member(text_of(name), self._value(name), place + 1, name in required)
        expressions = [self._values.expression(pattern, anywhere=True) for pattern in patterns]
        for pattern, expression in zip(patterns, expressions, strict=True):
            name = Quoted([expression, Unlike(taken, ())])
            schemas = (schema.get("patternProperties", {}).get(pattern, True) for schema in self._schemas)
            yield _Member(name, self._values.of(tuple(schemas), self._path), len(taken), required=False)
        other = Quoted([Unlike(taken, expressions)]) if taken or expressions else self._values.text
        rest = tuple(schema.get("additionalProperties", True) for schema in self._schemas)
        if False not in rest:
            yield _Member(other, self._values.of(rest, self._path), len(taken) + len(patterns), required=False)

    def _value(self, name: str) -> Part:
        schemas = (one for schema in self._schemas for one in self._schemas_of(name, schema))
        return self._values.of(tuple(schemas), self._path)

    def _schemas_of(self, name: str, schema: Schema) -> Iterator[Any]:
        """The subschemas that one schema applies to the member `name`."""
        found = [schema["properties"][name]] if name in schema.get("properties", ()) else []
        for pattern, inner in schema.get("patternProperties", {}).items():
            if self._values.expression(pattern, anywhere=True).matches(name):
                found.append(inner)
        yield from found or [schema.get("additionalProperties", True)]


class _Members(Part):
    """The rest of an object, after some of its members and an optional space."""

    def __init__(self, owner: _Object, place: int, count: int) -> None:
        self._owner = owner
        self._place = place
        self._count = count

    def ways(self) -> list[tuple[Piece, ...]]:
        """See `Part`."""
        owner, count, found = self._owner, self._count, list[tuple[Piece, ...]]()
        for place in range(self._place, len(owner.members)):
            member = owner.members[place]
            if owner.most is None or count < owner.most:
                rest = owner.behind(member.further, count + 1)
                comma = COMMA[1:] if count else ()
                found.append((*comma, member.name, *COLON, member.value, SPACES, rest))
            if member.required:
                return found
        return [*found, (Text(b"}"),)] if count >= owner.least else found
