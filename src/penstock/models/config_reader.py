"""Reads a model's configuration value by value, and refuses by key and value what cannot be honoured.

Decides what counts as an integer, a number or a boolean, how absent and null values are treated, and both spellings of
rotary parameters. Does not know families: they say which keys they read, within which bounds, and what they default to.
Nothing is allocated here, so absurd sizes cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from penstock.contract.errors import ModelFileError
from penstock.nn.rope import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    Rope,
    Scaling,
    Unscaled,
    YarnScaling,
    yarn_temperature,
)

__all__ = ["LAYER_TYPES", "MAX_POSITIONS", "ConfigReader"]

_Value = TypeVar("_Value")

_ORIGINAL_POSITIONS = "original_max_position_embeddings"

_PARTIAL = "partial_rotary_factor"

_ROPE_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL_POSITIONS},
    "longrope": {"short_factor", "long_factor", "factor", "attention_factor", _ORIGINAL_POSITIONS},
    "yarn": {
        *("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        _ORIGINAL_POSITIONS,
    },
    "factors": {"factors"},
}
"""What describes each rope type, beside its name and `rope_theta`. `factors` is Penstock's own, for GGUF files."""

MAX_POSITIONS = 1 << 21
"""Beyond any published model."""

LAYER_TYPES = ("full_attention", "sliding_attention")
"""What `layer_types` may say of a layer."""

_OLDER_ROPE_TYPES = {"su": "longrope"}

_SMALLEST_FACTOR, _LARGEST_FACTOR = 1e-6, 1e6


class _Context(NamedTuple):
    """Lengths of sequences that a rotary embedding may depend on.

    Attributes:
        made_for: the longest that the model was made for.
        original: of the pretraining; None where the config does not say.
        served: the longest that will be served.
    """

    made_for: int
    original: int | None
    served: int


class ConfigReader:
    """A mapping of JSON values with checking look-ups. Immutable.

    Absent and null mean the same, "not set": the default holds, and where there is none the key is missing. (Where the
    two differ, `optional_integer` and `optional_number` tell them apart.)

    Args:
        config: the mapping.
        file: named in errors.
        section: dotted path of the mapping within the file, for errors.
        max_model_len: the longest sequence that will be served; None for what the model was made for. Of a rotary
            embedding that has one set of factors for short contexts and one for long ones, it says which.
    """

    def __init__(
        self, config: Mapping[str, Any], file: str, section: str = "", max_model_len: int | None = None
    ) -> None:
        self._config = config
        self._file = file
        self._section = section
        self._max_model_len = max_model_len

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

    def optional_number(self, key: str, low: float, high: float, absent: float | None = None) -> float | None:
        """A number in `[low, high]`; None where the config says null, and `absent` where it says nothing."""
        if key not in self._config:
            return absent
        return self.number(key, low, high) if self.is_set(key) else None

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

    def section(self, key: str) -> ConfigReader:
        """The object under `key`; without it an empty one."""
        value = self._config.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.error(key, f"must be an object, got {value!r}")
        dotted = f"{self._section}.{key}" if self._section else key
        return ConfigReader(value, self._file, dotted, self._max_model_len)

    def keys(self) -> tuple[str, ...]:
        """Every key that is set."""
        return tuple(key for key in self._config if self.is_set(key))

    def with_defaults(self, defaults: Mapping[str, Any]) -> ConfigReader:
        """The same config, with values for keys that it does not set: a family's sizes, where files leave them out."""
        given = {key: value for key, value in defaults.items() if not self.is_set(key)}
        return ConfigReader({**self._config, **given}, self._file, self._section, self._max_model_len)

    def without(self, section: str, keys: Collection[str]) -> ConfigReader:
        """The same config, less some keys of a section, which change nothing for this family."""
        inside = self._config.get(section)
        if not isinstance(inside, Mapping):
            return self
        left = {key: value for key, value in inside.items() if key not in keys}
        return ConfigReader({**self._config, section: left}, self._file, self._section, self._max_model_len)

    def rope(self, head_dim: int, max_positions: int, *, partial: bool = False, theta: float = 10000.0) -> Rope:
        """The rotary embedding, in the old spelling (`rope_theta`, `rope_scaling`) or the new (`rope_parameters`).

        Args:
            head_dim: width of a head.
            max_positions: the longest sequence that the model was made for.
            partial: the family honours a `partial_rotary_factor` below 1.
            theta: the family's default for `rope_theta`.
        """
        plain = Rope(self._theta(theta), share=self._rotary_share(head_dim, 1.0, partial=partial))
        sections = [self.section(key) for key in ("rope_parameters", "rope_scaling")]
        return self._rope_of(sections, plain, head_dim, max_positions, partial=partial)

    def layer_rope(
        self,
        layer_type: str,
        head_dim: int,
        max_positions: int,
        *,
        theta: float,
        theta_key: str = "rope_theta",
        scaled: bool = True,
        partial: bool = False,
    ) -> Rope:
        """The rotary embedding of the layers of one type, where types differ (Gemma).

        The new spelling has an object for each type in `rope_parameters`; the old one a base for each, and a
        `rope_scaling` that holds for one type.

        Args:
            layer_type: as in `layer_types`.
            head_dim: width of a head.
            max_positions: the longest sequence that the model was made for.
            theta: the family's default for the base.
            theta_key: what the old spelling calls it.
            scaled: the old spelling's `rope_scaling` is for these layers.
            partial: the family honours a `partial_rotary_factor` below 1.
        """
        plain = Rope(self.number(theta_key, 1.0, 1e12, default=theta))
        by_type = self.section("rope_parameters")
        for key in by_type.keys():  # noqa: SIM118 - a reader is no mapping
            if key not in LAYER_TYPES:
                raise by_type.error(key, f"is no layer type; there are {', '.join(LAYER_TYPES)}")
        sections = [by_type.section(layer_type), *([self.section("rope_scaling")] if scaled else [])]
        return self._rope_of(sections, plain, head_dim, max_positions, partial=partial)

    def _value(self, key: str, default: Any) -> Any:
        value = self._config.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        return value

    def _theta(self, default: float) -> float:
        return self.number("rope_theta", 1.0, 1e12, default=default)

    def _rotary_share(self, head_dim: int, default: float, *, partial: bool) -> float:
        if not partial:
            return float(self.expect(_PARTIAL, [1, 1.0], 1.0))
        share = self.number(_PARTIAL, 0.0, 1.0, default=default)
        if int(head_dim * share) < 1:
            raise self.error(_PARTIAL, f"{share:g} leaves nothing of a head of {head_dim} to rotate")
        return share

    def _rope_of(
        self, sections: list[ConfigReader], plain: Rope, head_dim: int, max_positions: int, *, partial: bool
    ) -> Rope:
        """What the sections that are there say, in agreement; `plain` without any."""
        ropes = [
            self._rope_section(section, plain, head_dim, max_positions, partial=partial)
            for section in sections
            if section._config
        ]
        if len(ropes) == 2 and ropes[0] != ropes[1]:
            raise self.error("rope_scaling", "contradicts rope_parameters")
        return ropes[0] if ropes else plain

    def _rope_section(
        self, section: ConfigReader, plain: Rope, head_dim: int, max_positions: int, *, partial: bool
    ) -> Rope:
        kind = section._rope_type()
        share = section._rotary_share(head_dim, plain.share, partial=partial)
        section._refuse_unknown(kind)
        context = _Context(max_positions, self._original_positions(section), self._max_model_len or max_positions)
        rope = Rope(section._theta(plain.theta), share=share)
        amplitudes = {"longrope": section._attention_factor, "yarn": section._yarn_amplitude}
        return replace(
            rope,
            scaling=section._scaling(kind, rope, rope.width(head_dim) // 2, context),
            amplitude=amplitudes[kind](context) if kind in amplitudes else 1.0,
        )

    def _original_positions(self, section: ConfigReader) -> int | None:
        """Length of the pretraining's sequences, which may stand in `section`, beside it, or in both."""
        readers = self, section
        found = [each.integer(_ORIGINAL_POSITIONS, 1, 1 << 30) for each in readers if each.is_set(_ORIGINAL_POSITIONS)]
        if len(set(found)) == 2:
            raise self.error(_ORIGINAL_POSITIONS, f"{found[0]} contradicts the value in {section._section}")
        return found[0] if found else None

    def _rope_type(self) -> str:
        """The rope type; `type` is its older name, and some files carry both."""
        if self.is_set("type") and self.is_set("rope_type") and self._config["type"] != self._config["rope_type"]:
            raise self.error("type", f"{self._config['type']!r} contradicts rope_type {self._config['rope_type']!r}")
        known = [*_ROPE_KEYS, *_OLDER_ROPE_TYPES]
        kind = self.expect("type" if self.is_set("type") else "rope_type", known, "default")
        return _OLDER_ROPE_TYPES.get(kind, kind)

    def _refuse_unknown(self, kind: str) -> None:
        known = {"type", "rope_type", "rope_theta", _PARTIAL, *_ROPE_KEYS[kind]}
        for key in self._config:
            if self.is_set(key) and key not in known:
                raise self.error(key, f"is not implemented for rope type {kind!r}")

    def _scaling(self, kind: str, rope: Rope, pairs: int, context: _Context) -> Scaling:
        if kind == "yarn":
            return self._yarn(rope.theta, context)
        if kind == "linear":
            return LinearScaling(self.number("factor", 1.0, _LARGEST_FACTOR))
        if kind == "llama3":
            return self._llama3(context.original or context.made_for)
        if kind == "longrope":
            return self._longrope(pairs, context)
        if kind == "factors":
            return FrequencyFactors(self._factors("factors", pairs))
        return Unscaled()

    def _longrope(self, pairs: int, context: _Context) -> FrequencyFactors:
        """The factors for long sequences if any that is served may be longer than those of the pretraining.

        Transformers chooses anew whenever a sequence outgrows that length, which changes the keys before it; here one
        choice holds for all sequences, so that an answer does not depend on what else is computed.
        """
        short, long = self._factors("short_factor", pairs), self._factors("long_factor", pairs)
        return FrequencyFactors(long if context.served > self._pretrained(context) else short)

    def _attention_factor(self, context: _Context) -> float:
        """LongRoPE's, which grows with how far the context was extended (`modeling_rope_utils` of transformers)."""
        original = self._pretrained(context)
        extended = context.made_for / original
        scale = self.number("factor", 1.0, _LARGEST_FACTOR) if self.is_set("factor") else extended
        grown = math.sqrt(1.0 + math.log(scale) / math.log(original)) if scale > 1.0 else 1.0
        return self.number("attention_factor", _SMALLEST_FACTOR, _LARGEST_FACTOR, default=grown)

    def _yarn(self, theta: float, context: _Context) -> YarnScaling:
        fast = self.number("beta_fast", _SMALLEST_FACTOR, _LARGEST_FACTOR, default=32.0)
        slow = self.number("beta_slow", _SMALLEST_FACTOR, _LARGEST_FACTOR, default=1.0)
        if fast <= slow:
            raise self.error("beta_fast", f"must be above beta_slow ({slow:g}), got {fast:g}")
        if theta <= 1.0:
            raise self.error("rope_theta", f"must be above 1 for rope type yarn, got {theta:g}")
        factor, original = self._yarn_factor(context), self._yarn_original(context)
        if factor * original > MAX_POSITIONS:
            raise self.error("factor", f"{factor:g} extends {original} positions beyond {MAX_POSITIONS}")
        return YarnScaling(
            theta=theta,
            factor=factor,
            original_positions=original,
            fast=fast,
            slow=slow,
            truncate=self.boolean("truncate", default=True),
        )

    def _yarn_factor(self, context: _Context) -> float:
        extended = max(context.made_for / self._yarn_original(context), 1.0)
        return self.number("factor", 1.0, _LARGEST_FACTOR, default=extended)

    def _yarn_original(self, context: _Context) -> int:
        return context.original or context.made_for  # as transformers fills it in

    def _yarn_amplitude(self, context: _Context) -> float:
        """YaRN's, as `modeling_rope_utils` of transformers derives it where the config does not give it."""
        if self.is_set("attention_factor"):
            return self.number("attention_factor", _SMALLEST_FACTOR, _LARGEST_FACTOR)
        factor = self._yarn_factor(context)
        scales = [self.number(key, 0.0, _LARGEST_FACTOR, default=0.0) for key in ("mscale", "mscale_all_dim")]
        if all(scales):
            return yarn_temperature(factor, scales[0]) / yarn_temperature(factor, scales[1])
        return yarn_temperature(factor)

    def _pretrained(self, context: _Context) -> int:
        if context.original is None or context.original < 2:
            raise self.error(_ORIGINAL_POSITIONS, f"must be at least 2 for rope type longrope, got {context.original}")
        return context.original

    def _llama3(self, original_positions: int) -> Llama3Scaling:
        low = self.number("low_freq_factor", _SMALLEST_FACTOR, _LARGEST_FACTOR)
        high = self.number("high_freq_factor", _SMALLEST_FACTOR, _LARGEST_FACTOR)
        if high <= low:
            raise self.error("high_freq_factor", f"must be above low_freq_factor ({low:g}), got {high:g}")
        return Llama3Scaling(
            factor=self.number("factor", 1.0, _LARGEST_FACTOR),
            low_freq_factor=low,
            high_freq_factor=high,
            original_positions=original_positions,
        )

    def _factors(self, key: str, count: int) -> tuple[float, ...]:
        factors = self._value(key, None)
        if not isinstance(factors, list | tuple) or len(factors) != count:
            raise self.error(key, f"must be a list of {count} numbers, one for each two elements that are rotated")
        for factor in factors:
            if not isinstance(factor, int | float) or not _SMALLEST_FACTOR <= factor <= _LARGEST_FACTOR:
                raise self.error(key, f"must be numbers in {_SMALLEST_FACTOR:g}..{_LARGEST_FACTOR:g}, got {factor!r}")
        return tuple(float(factor) for factor in factors)
