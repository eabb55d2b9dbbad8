"""The parts of quantised blocks: integer codes, and the scales that turn them into numbers.

Decides the one formula that turns parts into numbers. File readers know where parts lie in a block's bytes, and
`packed_blocks` where they lie in a packed weight; neither changes a part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BlockParts"]


@dataclass(frozen=True, slots=True, eq=False)
class BlockParts:
    """The parts of B blocks of E numbers, each split into S shares of E / S neighbours with their own scale.

    A number is `value * unit * scale * sub_scale + minimum`, or `... - minimum * sub_minimum` if shares have their own
    minima. Each product is exact in float32, so only the sum is rounded, once.

    Attributes:
        codes: uint8 `[B, E]`.
        scale: float16 `[B, 1]`; or uint8 `[B, 1]`, an E8M0 exponent that stands for half its usual value:
            `2 ** (code - 128)`.
        values: the value of each code; None if it is `code - bias`.
        bias: see `values`.
        zero: uint8 `[B, 1]`, the code that stands for zero, in place of `bias`; or None.
        sub_scales: int8 or uint8 `[B, S]`; None for a single share with factor 1.
        minimum: float16 `[B, 1]`, or None for 0.
        sub_minima: uint8 `[B, S]`, or None.
        unit: a power of two.
    """

    codes: Tensor
    scale: Tensor
    values: tuple[int, ...] | None = None
    bias: int = 0
    sub_scales: Tensor | None = None
    minimum: Tensor | None = None
    sub_minima: Tensor | None = None
    unit: float = 1.0
    zero: Tensor | None = None

    def numbers(self) -> Tensor:
        """The numbers that the parts stand for: float32 `[B, E]`."""
        scales = _scale_numbers(self.scale) * self.unit  # [B, 1]
        if self.sub_scales is not None:
            scales = scales * self.sub_scales.float()  # [B, S]
        shares = self._values().view(len(self.codes), scales.shape[1], -1) * scales[..., None]  # [B, S, E / S]
        if self.minimum is not None:
            minima = self.minimum.float()
            if self.sub_minima is None:
                shares += minima[..., None]
            else:
                shares -= (minima * self.sub_minima.float())[..., None]
        return shares.flatten(1)

    def _values(self) -> Tensor:
        if self.values is None:
            return self.codes.float() - (self.bias if self.zero is None else self.zero.float())
        table = torch.tensor(self.values, dtype=torch.float32)
        return table.index_select(0, self.codes.reshape(-1).int()).view(self.codes.shape)


def _scale_numbers(scale: Tensor) -> Tensor:
    if scale.dtype == torch.float16:
        return scale.float()
    exponents = scale.int()
    normal, below = (exponents - 1) << 23, 0x00200000 << exponents.clamp(max=1)  # codes 0 and 1 are subnormal
    return torch.where(exponents < 2, below, normal).view(torch.float32)
