"""GPTQ and AWQ in safetensors: for a module `NAME` the tensors `NAME.qweight`, `.qzeros`, `.scales` and `.g_idx`.

Decides how int32 words are unpacked into codes. Both store matrices inputs first, with `scales` `[G, N]` and `qzeros`
`[G, N * bits / 32]` for groups of inputs. A GPTQ word packs neighbouring inputs of one output, `qweight`
`[K * bits / 32, N]`; its first format stores zero points minus one, subtracted from whole words, so that a code of 0
borrows from its neighbour (gptqmodel, `convert_gptq_v1_to_v2_format_module`). An AWQ word packs neighbouring outputs of
one input, `qweight` `[K, N * bits / 32]`, 4-bit codes in the order 0, 2, 4, 6, 1, 3, 5, 7 (AutoAWQ, `packing_utils`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.contract.errors import ModelFileError
from penstock.weights.integer_matrix import IntegerMatrix, IntegerRows, ReadRows
from penstock.weights.quantisation_config import Quantisation
from penstock.weights.quantised_safetensors import QuantisedMatrices, check_shape, check_type, read_part
from penstock.weights.safetensors_files import StoredTensor

__all__ = ["find_integers", "unpacked"]

_WORD = 32
_INTEGERS, _FLOATS = ("I32",), ("F16", "BF16", "F32")
_WHERE_OUTPUTS_LIE = (0, 4, 1, 5, 2, 6, 3, 7)
_CODES, _ZEROS, _SCALES, _ORDER = ".qweight", ".qzeros", ".scales", ".g_idx"


@dataclass(frozen=True, slots=True)
class _Parts:
    """The tensors of one module."""

    module: str
    codes: StoredTensor
    zeros: StoredTensor
    scales: StoredTensor
    order: StoredTensor | None

    @property
    def all(self) -> dict[str, StoredTensor]:
        """The stored tensors by full name."""
        named = {_CODES: self.codes, _ZEROS: self.zeros, _SCALES: self.scales, _ORDER: self.order}
        return {self.module + ending: part for ending, part in named.items() if part is not None}


def find_integers(stored: Mapping[str, StoredTensor], scheme: Quantisation) -> QuantisedMatrices:
    """The matrices of a GPTQ or AWQ checkpoint.

    Raises:
        ModelFileError: the parts of a matrix do not fit each other or the scheme.
    """
    matrices, hidden = {}, set[str]()
    for name in stored:
        if name.endswith(_CODES):
            parts = _parts(stored, name.removesuffix(_CODES))
            hidden |= parts.all.keys()
            matrices[f"{parts.module}.weight"] = _matrix(parts, scheme)
    return QuantisedMatrices(matrices, frozenset(hidden))


def _parts(stored: Mapping[str, StoredTensor], module: str) -> _Parts:
    def beside(ending: str) -> StoredTensor:
        if module + ending not in stored:
            raise ModelFileError(str(codes.path), module + _CODES, f"has no {module}{ending} beside it")
        return stored[module + ending]

    codes = stored[module + _CODES]
    parts = _Parts(module, codes, beside(_ZEROS), beside(_SCALES), stored.get(module + _ORDER))
    for name, part in parts.all.items():
        check_type(name, part, _FLOATS if name.endswith(_SCALES) else _INTEGERS)
        if len(part.shape) != (1 if name.endswith(_ORDER) else 2) or not part.bytes:
            raise ModelFileError(str(part.path), name, f"has shape {part.shape}, which no matrix has parts of")
    return parts


def _matrix(parts: _Parts, scheme: Quantisation) -> IntegerMatrix:
    of_word = _WORD // scheme.bits
    rows, columns = parts.codes.shape
    inputs, outputs = (rows * of_word, columns) if scheme.method == "gptq" else (rows, columns * of_word)
    group = min(scheme.group or inputs, inputs)
    groups = -(-inputs // group)
    check_shape(parts.module + _SCALES, parts.scales, (groups, outputs))
    check_shape(parts.module + _ZEROS, parts.zeros, (groups, -(-outputs // of_word)))
    if parts.order is not None:
        check_shape(parts.module + _ORDER, parts.order, (inputs,))
    elif scheme.ordered and groups > 1:
        raise ModelFileError(str(parts.codes.path), parts.module, "has no g_idx, though desc_act is true")

    def order(_: str) -> Tensor:
        return _order(parts, groups)

    return IntegerMatrix(
        path=parts.codes.path,
        shape=(outputs, inputs),
        bits=scheme.bits,
        group=group,
        centred=scheme.centred,
        bytes=sum(part.bytes for part in parts.all.values()),
        open=lambda _: _open(parts, scheme, group),
        order=order if scheme.ordered and groups > 1 else None,
    )


def _order(parts: _Parts, groups: int) -> Tensor:
    """The group of each input, int64 `[K]`."""
    name = parts.module + _ORDER
    assert parts.order is not None
    order = read_part(name, parts.order, _INTEGERS).long()
    if bool((order < 0).any()) or bool((order >= groups).any()):
        raise ModelFileError(str(parts.order.path), name, f"names groups outside 0 to {groups - 1}")
    return order


def _open(parts: _Parts, scheme: Quantisation, group: int) -> ReadRows:
    words = read_part(parts.module + _CODES, parts.codes, _INTEGERS)
    scales = read_part(parts.module + _SCALES, parts.scales, _FLOATS).float().t().contiguous()  # [N, G]
    zeros = _zeros(parts, scheme, len(scales))
    if parts.order is not None and not scheme.ordered:
        _check_neighbours(parts, group, scales.shape[1])

    def rows(start: int, stop: int) -> IntegerRows:
        if scheme.method == "gptq":
            codes = unpacked(words[:, start:stop].t().contiguous(), scheme.bits)
        else:
            codes = _outputs(words, scheme.bits, start, stop).t().contiguous()
        return IntegerRows(codes, scales[start:stop], zeros[start:stop])

    return rows


def _check_neighbours(parts: _Parts, group: int, groups: int) -> None:
    order = _order(parts, groups)
    if not torch.equal(order, torch.arange(len(order)) // group):
        raise ModelFileError(
            str(parts.codes.path),
            parts.module + _ORDER,
            "has groups of inputs that are no neighbours, though quantization_config.desc_act is false; make it true",
        )


def _zeros(parts: _Parts, scheme: Quantisation, outputs: int) -> Tensor:
    """Zero points, uint8 `[N, G]`."""
    words = read_part(parts.module + _ZEROS, parts.zeros, _INTEGERS)
    if scheme.zeros_less_one:
        ones = sum(1 << shift for shift in range(0, _WORD, scheme.bits))
        words = words + ones
    zeros = unpacked(words, scheme.bits) if scheme.method == "gptq" else _outputs(words, scheme.bits, 0, outputs)
    return zeros[:, :outputs].t().contiguous()


def _outputs(words: Tensor, bits: int, start: int, stop: int) -> Tensor:
    """Unpack the codes of outputs `start` to `stop` from AWQ's words `[K, W]`: uint8 `[K, stop - start]`."""
    of_word = _WORD // bits
    first = start // of_word
    codes = unpacked(words[:, first : -(-stop // of_word)].contiguous(), bits)
    if bits == 4:
        codes = codes.unflatten(1, (-1, of_word))[:, :, _WHERE_OUTPUTS_LIE].flatten(1)
    return codes[:, start - first * of_word : stop - first * of_word]


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 `[N, W]` into codes of 4 or 8 bits, lowest bits first: uint8 `[N, W * 32 / bits]`."""
    codes = words.view(torch.uint8)
    return codes if bits == 8 else torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)
