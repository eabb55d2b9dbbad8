"""Reads the rotary embedding of a model's configuration, in the old and the new spelling.

Decides which keys each rope type has, the defaults that transformers derives for them, and which of two sets of factors
applies. Refuses contradictory spellings, and keys that are not read here.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from penstock.models.config_reader import LAYER_TYPES, MAX_POSITIONS, ConfigReader
from penstock.nn.rope import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    ProportionalScaling,
    Rope,
    Scaling,
    Unscaled,
    YarnScaling,
    yarn_temperature,
)

__all__ = ["read_layer_rope", "read_rope", "without_image_axes"]

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
    "proportional": {"factor"},
    "factors": {"factors"},
}
"""The keys of each rope type, besides its name and `rope_theta`. `factors` is Penstock's own type, for GGUF files."""

_OLDER_ROPE_TYPES = {"su": "longrope"}

_SMALLEST_FACTOR, _LARGEST_FACTOR = 1e-6, 1e6


class _Context(NamedTuple):
    """The sequence lengths that a rotary embedding may depend on.

    Attributes:
        made_for: the longest sequence that the model was made for.
        original: sequence length of the pretraining; None if the config does not say.
        served: the longest sequence that will be served.
    """

    made_for: int
    original: int | None
    served: int


def read_rope(
    reader: ConfigReader, head_dim: int, max_positions: int, *, partial: bool = False, theta: float = 10000.0
) -> Rope:
    """The rotary embedding, in the old spelling (`rope_theta`, `rope_scaling`) or the new (`rope_parameters`).

    Args:
        reader: the whole configuration.
        head_dim: width of a head.
        max_positions: the longest sequence that the model was made for.
        partial: whether the family supports a `partial_rotary_factor` below 1.
        theta: the family's default for `rope_theta`.
    """
    plain = Rope(_theta(reader, theta), share=_rotary_share(reader, head_dim, 1.0, partial=partial))
    sections = [reader.section(key) for key in ("rope_parameters", "rope_scaling")]
    return _rope_of(reader, sections, plain, head_dim, max_positions, partial=partial)


def without_image_axes(reader: ConfigReader) -> ConfigReader:
    """The config of a vision-language model without the keys that assign pairs to the axes of an image (M-RoPE).

    A text token has the same position on every axis (Wang et al. 2024, Qwen2-VL, section 2.1), so the assignment has no
    effect for text. Older configs use a separate type for such an embedding, `mrope`, which is otherwise the default
    type.
    """
    for key in ("rope_parameters", "rope_scaling"):
        section = reader.section(key)
        names = [name for name in ("type", "rope_type") if section.is_set(name) and section.value(name) == "mrope"]
        reader = reader.without(key, ("mrope_section", "mrope_interleaved", *names))
    return reader


def read_layer_rope(
    reader: ConfigReader,
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

    The new spelling has an object for each type in `rope_parameters`; the old one has a base for each type, and a
    `rope_scaling` that applies to one of them.

    Args:
        reader: the whole configuration.
        layer_type: as in `layer_types`.
        head_dim: width of a head.
        max_positions: the longest sequence that the model was made for.
        theta: the family's default for the base.
        theta_key: the old spelling's key for the base.
        scaled: whether the old spelling's `rope_scaling` applies to these layers.
        partial: whether the family supports a `partial_rotary_factor` below 1.
    """
    plain = Rope(reader.number(theta_key, 1.0, 1e12, default=theta))
    by_type = reader.section("rope_parameters")
    for key in by_type.keys():  # noqa: SIM118 - a reader is no mapping
        if key not in LAYER_TYPES:
            raise by_type.error(key, f"is no layer type; there are {', '.join(LAYER_TYPES)}")
    sections = [by_type.section(layer_type), *([reader.section("rope_scaling")] if scaled else [])]
    return _rope_of(reader, sections, plain, head_dim, max_positions, partial=partial)


def _theta(reader: ConfigReader, default: float) -> float:
    return reader.number("rope_theta", 1.0, 1e12, default=default)


def _rotary_share(reader: ConfigReader, head_dim: int, default: float, *, partial: bool) -> float:
    if not partial:
        return float(reader.expect(_PARTIAL, [1, 1.0], 1.0))
    share = reader.number(_PARTIAL, 0.0, 1.0, default=default)
    if int(head_dim * share) < 1:
        raise reader.error(_PARTIAL, f"{share:g} leaves nothing of a head of {head_dim} to rotate")
    return share


def _rope_of(
    reader: ConfigReader, sections: list[ConfigReader], plain: Rope, head_dim: int, max_positions: int, *, partial: bool
) -> Rope:
    """The rope that all present sections agree on; `plain` if there are none."""
    ropes = [
        _rope_section(reader, section, plain, head_dim, max_positions, partial=partial)
        for section in sections
        if section.keys()
    ]
    if len(ropes) == 2 and ropes[0] != ropes[1]:
        raise reader.error("rope_scaling", "contradicts rope_parameters")
    return ropes[0] if ropes else plain


def _rope_section(
    reader: ConfigReader, section: ConfigReader, plain: Rope, head_dim: int, max_positions: int, *, partial: bool
) -> Rope:
    kind = _rope_type(section)
    if kind == "proportional":
        return _proportional(section, plain, head_dim)
    share = _rotary_share(section, head_dim, plain.share, partial=partial)
    _refuse_unknown(section, kind)
    context = _Context(max_positions, _original_positions(reader, section), reader.max_model_len or max_positions)
    rope = Rope(_theta(section, plain.theta), share=share)
    amplitudes = {"longrope": _attention_factor, "yarn": _yarn_amplitude}
    return replace(
        rope,
        scaling=_scaling(section, kind, rope, rope.width(head_dim) // 2, context),
        amplitude=amplitudes[kind](section, context) if kind in amplitudes else 1.0,
    )


def _proportional(section: ConfigReader, plain: Rope, head_dim: int) -> Rope:
    """A rope with the frequencies of a whole head, in which only part of the pairs rotate; the others have angle 0."""
    _refuse_unknown(section, "proportional")
    share = section.number(_PARTIAL, 0.0, 1.0, default=plain.share)
    factor = section.number("factor", 1.0, _LARGEST_FACTOR, default=1.0)
    return Rope(_theta(section, plain.theta), ProportionalScaling(int(share * head_dim // 2), factor))


def _original_positions(reader: ConfigReader, section: ConfigReader) -> int | None:
    """Sequence length of the pretraining, which may be in `section`, beside it, or in both."""
    readers = reader, section
    found = [each.integer(_ORIGINAL_POSITIONS, 1, 1 << 30) for each in readers if each.is_set(_ORIGINAL_POSITIONS)]
    if len(set(found)) == 2:
        raise reader.error(_ORIGINAL_POSITIONS, f"{found[0]} contradicts the value in {section.path}")
    return found[0] if found else None


def _rope_type(reader: ConfigReader) -> str:
    """The rope type; `type` is the older key, and some files have both."""
    if reader.is_set("type") and reader.is_set("rope_type"):
        older, newer = reader.value("type"), reader.value("rope_type")
        if older != newer:
            raise reader.error("type", f"{older!r} contradicts rope_type {newer!r}")
    known = [*_ROPE_KEYS, *_OLDER_ROPE_TYPES]
    kind = reader.expect("type" if reader.is_set("type") else "rope_type", known, "default")
    return _OLDER_ROPE_TYPES.get(kind, kind)


def _refuse_unknown(reader: ConfigReader, kind: str) -> None:
    known = {"type", "rope_type", "rope_theta", _PARTIAL, *_ROPE_KEYS[kind]}
    for key in reader.keys():  # noqa: SIM118 - a reader is no mapping
        if key not in known:
            raise reader.error(key, f"is not implemented for rope type {kind!r}")


def _scaling(reader: ConfigReader, kind: str, rope: Rope, pairs: int, context: _Context) -> Scaling:
    if kind == "yarn":
        return _yarn(reader, rope.theta, context)
    if kind == "linear":
        return LinearScaling(reader.number("factor", 1.0, _LARGEST_FACTOR))
    if kind == "llama3":
        return _llama3(reader, context.original or context.made_for)
    if kind == "longrope":
        return _longrope(reader, pairs, context)
    if kind == "factors":
        return FrequencyFactors(_factors(reader, "factors", pairs))
    return Unscaled()


def _longrope(reader: ConfigReader, pairs: int, context: _Context) -> FrequencyFactors:
    """The long factors if served sequences may be longer than the pretraining's, otherwise the short ones.

    Transformers switches when a sequence outgrows that length, which invalidates earlier keys; here one choice applies
    to all sequences, so that an answer does not depend on what else is computed.
    """
    short, long = _factors(reader, "short_factor", pairs), _factors(reader, "long_factor", pairs)
    return FrequencyFactors(long if context.served > _pretrained(reader, context) else short)


def _attention_factor(reader: ConfigReader, context: _Context) -> float:
    """LongRoPE's attention factor, which grows with the context extension (transformers' `modeling_rope_utils`)."""
    original = _pretrained(reader, context)
    extended = context.made_for / original
    scale = reader.number("factor", 1.0, _LARGEST_FACTOR) if reader.is_set("factor") else extended
    grown = math.sqrt(1.0 + math.log(scale) / math.log(original)) if scale > 1.0 else 1.0
    return reader.number("attention_factor", _SMALLEST_FACTOR, _LARGEST_FACTOR, default=grown)


def _yarn(reader: ConfigReader, theta: float, context: _Context) -> YarnScaling:
    fast = reader.number("beta_fast", _SMALLEST_FACTOR, _LARGEST_FACTOR, default=32.0)
    slow = reader.number("beta_slow", _SMALLEST_FACTOR, _LARGEST_FACTOR, default=1.0)
    if fast <= slow:
        raise reader.error("beta_fast", f"must be above beta_slow ({slow:g}), got {fast:g}")
    if theta <= 1.0:
        raise reader.error("rope_theta", f"must be above 1 for rope type yarn, got {theta:g}")
    factor, original = _yarn_factor(reader, context), _yarn_original(context)
    if factor * original > MAX_POSITIONS:
        raise reader.error("factor", f"{factor:g} extends {original} positions beyond {MAX_POSITIONS}")
    return YarnScaling(
        theta=theta,
        factor=factor,
        original_positions=original,
        fast=fast,
        slow=slow,
        truncate=reader.boolean("truncate", default=True),
    )


def _yarn_factor(reader: ConfigReader, context: _Context) -> float:
    extended = max(context.made_for / _yarn_original(context), 1.0)
    return reader.number("factor", 1.0, _LARGEST_FACTOR, default=extended)


def _yarn_original(context: _Context) -> int:
    return context.original or context.made_for  # the same default as in transformers


def _yarn_amplitude(reader: ConfigReader, context: _Context) -> float:
    """YaRN's attention factor, by default as transformers' `modeling_rope_utils` derives it."""
    if reader.is_set("attention_factor"):
        return reader.number("attention_factor", _SMALLEST_FACTOR, _LARGEST_FACTOR)
    factor = _yarn_factor(reader, context)
    scales = [reader.number(key, 0.0, _LARGEST_FACTOR, default=0.0) for key in ("mscale", "mscale_all_dim")]
    if all(scales):
        return yarn_temperature(factor, scales[0]) / yarn_temperature(factor, scales[1])
    return yarn_temperature(factor)


def _pretrained(reader: ConfigReader, context: _Context) -> int:
    if context.original is None or context.original < 2:
        raise reader.error(_ORIGINAL_POSITIONS, f"must be at least 2 for rope type longrope, got {context.original}")
    return context.original


def _llama3(reader: ConfigReader, original_positions: int) -> Llama3Scaling:
    low = reader.number("low_freq_factor", _SMALLEST_FACTOR, _LARGEST_FACTOR)
    high = reader.number("high_freq_factor", _SMALLEST_FACTOR, _LARGEST_FACTOR)
    if high <= low:
        raise reader.error("high_freq_factor", f"must be above low_freq_factor ({low:g}), got {high:g}")
    return Llama3Scaling(
        factor=reader.number("factor", 1.0, _LARGEST_FACTOR),
        low_freq_factor=low,
        high_freq_factor=high,
        original_positions=original_positions,
    )


def _factors(reader: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    factors = reader.value(key)
    if not isinstance(factors, list | tuple) or len(factors) != count:
        raise reader.error(key, f"must be a list of {count} numbers, one for each two elements that are rotated")
    for factor in factors:
        if not isinstance(factor, int | float) or not _SMALLEST_FACTOR <= factor <= _LARGEST_FACTOR:
            raise reader.error(key, f"must be numbers in {_SMALLEST_FACTOR:g}..{_LARGEST_FACTOR:g}, got {factor!r}")
    return tuple(float(factor) for factor in factors)
