"""Converts a checkpoint's tensors to those of its family's GGUF files, where more than the name differs.

Undoes what families combine while loading: halves of a fused tensor, rows in another order. Each family declares its
conversions; this file applies them, reading a tensor only when a part of it is requested.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.contract.errors import ModelFileError
from penstock.weights.source import TensorSource

__all__ = ["Conversion", "Converted", "GgufWriting"]

_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Conversion:
    """How one tensor of every layer is converted.

    Attributes:
        name: its Hugging Face name, with `{layer}` for the layer's number.
        parts: functions that make each new tensor from its numbers, by the new tensor's Hugging Face name in the
            family's dialect, with `{layer}`.
        sliced: whether new tensors are made slice by slice along the first dimension, which all share (experts).
    """

    name: str
    parts: Mapping[str, Callable[[Tensor], Tensor]]
    sliced: bool = False


@dataclass(frozen=True, slots=True)
class GgufWriting:
    """What is needed to write a family's files, besides its dialect applied in reverse.

    Attributes:
        settings: makes keys under the architecture's prefix from the config and the converted tensors; they replace
            the keys that all families share, and None removes one.
        conversions: the conversions for a checkpoint with this config.
        vectors: makes the tensors that are settings, float32, by their names in the file.
        order: config entries that describe the row order of the converted tensors.
    """

    settings: Callable[[Mapping[str, Any], TensorSource], dict[str, Any]] = lambda _config, _source: {}
    conversions: Callable[[Mapping[str, Any]], Sequence[Conversion]] = lambda _: ()
    vectors: Callable[[Mapping[str, Any], TensorSource], Mapping[str, Tensor]] = lambda _config, _source: {}
    order: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Part:
    of: str
    make: Callable[[Tensor], Tensor]
    sliced: bool


class Converted(TensorSource):
    """A checkpoint after its conversions.

    Args:
        source: the checkpoint.
        conversions: its family's conversions.
        renamed: the checkpoint's name prefixes, by the family's prefixes that they replace.
        left_out: name prefixes of tensors that have no place in the file.
    """

    def __init__(
        self,
        source: TensorSource,
        conversions: Sequence[Conversion] = (),
        *,
        renamed: Mapping[str, str] | None = None,
        left_out: Sequence[str] = (),
    ) -> None:
        self._source = source
        patterns = [(_pattern(each.name), each) for each in conversions]
        self._parts: dict[str, _Part] = {}
        for stored in source.names():
            if not stored.startswith(tuple(left_out)):
                self._parts |= _parts_of(stored, _family_name(stored, renamed or {}), patterns)

    def names(self) -> frozenset[str]:
        """The names of all converted tensors, under the names of the family's dialect."""
        return frozenset(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        part = self._find(name)
        shape = self._source.shape(part.of)
        if part.sliced:
            return shape[0], *part.make(torch.empty(shape[1:], device=_META)).shape
        return tuple(part.make(torch.empty(shape, device=_META)).shape)

    def read_into(self, name: str, out: Tensor) -> None:
        """Fill `out` with a tensor's numbers."""
        part = self._find(name)
        if part.sliced:
            for index in range(len(out)):
                self.read_slice_into(name, index, out[index])
        else:
            out.copy_(part.make(self._source.read(part.of, torch.float32, "cpu")))

    def read_slice_into(self, name: str, index: int, out: Tensor) -> None:
        """See `TensorSource.read_slice_into`."""
        part = self._find(name)
        shape = self._source.shape(part.of)
        if not part.sliced:
            super().read_slice_into(name, index, out)
            return
        stored = torch.empty(shape[1:])
        self._source.read_slice_into(part.of, index, stored)
        out.copy_(part.make(stored))

    def _find(self, name: str) -> _Part:
        if name not in self._parts:
            raise ModelFileError("", name, "the checkpoint has no such tensor")
        return self._parts[name]


def _family_name(stored: str, renamed: Mapping[str, str]) -> str:
    for beginning, replaced in renamed.items():
        if stored.startswith(replaced):
            return beginning + stored.removeprefix(replaced)
    return stored


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\{layer\}", r"(\d+)"))


def _parts_of(stored: str, name: str, patterns: Sequence[tuple[re.Pattern[str], Conversion]]) -> dict[str, _Part]:
    for pattern, conversion in patterns:
        if found := pattern.fullmatch(name):
            layer = found[1] if found.groups() else ""
            return {
                part.replace("{layer}", layer): _Part(stored, make, conversion.sliced)
                for part, make in conversion.parts.items()
            }
    return {name: _Part(stored, lambda numbers: numbers, sliced=False)}
