"""Reads a model's configuration value by value; refuses unsupported values, naming key and value.

Decides what counts as an integer, a number or a boolean, and how absent and null values are treated. Does not know
families: they say which keys they read, within which bounds, and with which defaults. Allocates nothing, so absurd
sizes do no harm.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from penstock.contract.errors import ModelFileError

__all__ = ["LAYER_TYPES", "MAX_POSITIONS", "ConfigReader"]

_Value = TypeVar("_Value")

MAX_POSITIONS = 1 << 21
"""More positions than any published model has."""

LAYER_TYPES = ("full_attention", "sliding_attention")
"""The possible values in `layer_types`."""


class ConfigReader:
    """A mapping of JSON values with checked look-ups. Immutable.

    Absent and null both mean "not set": the default applies, or it is an error if there is none. (Where the two differ,
    `optional_integer` and `optional_number` distinguish them.)

    Args:
        config: the mapping.
        file: named in errors.
        path: dotted path of the mapping within the file, for errors.
        max_model_len: the longest sequence that will be served; None for the model's own limit. It selects the factors
            of a rotary embedding that has one set for short contexts and one for long ones.
    """

    def __init__(self, config: Mapping[str, Any], file: str, path: str = "", max_model_len: int | None = None) -> None:
        self._config = config
        self._file = file
        self.path = path
        self.max_model_len = max_model_len

    def error(self, key: str, message: str) -> ModelFileError:
        """The error that refuses `key`, for the caller to raise."""
        return ModelFileError(self._file, f"{self.path}.{key}" if self.path else key, message)

    def is_set(self, key: str) -> bool:
        """Whether `key` is present and not null."""
        return self._config.get(key) is not None

    def value(self, key: str, default: Any = None) -> Any:
        """The value of `key` unchecked, or the default; raises ModelFileError if there is neither."""
        value = self._config.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        return value

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in `[low, high]`."""
        value = self.value(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, f"must be an integer, got {value!r}")
        if not low <= value <= high:
            raise self.error(key, f"must lie in {low}..{high}, got {value}")
        return value

    def optional_integer(self, key: str, low: int, high: int, absent: int | None = None) -> int | None:
        """An integer in `[low, high]`; None if the value is null, `absent` if the key is absent."""
        if key not in self._config:
            return absent
        return self.integer(key, low, high) if self.is_set(key) else None

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number in `[low, high]`."""
        value = self.value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(key, f"must be a number, got {value!r}")
        if not low <= value <= high:  # also false for NaN
            raise self.error(key, f"must lie in {low:g}..{high:g}, got {value!r}")
        return float(value)

    def optional_number(self, key: str, low: float, high: float, absent: float | None = None) -> float | None:
        """A number in `[low, high]`; None if the value is null, `absent` if the key is absent."""
        if key not in self._config:
            return absent
        return self.number(key, low, high) if self.is_set(key) else None

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self.value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, got {value!r}")
        return value

    def text(self, key: str) -> str:
        """A string."""
        value = self.value(key, None)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, got {value!r}")
        return value

    def expect(self, key: str, allowed: Collection[_Value], default: _Value) -> _Value:
        """One of the `allowed` values; no others are implemented."""
        value = self.value(key, default)
        for candidate in allowed:
            if type(value) is type(candidate) and value == candidate:
                return candidate
        raise self.error(key, f"{value!r} is not implemented; only {', '.join(repr(one) for one in allowed)}")

    def integers(self, key: str, low: int, high: int) -> tuple[int, ...]:
        """A list of integers in `[low, high]`; empty if not set."""
        if not self.is_set(key):
            return ()
        values = self._config[key]
        if not isinstance(values, list | tuple):
            raise self.error(key, f"must be a list of integers, got {values!r}")
        items = ConfigReader({str(index): value for index, value in enumerate(values)}, self._file, key)
        return tuple(items.integer(str(index), low, high) for index in range(len(values)))

    def choices(self, key: str, allowed: Collection[str], count: int) -> tuple[str, ...]:
        """A list of `count` of the `allowed` strings; empty if not set."""
        if not self.is_set(key):
            return ()
        values = self._config[key]
        if not isinstance(values, list | tuple) or len(values) != count:
            raise self.error(key, f"must be a list of {count} strings")
        for value in values:
            if value not in allowed:
                raise self.error(key, f"{value!r} is not implemented; only {', '.join(repr(one) for one in allowed)}")
        return tuple(values)

    def section(self, key: str) -> ConfigReader:
        """The object under `key`; an empty one if not set."""
        value = self._config.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.error(key, f"must be an object, got {value!r}")
        dotted = f"{self.path}.{key}" if self.path else key
        return ConfigReader(value, self._file, dotted, self.max_model_len)

    def keys(self) -> tuple[str, ...]:
        """Every key that is set."""
        return tuple(key for key in self._config if self.is_set(key))

    def with_defaults(self, defaults: Mapping[str, Any]) -> ConfigReader:
        """The same config with defaults for keys that it does not set, such as sizes that a family's files omit."""
        given = {key: value for key, value in defaults.items() if not self.is_set(key)}
        return ConfigReader({**self._config, **given}, self._file, self.path, self.max_model_len)

    def without(self, section: str, keys: Collection[str]) -> ConfigReader:
        """The same config without some keys of a section, which have no effect for this family."""
        inside = self._config.get(section)
        if not isinstance(inside, Mapping):
            return self
        left = {key: value for key, value in inside.items() if key not in keys}
        return ConfigReader({**self._config, section: left}, self._file, self.path, self.max_model_len)
