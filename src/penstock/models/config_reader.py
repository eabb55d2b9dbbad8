"""Reads a model's configuration value by value, and refuses by key and value what cannot be honoured.

Decides what counts as an integer, a number or a boolean, how absent and null values are treated, and both spellings of
rotary parameters. Does not know families: they say which keys they read, within which bounds, and what they default to.
Nothing is allocated here, so absurd sizes cost nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from penstock.contract.errors import ModelFileError
from penstock.nn.rope import FrequencyFactors, LinearScaling, Llama3Scaling, Rope, Scaling, Unscaled

__all__ = ["ConfigReader"]

_Value = TypeVar("_Value")

_ORIGINAL_POSITIONS = "original_max_position_embeddings"

_ROPE_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL_POSITIONS},
    "factors": {"factors"},
}
"""What describes each rope type, beside its name and `rope_theta`. `factors` is Penstock's own, for GGUF files."""

_SMALLEST_FACTOR, _LARGEST_FACTOR = 1e-6, 1e6


class ConfigReader:
    """A mapping of JSON values with checking look-ups. Immutable.

    Absent and null mean the same, "not set": the default holds, and where there is none the key is missing. (Where the
    two differ, `optional_integer` tells them apart.)

    Args:
        config: the mapping.
        file: named in errors.
        section: dotted path of the mapping within the file, for errors.
    """

    def __init__(self, config: Mapping[str, Any], file: str, section: str = "") -> None:
        self._config = config
        self._file = file
        self._section = section

    def error(self, key: str, message: str) -> ModelFileError:
        """The error that refuses `key`, to be raised by the caller."""
        return ModelFileError(self._file, f"{self._section}.{key}" if self._section else key, message)

    def is_set(self, key: str) -> bool:
        """Whether `key` is there and not null."""
        return self._config.get(key) is not None

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in `[low, high]`."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, f"must be an integer, got {value!r}")
        if not low <= value <= high:
            raise self.error(key, f"must lie in {low}..{high}, got {value}")
        return value

    def optional_integer(self, key: str, low: int, high: int, absent: int | None = None) -> int | None:
        """An integer in `[low, high]`; None where the config says null, and `absent` where it says nothing."""
        if key not in self._config:
            return absent
        return self.integer(key, low, high) if self.is_set(key) else None

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number in `[low, high]`."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(key, f"must be a number, got {value!r}")
        if not low <= value <= high:  # also false for NaN
            raise self.error(key, f"must lie in {low:g}..{high:g}, got {value!r}")
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, got {value!r}")
        return value

    def text(self, key: str) -> str:
        """A string."""
        value = self._value(key, None)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, got {value!r}")
        return value

    def expect(self, key: str, allowed: Collection[_Value], default: _Value) -> _Value:
        """One of the `allowed` values, which alone are implemented."""
        value = self._value(key, default)
        for candidate in allowed:
            if type(value) is type(candidate) and value == candidate:
                return candidate
        raise self.error(key, f"{value!r} is not implemented; only {', '.join(repr(one) for one in allowed)}")

    def integers(self, key: str, low: int, high: int) -> tuple[int, ...]:
        """A list of integers in `[low, high]`; empty where the config does not set it."""
        if not self.is_set(key):
            return ()
        values = self._config[key]
        if not isinstance(values, list | tuple):
            raise self.error(key, f"must be a list of integers, got {values!r}")
        items = ConfigReader({str(index): value for index, value in enumerate(values)}, self._file, key)
        return tuple(items.integer(str(index), low, high) for index in range(len(values)))

    def choices(self, key: str, allowed: Collection[str], count: int) -> tuple[str, ...]:
        """A list of `count` of the `allowed` strings; empty where the config does not set it."""
        if not self.is_set(key):
            return ()
        values = self._config[key]
        if not isinstance(values, list | tuple) or len(values) != count:
            raise self.error(key, f"must be a list of {count} strings")
        for value in values:
            if value not in allowed:
                raise self.error(key, f"{value!r} is not implemented; only {', '.join(repr(one) for one in allowed)}")
        return tuple(values)

    def rope(self, head_dim: int, max_positions: int) -> Rope:
        """The rotary embedding, in the old spelling (`rope_theta`, `rope_scaling`) or the new (`rope_parameters`)."""
        self.expect("partial_rotary_factor", [1, 1.0], 1.0)
        sections = [key for key in ("rope_parameters", "rope_scaling") if self._config.get(key) not in (None, {})]
        ropes = [self._rope_section(key, head_dim, max_positions) for key in sections]
        if not ropes:
            return Rope(self._theta())
        if len(ropes) == 2 and ropes[0] != ropes[1]:
            raise self.error("rope_scaling", "contradicts rope_parameters")
        return ropes[0]

    def _value(self, key: str, default: Any) -> Any:
        value = self._config.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        return value

    def _theta(self, default: float = 10000.0) -> float:
        return self.number("rope_theta", 1.0, 1e12, default=default)

    def _rope_section(self, key: str, head_dim: int, max_positions: int) -> Rope:
        section = self._config[key]
        if not isinstance(section, Mapping):
            raise self.error(key, f"must be an object, got {section!r}")
        reader = ConfigReader(section, self._file, key)
        kind = reader._rope_type()
        reader._refuse_unknown(kind)
        original = self.integer(_ORIGINAL_POSITIONS, 1, 1 << 30, default=max_positions)
        if self.is_set(_ORIGINAL_POSITIONS) and section.get(_ORIGINAL_POSITIONS, original) != original:
            raise self.error(_ORIGINAL_POSITIONS, f"{original} contradicts the value in {key}")
        return Rope(reader._theta(self._theta()), reader._scaling(kind, head_dim, original))

    def _rope_type(self) -> str:
        """The rope type; `type` is its older name, and some files carry both."""
        if self.is_set("type") and self.is_set("rope_type") and self._config["type"] != self._config["rope_type"]:
            raise self.error("type", f"{self._config['type']!r} contradicts rope_type {self._config['rope_type']!r}")
        return self.expect("type" if self.is_set("type") else "rope_type", list(_ROPE_KEYS), "default")

    def _refuse_unknown(self, kind: str) -> None:
        self.expect("partial_rotary_factor", [1, 1.0], 1.0)
        known = {"type", "rope_type", "rope_theta", "partial_rotary_factor", *_ROPE_KEYS[kind]}
        for key in self._config:
            if self.is_set(key) and key not in known:
                raise self.error(key, f"is not implemented for rope type {kind!r}")

    def _scaling(self, kind: str, head_dim: int, original_positions: int) -> Scaling:
        if kind == "linear":
            return LinearScaling(self.number("factor", 1.0, _LARGEST_FACTOR))
        if kind == "llama3":
            return self._llama3(original_positions)
        if kind == "factors":
            return FrequencyFactors(self._factors(head_dim // 2))
        return Unscaled()

    def _llama3(self, original_positions: int) -> Llama3Scaling:
        low = self.number("low_freq_factor", _SMALLEST_FACTOR, _LARGEST_FACTOR)
        high = self.number("high_freq_factor", _SMALLEST_FACTOR, _LARGEST_FACTOR)
        if high <= low:
            raise self.error("high_freq_factor", f"must be above low_freq_factor ({low:g}), got {high:g}")
        return Llama3Scaling(
            factor=self.number("factor", 1.0, _LARGEST_FACTOR),
            low_freq_factor=low,
            high_freq_factor=high,
            original_positions=self.integer(_ORIGINAL_POSITIONS, 1, 1 << 30, default=original_positions),
        )

    def _factors(self, count: int) -> tuple[float, ...]:
        factors = self._value("factors", None)
        if not isinstance(factors, list | tuple) or len(factors) != count:
            raise self.error("factors", f"must be a list of {count} numbers, half of head_dim")
        for factor in factors:
            if not isinstance(factor, int | float) or not _SMALLEST_FACTOR <= factor <= _LARGEST_FACTOR:
                raise self.error(
                    "factors", f"must be numbers in {_SMALLEST_FACTOR:g}..{_LARGEST_FACTOR:g}, got {factor!r}"
                )
        return tuple(float(factor) for factor in factors)
