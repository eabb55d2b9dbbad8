"""Chooses the block kind of each tensor in a quantised GGUF file: well-known mixtures such as `Q4_K_M`.

Follows llama.cpp's quantiser without an importance matrix (its `src/llama-quant.cpp`), so that `Q4_K_M` means the same
there and here. Vectors, norms, routers and the filters of short convolutions are never quantised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.weights.gguf_header import READABLE_TYPES

__all__ = ["FORMS", "Form", "ModelFacts", "choose_kinds"]


@dataclass(frozen=True, slots=True)
class Form:
    """A named mixture of block kinds.

    Attributes:
        kind: block kind of most matrices.
        number: the value of `general.file_type`.
        raised: wider kind, in some layers, for the matrices that affect quality most; None for a single kind.
    """

    kind: str
    number: int
    raised: str | None = None


FORMS: Mapping[str, Form] = {
    "F32": Form("F32", 0),
    "F16": Form("F16", 1),
    "BF16": Form("BF16", 32),
    "Q8_0": Form("Q8_0", 7),
    "Q6_K": Form("Q6_K", 18),
    "Q5_K_M": Form("Q5_K", 17, raised="Q6_K"),
    "Q5_K_S": Form("Q5_K", 16),
    "Q4_K_M": Form("Q4_K", 15, raised="Q6_K"),
    "Q4_K_S": Form("Q4_K", 14, raised="Q5_K"),
    "Q5_1": Form("Q5_1", 9),
    "Q5_0": Form("Q5_0", 8),
    "Q4_1": Form("Q4_1", 3),
    "Q4_0": Form("Q4_0", 2),
}
"""Forms by name, best first."""

_FLOATS = ("F32", "F16", "BF16")
_NARROWER = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""Replacement kinds for tensors whose row length is not a multiple of 256."""

_KEPT = ("_norm.weight", "ffn_gate_inp", "ssm_conv1d", "shortconv.conv")
_LAYER = re.compile(r"blk\.(\d+)\.(.*)")
_VALUES = ("attn_v.weight", "attn_qkv.weight")
_EIGHT_EXPERTS = {"attn_v.weight": "Q8_0", "attn_qkv.weight": "Q8_0", "attn_k.weight": "Q8_0"}
_ELEMENTS = {kind.name: kind.elements for kind in READABLE_TYPES.values()}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts about a model that the rules depend on.

    Attributes:
        architecture: `general.architecture`.
        layers: number of layers.
        experts: experts per layer; 0 for none.
        shared_heads: whether several query heads share a key/value head.
    """

    architecture: str
    layers: int
    experts: int
    shared_heads: bool

    @property
    def is_70b(self) -> bool:
        """Whether llama.cpp treats it as a 70B model, whose small value matrices can afford wider blocks."""
        return self.architecture in ("llama", "qwen2") and self.layers == 80 and self.shared_heads


def choose_kinds(form: Form, tensors: Mapping[str, tuple[int, ...]], facts: ModelFacts) -> dict[str, str | None]:
    """The block kind of every tensor; None for a tensor that is not quantised.

    Args:
        form: the requested form.
        tensors: shapes by GGUF name, rows last.
        facts: facts about the model.
    """
    attending = sorted({layer for layer, rest in map(_split, tensors) if rest in _VALUES})
    place = {layer: index for index, layer in enumerate(attending)}
    tied = "output.weight" not in tensors
    return {
        name: _fitting(_wanted(form, name, facts, place, tied), shape[-1]) if _is_matrix(name, shape) else None
        for name, shape in tensors.items()
    }


def _split(name: str) -> tuple[int, str]:
    """A tensor's layer number (-1 outside layers) and its name within the layer."""
    found = _LAYER.fullmatch(name)
    return (int(found[1]), found[2]) if found else (-1, name)


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    wide = sum(size > 1 for size in shape[:-1]) > 0
    return wide and name.endswith("weight") and name != "position_embd.weight" and not any(k in name for k in _KEPT)


def _wanted(form: Form, name: str, facts: ModelFacts, place: Mapping[int, int], tied: bool) -> str:
    if form.kind in _FLOATS:
        return form.kind
    layer, part = _split(name)
    if name == "output.weight" or (tied and name == "token_embd.weight"):
        return "Q8_0" if form.kind == "Q8_0" else "Q6_K"
    if part in _VALUES:
        return _of_values(form, place[layer], len(place), facts)
    if facts.experts == 8 and part == "attn_k.weight":
        return "Q8_0"
    if facts.experts == 8 and part == "attn_output.weight" and form.kind == "Q4_K":
        return "Q5_K"
    if part.startswith("ffn_down") and form.raised is not None:
        first = layer < facts.layers // 8
        return (
            form.raised
            if (first if form.number == FORMS["Q4_K_S"].number else _is_raised(layer, facts.layers))
            else form.kind
        )
    return form.kind


def _of_values(form: Form, place: int, count: int, facts: ModelFacts) -> str:
    kind = form.kind
    if form.raised is not None:
        raised = place < 4 if form.number == FORMS["Q4_K_S"].number else _is_raised(place, count)
        kind = form.raised if raised else form.kind
    if facts.is_70b and kind == "Q4_K":
        kind = "Q5_K"
    return "Q8_0" if facts.experts == 8 else kind


def _is_raised(place: int, count: int) -> bool:
    """Whether a layer is in the first or last eighth of the layers, or every third of the others."""
    return place < count // 8 or place >= 7 * count // 8 or (place - count // 8) % 3 == 2


def _fitting(kind: str, width: int) -> str:
    """`kind`, or its replacement if rows are not a whole number of blocks."""
    if width % _ELEMENTS[kind] == 0:
        return kind
    narrower = _NARROWER.get(kind, kind)
    return narrower if width % _ELEMENTS[narrower] == 0 else "F16"
