"""Random quantised matrices, what they stand for, and how the formats of safetensors lay them out.

Packed number by number, as the formats' papers and tools say; nothing here uses the loader.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

WORD = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The one of eight outputs that nibble i of a word of AWQ is for."""


@dataclass(frozen=True)
class Integers:
    """Codes `[N, K]`, scales and zero points `[N, G]`, the group of each input `[K]`."""

    codes: np.ndarray
    scales: torch.Tensor
    zeros: np.ndarray
    order: np.ndarray
    bits: int
    group: int

    @property
    def numbers(self) -> torch.Tensor:
        """The numbers they stand for, float32; computed in float64, where nothing is rounded."""
        codes = torch.from_numpy((self.codes - self.zeros[:, self.order]).astype(np.float64))
        return (codes * self.scales.double()[:, torch.from_numpy(self.order)]).float()


def integers(
    outputs: int,
    inputs: int,
    bits: int = 4,
    group: int = 32,
    *,
    symmetric: bool = False,
    ordered: bool = False,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> Integers:
    """Random codes; scales of the size that weights have. Zero points fit the first format of GPTQ: 1 and above."""
    random = np.random.default_rng(seed)
    groups = -(-inputs // group)
    zeros = random.integers(1, 1 << bits, (outputs, groups))
    if symmetric:
        zeros[:] = 1 << (bits - 1)
    order = np.arange(inputs) // group
    if ordered:
        order = random.permutation(order)
    scales = torch.from_numpy(random.uniform(0.3, 1, (outputs, groups)) / (1 << (bits + 2)))
    codes = random.integers(0, 1 << bits, (outputs, inputs))
    return Integers(codes, scales.to(dtype), zeros, order, bits, group)


def words(codes: np.ndarray, bits: int) -> torch.Tensor:
    """Pack codes `[R, C]` into words of 32 bits, the first in the lowest bits: int32 `[R, words]`."""
    of_word = WORD // bits
    filled = np.zeros((codes.shape[0], -(-codes.shape[1] // of_word) * of_word), dtype=np.int64)
    filled[:, : codes.shape[1]] = codes
    out = np.zeros((codes.shape[0], filled.shape[1] // of_word), dtype=np.int64)
    for i in range(of_word):
        out |= filled[:, i::of_word] << (bits * i)
    return torch.from_numpy(out.astype(np.uint32).view(np.int32).copy())


def gptq(module: str, matrix: Integers, *, second: bool = False) -> dict[str, torch.Tensor]:
    """The tensors as AutoGPTQ and gptqmodel write them, in the second format or the first."""
    stored = matrix.zeros.T if second else matrix.zeros.T - 1
    return {
        f"{module}.qweight": words(matrix.codes, matrix.bits).T.contiguous(),
        f"{module}.qzeros": words(stored, matrix.bits),
        f"{module}.scales": matrix.scales.T.contiguous(),
        f"{module}.g_idx": torch.from_numpy(matrix.order.astype(np.int32)),
    }


def awq(module: str, matrix: Integers) -> dict[str, torch.Tensor]:
    """As AutoAWQ writes it for its gemm kernels."""

    def reordered(rows: np.ndarray) -> np.ndarray:
        eights = rows.reshape(len(rows), -1, 8)
        return eights[:, :, AWQ_ORDER].reshape(rows.shape) if matrix.bits == 4 else rows

    return {
        f"{module}.qweight": words(reordered(matrix.codes.T), matrix.bits),
        f"{module}.qzeros": words(reordered(matrix.zeros.T), matrix.bits),
        f"{module}.scales": matrix.scales.T.contiguous(),
    }


def pack_quantized(module: str, matrix: Integers) -> dict[str, torch.Tensor]:
    """As compressed-tensors packs integers in words, with zero points unless they are all half of the codes."""
    found = {
        f"{module}.weight_packed": words(matrix.codes, matrix.bits),
        f"{module}.weight_scale": matrix.scales,
        f"{module}.weight_shape": torch.tensor(matrix.codes.shape),
    }
    if (matrix.zeros != 1 << (matrix.bits - 1)).any():
        found[f"{module}.weight_zero_point"] = words(matrix.zeros.T, matrix.bits).T.contiguous()
    if (matrix.order != np.arange(len(matrix.order)) // matrix.group).any():
        found[f"{module}.weight_g_idx"] = torch.from_numpy(matrix.order.astype(np.int32))
    return found


def int_quantized(module: str, matrix: Integers) -> dict[str, torch.Tensor]:
    """As compressed-tensors keeps integers of 8 bits."""
    found = {
        f"{module}.weight": torch.from_numpy((matrix.codes - 128).astype(np.int8)),
        f"{module}.weight_scale": matrix.scales,
    }
    if (matrix.zeros != 128).any():
        found[f"{module}.weight_zero_point"] = torch.from_numpy((matrix.zeros - 128).astype(np.int8))
    return found


@dataclass(frozen=True)
class Floats:
    """Numbers in E4M3 `[N, K]`, with one scale for each block of rows and inputs."""

    codes: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]

    @property
    def numbers(self) -> torch.Tensor:
        """The numbers they stand for: float32, rounded once."""
        rows, inputs = self.codes.shape
        down, across = torch.arange(rows) // self.block[0], torch.arange(inputs) // self.block[1]
        return (self.codes.double() * self.scales.double()[down][:, across]).float()


def floats(
    outputs: int, inputs: int, block: tuple[int, int], dtype: torch.dtype = torch.float32, seed: int = 0
) -> Floats:
    """Random finite codes."""
    random = np.random.default_rng(seed)
    codes = torch.from_numpy(random.integers(0, 127, (outputs, inputs), dtype=np.uint8))
    codes |= torch.from_numpy(random.integers(0, 2, (outputs, inputs), dtype=np.uint8) << 7)
    shape = (-(-outputs // block[0]), -(-inputs // block[1]))
    scales = torch.from_numpy(random.uniform(0.5, 1, shape) / 4096).to(dtype)
    return Floats(codes.view(torch.float8_e4m3fn), scales, block)


def fp8(module: str, matrix: Floats, ending: str = "weight_scale_inv") -> dict[str, torch.Tensor]:
    """As DeepSeek's checkpoints have it, or with another name of the scales."""
    return {f"{module}.weight": matrix.codes, f"{module}.{ending}": matrix.scales}


NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Dettmers et al. 2023, appendix E."""


def nf4(
    module: str, outputs: int, inputs: int, *, nested: bool = False, seed: int = 0
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """As bitsandbytes writes it, and what it stands for, float32."""
    random = np.random.default_rng(seed)
    count, block, outer = outputs * inputs, 64, 256
    codes = random.integers(0, 16, count)
    stored = (codes[0::2] << 4 | codes[1::2]).astype(np.uint8)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [outputs, inputs]}
    table = torch.tensor(NF4)
    found = {f"{module}.weight": torch.from_numpy(stored)[:, None], f"{module}.weight.quant_map": table}
    blocks = -(-count // block)
    largest = torch.from_numpy(random.uniform(0.01, 0.2, blocks)).float()
    found[f"{module}.weight.absmax"] = largest
    if nested:
        indices = torch.from_numpy(random.integers(0, 256, blocks, dtype=np.uint8))
        inner = torch.linspace(-1, 1, 256)
        factors = torch.from_numpy(random.uniform(0.01, 0.2, -(-blocks // outer))).float()
        state |= {"nested_blocksize": outer, "nested_offset": 0.25, "nested_dtype": "float32"}
        found |= {
            f"{module}.weight.absmax": indices,
            f"{module}.weight.nested_quant_map": inner,
            f"{module}.weight.nested_absmax": factors,
        }
        largest = inner[indices.int()] * factors[torch.arange(blocks) // outer] + 0.25
    raw = json.dumps(state).encode()
    found[f"{module}.weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(raw), dtype=torch.uint8)
    numbers = table[torch.from_numpy(codes)] * largest[torch.arange(count) // block]
    return found, numbers.view(outputs, inputs)


def compressed_config(weights: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": None, "output_activations": None}
    found = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    return {**found, **changes}


def widened(matrix: Integers) -> Integers:
    """The same with scales in float32."""
    return replace(matrix, scales=matrix.scales.float())
