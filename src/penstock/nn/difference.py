"""Compares two programs, ignoring the values of their weights.

For code that writes a model in another format and checks that its settings survived. Weights and vectors are compared
by shape, rotary angles by value, numbers to about float32 precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.nn.program import Program
from penstock.nn.rope import RotaryTable

__all__ = ["difference"]

_RELATIVE = 1e-6
_POSITIONS = 4096
_ANGLE = 1e-3
_NAMES = "modules"
"""The field with a projection's names in its checkpoint; ignored, because they depend on the format."""


def difference(one: Program, other: Program) -> str | None:
    """The first way in which `other` differs from `one`, in words; None if they compute the same."""
    return next(_differences("the model", one, other), None)


def _differences(where: str, one: Any, other: Any) -> Iterator[str]:
    if type(one) is not type(other):
        yield f"{where} is {_said(other)}, not {_said(one)}"
    elif isinstance(one, RotaryTable):
        if not _same_angles(one, other):
            yield f"{where} has other angles: the rope's settings differ"
    elif isinstance(one, Tensor):
        if one.shape != other.shape:
            yield f"{where} has shape {tuple(other.shape)}, not {tuple(one.shape)}"
    elif isinstance(one, tuple):
        if len(one) != len(other):
            yield f"{where} has {len(other)} parts, not {len(one)}"
        for index, (first, second) in enumerate(zip(one, other, strict=False)):
            yield from _differences(f"{where}[{index}]", first, second)
    elif is_dataclass(one):
        for field in fields(one):
            if not field.name.startswith("_") and field.name != _NAMES:
                yield from _differences(f"{where}.{field.name}", getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, float):
        if not math.isclose(one, other, rel_tol=_RELATIVE):
            yield f"{where} is {other:g}, not {one:g}"
    elif one != other:
        yield f"{where} is {other!r}, not {one!r}"


def _same_angles(one: RotaryTable, other: RotaryTable) -> bool:
    if one.cos.shape != other.cos.shape:
        return False
    positions = torch.arange(min(_POSITIONS, len(one.cos)))
    pairs = zip(one.rows(positions), other.rows(positions), strict=True)
    return all(torch.allclose(a, b, rtol=0.0, atol=_ANGLE) for a, b in pairs)


def _said(value: Any) -> str:
    return type(value).__name__ if is_dataclass(value) or isinstance(value, Tensor) else repr(value)
