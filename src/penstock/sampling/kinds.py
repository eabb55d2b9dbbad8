"""The types of sampling parameters: which values they accept, and their JSON schemas.

Decides what counts as a number, an integer, a flag or a list, and rejects everything else with an error that names the
parameter: `True` is not a number, NaN and infinities are not temperatures. Knows no particular parameter.

Invariant: `check` returns the value in its one canonical form (a float, an int, a tuple), so equal requests compare
equal, however the caller wrote them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.contract.errors import InvalidParameter

__all__ = ["Flag", "Integer", "Integers", "Kind", "LoopRule", "Number", "Strings", "TokenBiases", "Word"]


class Kind(Protocol):
    """The type and range of a parameter."""

    def check(self, name: str, value: object) -> Any:
        """`value` in canonical form.

        Raises:
            InvalidParameter: naming `name`, when the type or range is wrong.
        """
        ...

    def schema(self) -> Mapping[str, Any]:
        """The JSON schema of the values that `check` accepts (JSON Schema 2020-12)."""
        ...


@dataclass(frozen=True, slots=True)
class Number:
    """A finite real number in `[low, high]`, or in `(low, high]` when `low` itself is excluded."""

    low: float
    high: float
    excludes_low: bool = False

    def check(self, name: str, value: object) -> float:
        """`value` as a float."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidParameter(name, f"must be a number, got {_shown(value)}")
        # Compared before the conversion: an int beyond the range of floats can be compared, but not converted.
        within = self.low < value <= self.high or (value == self.low and not self.excludes_low)
        if not within or not math.isfinite(value):
            left = "(" if self.excludes_low else "["
            raise InvalidParameter(name, f"must lie in {left}{self.low:g}, {self.high:g}], got {_shown(value)}")
        return float(value) + 0.0  # -0.0 becomes 0.0: they mean the same

    def schema(self) -> Mapping[str, Any]:
        """The bounds, as JSON Schema words them."""
        low = "exclusiveMinimum" if self.excludes_low else "minimum"
        return {"type": "number", low: self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number in `[low, high]`."""

    low: int
    high: int

    def check(self, name: str, value: object) -> int:
        """`value` itself."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidParameter(name, f"must be an integer, got {_shown(value)}")
        if not self.low <= value <= self.high:
            raise InvalidParameter(name, f"must lie in {self.low}..{self.high}, got {_shown(value)}")
        return int(value)

    def schema(self) -> Mapping[str, Any]:
        """The bounds, as JSON Schema words them."""
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    def check(self, name: str, value: object) -> bool:
        """`value` itself."""
        if not isinstance(value, bool):
            raise InvalidParameter(name, f"must be true or false, got {_shown(value)}")
        return value

    def schema(self) -> Mapping[str, Any]:
        """A boolean."""
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Strings:
    """One string or a list of them, each of 1 to `max_chars` characters that can be written as UTF-8."""

    max_items: int
    max_chars: int

    def check(self, name: str, value: object) -> tuple[str, ...]:
        """The strings as a tuple; a single one becomes a tuple of one."""
        items = (value,) if isinstance(value, str) else _items(name, value, "a string or a list of strings")
        if len(items) > self.max_items:
            raise InvalidParameter(name, f"may have at most {self.max_items} strings, got {len(items)}")
        return tuple(self._check_item(name, item) for item in items)

    def _check_item(self, name: str, item: object) -> str:
        if not isinstance(item, str):
            raise InvalidParameter(name, f"must hold strings only, got {_shown(item)}")
        if not item:
            raise InvalidParameter(name, "must not hold an empty string")
        if len(item) > self.max_chars:
            raise InvalidParameter(name, f"may hold strings of at most {self.max_chars} characters, got {len(item)}")
        # JSON can smuggle half a surrogate pair in; no text of ours ever holds one, and encoding it would raise later.
        if any("\ud800" <= character <= "\udfff" for character in item):
            raise InvalidParameter(name, "must hold valid Unicode text, got an unpaired surrogate")
        return item

    def schema(self) -> Mapping[str, Any]:
        """A string or an array of strings."""
        item = {"type": "string", "minLength": 1, "maxLength": self.max_chars}
        return {"anyOf": [item, {"type": "array", "items": item, "maxItems": self.max_items}]}


@dataclass(frozen=True, slots=True)
class Integers:
    """A list of whole numbers, each in `[low, high]`; kept in the order given."""

    max_items: int
    low: int
    high: int

    def check(self, name: str, value: object) -> tuple[int, ...]:
        """The numbers as a tuple."""
        items = _items(name, value, "a list of integers")
        if len(items) > self.max_items:
            raise InvalidParameter(name, f"may have at most {self.max_items} entries, got {len(items)}")
        each = Integer(self.low, self.high)
        return tuple(each.check(name, item) for item in items)

    def schema(self) -> Mapping[str, Any]:
        """An array of integers."""
        return {"type": "array", "items": Integer(self.low, self.high).schema(), "maxItems": self.max_items}


@dataclass(frozen=True, slots=True)
class Word:
    """One of a few words."""

    words: tuple[str, ...]

    def check(self, name: str, value: object) -> str:
        """`value` itself."""
        if not isinstance(value, str) or value not in self.words:
            raise InvalidParameter(name, f"must be {' or '.join(self.words)}")
        return value

    def schema(self) -> Mapping[str, Any]:
        """An enumeration."""
        return {"type": "string", "enum": list(self.words)}


@dataclass(frozen=True, slots=True)
class TokenBiases:
    """A mapping from token ids, as integers or as JSON's strings, to numbers in `[-most, most]`."""

    max_items: int
    most: float

    def check(self, name: str, value: object) -> tuple[tuple[int, float], ...]:
        """(token id, bias) in ascending order, without biases of 0; such pairs are accepted as input too."""
        pairs = list(value.items()) if isinstance(value, Mapping) else _pairs(name, value)
        if len(pairs) > self.max_items:
            raise InvalidParameter(name, f"may have at most {self.max_items} entries, got {len(pairs)}")
        biases = {self._id(name, key): Number(-self.most, self.most).check(name, bias) for key, bias in pairs}
        if len(biases) < len(pairs):
            raise InvalidParameter(name, "names a token id twice")
        return tuple(sorted((token, bias) for token, bias in biases.items() if bias))

    def _id(self, name: str, key: object) -> int:
        if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= _ID_DIGITS:
            return int(key)
        if isinstance(key, str):
            raise InvalidParameter(name, "must have token ids as keys")
        return Integer(0, 2**31 - 1).check(name, key)

    def schema(self) -> Mapping[str, Any]:
        """An object whose keys are written as integers."""
        bias = {"type": "number", "minimum": -self.most, "maximum": self.most}
        names = {"pattern": f"^[0-9]{{1,{_ID_DIGITS}}}$"}
        return {
            "type": "object",
            "propertyNames": names,
            "additionalProperties": bias,
            "maxProperties": self.max_items,
        }


@dataclass(frozen=True, slots=True)
class LoopRule:
    """What counts as a loop: an object of three sizes."""

    max_pattern: int
    max_count: int

    def check(self, name: str, value: object) -> tuple[int, ...]:
        """`(min_pattern_size, max_pattern_size, min_count)`; such a tuple is accepted too, and () means no rule."""
        if isinstance(value, tuple):
            value = dict(zip(_LOOP_SIZES, value, strict=False))
            if not value:
                return ()
        if not isinstance(value, Mapping) or not set(value) <= set(_LOOP_SIZES):
            raise InvalidParameter(name, f"must be an object of {', '.join(_LOOP_SIZES)}")
        for required in _LOOP_SIZES[1:]:
            if required not in value:
                raise InvalidParameter(name, f"lacks {required}")
        longest = Integer(1, self.max_pattern).check(name, value["max_pattern_size"])
        shortest = Integer(1, longest).check(name, value.get("min_pattern_size", 1))
        return shortest, longest, Integer(2, self.max_count).check(name, value["min_count"])

    def schema(self) -> Mapping[str, Any]:
        """An object of three integers."""
        size = Integer(1, self.max_pattern).schema()
        return {
            "type": "object",
            "properties": dict(zip(_LOOP_SIZES, (size, size, Integer(2, self.max_count).schema()), strict=True)),
            "required": list(_LOOP_SIZES[1:]),
            "additionalProperties": False,
        }


_LOOP_SIZES = ("min_pattern_size", "max_pattern_size", "min_count")

_ID_DIGITS = 9  # enough for the ids of any vocabulary


def _pairs(name: str, value: object) -> list[tuple[object, object]]:
    items = _items(name, value, "an object of token ids and numbers")
    for item in items:
        if not isinstance(item, tuple) or len(item) != 2:
            raise InvalidParameter(name, "must be an object of token ids and numbers")
    return [(item[0], item[1]) for item in items]  # type: ignore[index]


def _items(name: str, value: object, wanted: str) -> Sequence[object]:
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        raise InvalidParameter(name, f"must be {wanted}, got {_shown(value)}")
    return value


def _shown(value: object) -> str:
    """`value` for an error message: short, and safe for integers that are too long to print."""
    if isinstance(value, int) and value.bit_length() > 64:
        return "an integer of more than 64 bits"
    if isinstance(value, bool | int | float) or value is None:
        return repr(value)
    return f"a value of type {type(value).__name__}"
