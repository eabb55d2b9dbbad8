"""Compressed-tensors in safetensors: integers packed in words or plain in bytes, each with scales beside it.

Decides what the parts of a module `NAME` are (the package `compressed_tensors`, `compressors/pack_quantized` and
`naive_quantized`). `NAME.weight_packed` has codes of 4 or 8 bits in int32 words `[N, ceil(K * bits / 32)]`, offset by
half their range, and `NAME.weight_shape` holds N and K; `NAME.weight` in int8 has the signed integers themselves.
`NAME.weight_scale` is `[N, G]`, `[N, 1]` or one number. `NAME.weight_zero_point` has the same shape, in int8 or packed
into words along its first dimension; `NAME.weight_g_idx` is the group of each input. FP8 matrices are read by
`fp8_safetensors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.contract.errors import ModelFileError
from penstock.weights.fp8_safetensors import find_fp8
from penstock.weights.integer_matrix import IntegerMatrix, IntegerRows, ReadRows
from penstock.weights.integer_safetensors import unpacked
from penstock.weights.quantisation_config import Quantisation
from penstock.weights.quantised_safetensors import QuantisedMatrices, check_shape, check_type, read_part, read_rows
from penstock.weights.safetensors_files import StoredTensor

__all__ = ["find_compressed"]

_FLOATS = ("BF16", "F16", "F32")
_PACKED = ".weight_packed"


@dataclass(frozen=True, slots=True)
class _Parts:
    """The tensors of one module, with the shape and bits of its matrix."""

    module: str
    tensors: Mapping[str, StoredTensor]
    shape: tuple[int, int]
    bits: int

    def part(self, ending: str) -> StoredTensor | None:
        """The tensor with this suffix, or None."""
        return self.tensors.get(self.module + ending)

    @property
    def codes(self) -> str:
        """The name of the tensor of codes."""
        return self.module + (_PACKED if self.part(_PACKED) else ".weight")


def find_compressed(stored: Mapping[str, StoredTensor], scheme: Quantisation) -> QuantisedMatrices:
    """The matrices of a compressed-tensors checkpoint.

    Raises:
        ModelFileError: the parts of a matrix do not fit each other.
    """
    floats = find_fp8(stored, scheme)
    matrices, hidden = dict(floats.matrices), set(floats.hidden)
    for name, tensor in stored.items():
        packed = name.endswith(_PACKED)
        if not packed and (tensor.dtype != "I8" or not name.endswith(".weight")):
            continue
        parts = _parts(stored, name.removesuffix(_PACKED).removesuffix(".weight"), tensor, packed=packed)
        matrices[f"{parts.module}.weight"] = _matrix(parts)
        hidden |= parts.tensors.keys()
    return QuantisedMatrices(matrices, frozenset(hidden))


def _parts(stored: Mapping[str, StoredTensor], module: str, codes: StoredTensor, *, packed: bool) -> _Parts:
    endings = (
        _PACKED if packed else ".weight",
        ".weight_scale",
        ".weight_zero_point",
        ".weight_g_idx",
        ".weight_shape",
    )
    tensors = {module + ending: stored[module + ending] for ending in endings if module + ending in stored}
    for ending in (".weight_scale", ".weight_shape") if packed else (".weight_scale",):
        if module + ending not in tensors:
            raise ModelFileError(str(codes.path), module + endings[0], f"has no {module}{ending} beside it")
    if len(codes.shape) != 2 or not codes.bytes:
        raise ModelFileError(str(codes.path), module + endings[0], f"has shape {codes.shape}; only matrices are read")
    if not packed:
        return _Parts(module, tensors, (codes.shape[0], codes.shape[1]), 8)
    check_type(module + _PACKED, codes, ("I32",))
    shape = _shape(module, tensors[f"{module}.weight_shape"])
    bits = _bits(module, codes, shape)
    return _Parts(module, tensors, shape, bits)


def _shape(module: str, part: StoredTensor) -> tuple[int, int]:
    name = f"{module}.weight_shape"
    check_shape(name, part, (2,))
    rows, inputs = read_part(name, part, ("I64", "I32")).tolist()
    return rows, inputs


def _bits(module: str, codes: StoredTensor, shape: tuple[int, int]) -> int:
    """Bits per code, inferred from the number of words."""
    for bits in (4, 8):
        if codes.shape == (shape[0], -(-shape[1] * bits // 32)) and shape[1] > 0:
            return bits
    raise ModelFileError(
        str(codes.path), module + _PACKED, f"has shape {codes.shape}: {shape} in 4 or 8 bits takes other words"
    )


def _matrix(parts: _Parts) -> IntegerMatrix:
    (outputs, inputs), scale = parts.shape, parts.tensors[f"{parts.module}.weight_scale"]
    groups = scale.shape[1] if len(scale.shape) == 2 and scale.shape[0] == outputs else 1
    one = ((), (1,), (1, 1)) if groups == 1 else ()
    if not groups or inputs % groups:
        raise ModelFileError(
            str(scale.path), f"{parts.module}.weight_scale", f"has shape {scale.shape}, for a matrix of {parts.shape}"
        )
    check_shape(f"{parts.module}.weight_scale", scale, (outputs, groups), *one)
    order = parts.part(".weight_g_idx")
    if order is not None:
        check_shape(f"{parts.module}.weight_g_idx", order, (inputs,))
    return IntegerMatrix(
        path=parts.tensors[parts.codes].path,
        shape=parts.shape,
        bits=parts.bits,
        group=inputs // groups,
        centred=parts.part(".weight_zero_point") is None,
        bytes=sum(part.bytes for part in parts.tensors.values()),
        open=lambda _: _open(parts, groups),
        order=None if order is None or groups == 1 else lambda _: _order(parts, groups),
    )


def _order(parts: _Parts, groups: int) -> Tensor:
    name = f"{parts.module}.weight_g_idx"
    order = read_part(name, parts.tensors[name], ("I32", "I64")).long()
    if bool((order < 0).any()) or bool((order >= groups).any()):
        raise ModelFileError(str(parts.tensors[name].path), name, f"names groups outside 0 to {groups - 1}")
    return order


def _open(parts: _Parts, groups: int) -> ReadRows:
    outputs, inputs = parts.shape
    name = f"{parts.module}.weight_scale"
    scales = read_part(name, parts.tensors[name], _FLOATS).float()
    scales = scales.reshape(-1, groups).expand(outputs, groups)
    zeros = _zeros(parts, groups)

    def rows(start: int, stop: int) -> IntegerRows:
        some = read_rows(parts.codes, parts.tensors[parts.codes], start, stop, ("I32", "I8"))
        raised = some.view(torch.uint8) ^ 128 if some.dtype == torch.int8 else unpacked(some, parts.bits)[:, :inputs]
        return IntegerRows(raised.contiguous(), scales[start:stop].contiguous(), zeros[start:stop])

    return rows


def _zeros(parts: _Parts, groups: int) -> Tensor:
    """Zero points, uint8 `[N, G]`."""
    outputs, middle = parts.shape[0], 1 << (parts.bits - 1)
    name = f"{parts.module}.weight_zero_point"
    part = parts.tensors.get(name)
    if part is None:
        return torch.full((outputs, groups), middle, dtype=torch.uint8)
    zeros = read_part(name, part, ("I32", "I8"))
    if zeros.dtype == torch.int32:
        check_shape(name, part, (-(-outputs * parts.bits // 32), groups))
        return unpacked(zeros.t().contiguous(), parts.bits)[:, :outputs].t().contiguous()
    check_shape(name, part, (outputs, groups), *(((), (1,), (1, 1)) if groups == 1 else ()))
    return (zeros.int() + middle).to(torch.uint8).reshape(-1, groups).expand(outputs, groups).contiguous()
