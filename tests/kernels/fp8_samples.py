"""Rows of FP8 for kernels: scales and codes of random numbers."""

from __future__ import annotations

import torch

from penstock.kernels.packed_weight import pack_fp8


def fp8_rows(weight: torch.Tensor) -> torch.Tensor:
    """`[N, K]` as `pack_fp8` takes it: the largest of 128 inputs of an output becomes 448."""
    outputs, inputs = weight.shape
    units = -(-inputs // 128)
    numbers = torch.nn.functional.pad(weight.float(), (0, units * 128 - inputs)).view(outputs, units, 128)
    scales = (numbers.abs().amax(dim=2) / 448).clamp(min=1e-9)
    codes = (numbers / scales[..., None]).to(torch.float8_e4m3fn).view(torch.uint8).view(outputs, -1)
    return torch.cat((scales.view(torch.uint8), codes[:, :inputs]), dim=1)


def quantize_fp8(weight, memory=None):
    return pack_fp8(fp8_rows(weight), *weight.shape, memory)
