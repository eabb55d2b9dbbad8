"""Quantises numbers to 4- or 8-bit integers with scales, as the tensors of a compressed-tensors module.

The inverse of `compressed_tensors`, whose docstring describes the parts. Integers are always symmetric: kernels
everywhere support that, and a zero point would gain little in groups this short. Scales are stored in float32, but
rounded to values that bfloat16 and, for the usual magnitudes of weights, float16 represent exactly: whichever type an
engine keeps or multiplies them in, they are not rounded again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["INTEGER_FORMS", "IntegerForm"]

_SEARCHED = (7.0, 7.25, 7.5, 7.75, 8.0, 8.25, 8.5, 9.0)
"""Values tried for 4-bit integers of a group's largest number over its scale: larger ones clip more and round less."""

_PIECE_ELEMENTS = 1 << 17


@dataclass(frozen=True, slots=True)
class IntegerForm:
    """An integer form that a directory can be written in.

    Attributes:
        bits: bits per code.
        group: inputs that share a scale; 0 for a whole row.
    """

    bits: int
    group: int

    @property
    def config_group(self) -> dict[str, Any]:
        """Its entry in `quantization_config.config_groups`."""
        strategy = {"strategy": "group", "group_size": self.group} if self.group else {"strategy": "channel"}
        weights = {"num_bits": self.bits, "type": "int", "symmetric": True, "dynamic": False, **strategy}
        return {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}

    @property
    def format(self) -> str:
        """compressed-tensors' name for the layout."""
        return "pack-quantized" if self.bits == 4 else "int-quantized"

    def fits(self, inputs: int) -> bool:
        """Whether a row of `inputs` numbers is a whole number of groups."""
        return inputs % (self.group or 1) == 0

    def parts(self, outputs: int, inputs: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtypes and shapes of the tensors of a matrix `[N, K]`, by name suffix."""
        scale = {".weight_scale": (torch.float32, (outputs, inputs // self.group if self.group else 1))}
        if self.bits == 8:
            return {".weight": (torch.int8, (outputs, inputs)), **scale}
        words = (outputs, -(-inputs * self.bits // 32))
        return {".weight_packed": (torch.int32, words), ".weight_shape": (torch.int64, (2,)), **scale}

    def encode(self, numbers: Tensor) -> Mapping[str, Tensor]:
        """The tensors of a matrix, as described by `parts`.

        Args:
            numbers: float32 `[N, K]`.

        Raises:
            ValueError: a number is not finite.
        """
        if not bool(torch.isfinite(numbers).all()):
            raise ValueError("holds a number that is not finite")
        rows = max(1, _PIECE_ELEMENTS // numbers.shape[1])
        pieces = [self._piece(piece) for piece in numbers.split(rows)]
        codes, scales = (torch.cat(each) for each in zip(*pieces, strict=True))
        if self.bits == 8:
            return {".weight": codes, ".weight_scale": scales}
        return {".weight_packed": codes, ".weight_shape": torch.tensor(numbers.shape), ".weight_scale": scales}

    def _piece(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        groups = rows.unflatten(1, (-1, self.group or rows.shape[1]))  # [N, G, group]
        if self.bits == 8:
            scales = _held(groups.abs().amax(2, keepdim=True) / 127)
            return _codes(groups, scales, -127, 127).flatten(1).to(torch.int8), scales.squeeze(2)
        scales = _searched(groups)
        return _packed(_codes(groups, scales, -8, 7).flatten(1)), scales.squeeze(2)


def _held(scales: Tensor) -> Tensor:
    """Round scales to bfloat16; 1 for a group of zeros."""
    return torch.where(scales == 0, 1.0, scales.bfloat16().float())


def _codes(groups: Tensor, scales: Tensor, least: int, most: int) -> Tensor:
    return (groups / scales).round_().clamp_(least, most)


def _searched(groups: Tensor) -> Tensor:
    """For each group, the candidate scale with the smallest squared error: `[N, G, 1]`."""
    largest = groups.abs().amax(2, keepdim=True)
    best, least = torch.ones_like(largest), torch.full_like(largest, torch.inf)
    for steps in _SEARCHED:
        scales = _held(largest / steps)
        error = (_codes(groups, scales, -8, 7).mul_(scales) - groups).square_().sum(2, keepdim=True)
        best, least = torch.where(error < least, scales, best), torch.minimum(error, least)
    return best


def _packed(codes: Tensor) -> Tensor:
    """Pack codes from -8 to 7, `[N, K]`, eight per word, the first in the lowest bits: int32 `[N, ceil(K / 8)]`."""
    raised = (codes + 8).to(torch.uint8)
    if raised.shape[1] % 8:
        raised = torch.nn.functional.pad(raised, (0, -raised.shape[1] % 8))
    return (raised[:, ::2] | raised[:, 1::2] << 4).contiguous().view(torch.int32)


INTEGER_FORMS: Mapping[str, IntegerForm] = {
    "INT8": IntegerForm(8, 0),
    "INT4_G32": IntegerForm(4, 32),
    "INT4_G128": IntegerForm(4, 128),
}
"""Forms by name, best first."""
