"""The cases of products with packed weights, and of lookups of their rows.

Decides what the weights are: random, with rotating copies so that none is in the cache when it is used again, as in a
model larger than the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from penstock.bench.kernel_case import HIDDEN, INNER, ROWS, VOCABULARY, Case
from penstock.kernels.block_parts import BlockParts
from penstock.kernels.cpu_backend import CpuBackend
from penstock.kernels.native import Cpu
from penstock.kernels.packed_linear import PackedKind, embedding_rows, packed_gated_linear, packed_linear
from penstock.kernels.packed_parts import pack_parts
from penstock.kernels.packed_weight import (
    PackedWeight,
    pack_bf16,
    pack_f32,
    quantize_int4,
    quantize_int8,
)
from penstock.kernels.weight_memory import WeightMemory

__all__ = [
    "NUMBER_KINDS",
    "activations_dtype",
    "arithmetic_of",
    "copied_weight",
    "gated_cases",
    "linear_cases",
    "lookup_cases",
    "random_weight",
    "residual_cases",
]

LINEAR_SHAPES = ((HIDDEN, 2 * INNER), (2048, 5632))
"""Inputs and outputs: the widest layer of the default model, and one of a model of 1.1 billion weights."""

COLD_BYTES = 96 << 20
"""Bytes of weights in rotation: more than the caches of most machines hold."""

_PACK: dict[str, Callable[[Tensor], PackedWeight]] = {
    "bf16": pack_bf16,
    "q4": quantize_int4,
    "q8": quantize_int8,
    "f32": pack_f32,
}
_BLOCK_INPUTS = 256


def _q4_k_parts(blocks: int) -> BlockParts:
    scales, minima = torch.randint(64, (2, blocks, 8), dtype=torch.uint8)
    half = torch.full((blocks, 1), 1e-4, dtype=torch.float16)
    return BlockParts(_codes(blocks, 4), half, sub_scales=scales, minimum=half, sub_minima=minima)


def _q6_k_parts(blocks: int) -> BlockParts:
    scales = torch.randint(-64, 64, (blocks, 16), dtype=torch.int8)
    half = torch.full((blocks, 1), 1e-4, dtype=torch.float16)
    return BlockParts(_codes(blocks, 6), half, bias=32, sub_scales=scales)


def _codes(blocks: int, bits: int) -> Tensor:
    return torch.randint(1 << bits, (blocks, _BLOCK_INPUTS), dtype=torch.uint8)


_PARTS: dict[str, tuple[PackedKind, Callable[[int], BlockParts]]] = {
    "q4k": (PackedKind.Q4K, _q4_k_parts),
    "q6k": (PackedKind.Q6K, _q6_k_parts),
}
"""Random parts of a number of blocks of GGUF's Q4_K and Q6_K, the two forms that make up most of a Q4_K_M file."""

NUMBER_KINDS = tuple(_PACK)
"""The kinds that round any number of inputs. The others take whole blocks of 256 inputs."""


def random_weight(kind: str, outputs: int, inputs: int) -> PackedWeight:
    """A weight of random numbers as large as a layer's; of random blocks for a kind outside `NUMBER_KINDS`."""
    if kind in _PACK:
        return _PACK[kind](torch.randn(outputs, inputs) * inputs**-0.5)
    form, parts = _PARTS[kind]
    return pack_parts(form, [parts(outputs * inputs // _BLOCK_INPUTS)], outputs, inputs)


def _kinds(inputs: int) -> tuple[str, ...]:
    """The kinds that can hold rows of `inputs` inputs."""
    return (*_PACK, *(() if inputs % _BLOCK_INPUTS else _PARTS))


def arithmetic_of(kind: str) -> str:
    """The arithmetic whose limit applies: `fp32`, `bf16` or `int8`."""
    return {"bf16": "bf16", "f32": "fp32"}.get(kind, "int8")


def activations_dtype(kind: str) -> torch.dtype:
    """The dtype of activations in a model with such weights."""
    return torch.float32 if kind == "f32" else torch.bfloat16


class _Turns:
    """Copies of a weight, used in rotation."""

    def __init__(self, copy: Callable[[], PackedWeight], nbytes: int) -> None:
        self._copies = [copy() for _ in range(-(-COLD_BYTES // nbytes))]
        self._turn = 0

    def next(self) -> PackedWeight:
        self._turn = (self._turn + 1) % len(self._copies)
        return self._copies[self._turn]


def copied_weight(weight: PackedWeight, memory: WeightMemory) -> PackedWeight:
    """A copy of the weight in memory of its own."""
    return replace(weight, data=memory.take(weight.nbytes).copy_(weight.data))


def _project(product: Callable[[Tensor, PackedWeight], Tensor], x: Tensor, turns: _Turns) -> Tensor:
    return product(x, turns.next())


def _product_cases(
    backend: CpuBackend, *, kernel: str, product: Callable[..., Tensor], residual: bool = False
) -> Iterator[Case]:
    for inputs, outputs in LINEAR_SHAPES:
        for kind in _kinds(inputs):
            weight = random_weight(kind, outputs, inputs)
            turns = _Turns(partial(copied_weight, weight, WeightMemory()), weight.nbytes)
            for rows in ROWS:
                x = torch.randn(rows, inputs).to(activations_dtype(kind))
                form, ops = f"{kind} {inputs}->{outputs}", 2 * rows * inputs * outputs
                ours = partial(product, backend.cpu)
                added = partial(ours, residual=torch.randn(rows, outputs)) if residual else ours
                yield Case(
                    kernel, form, rows, weight.nbytes, ops, arithmetic_of(kind),
                    partial(_project, added, x, turns),
                )  # fmt: skip


def lookup_cases(backend: CpuBackend) -> Iterator[Case]:
    """Rows of an embedding table."""
    for kind in _PACK:
        table = random_weight(kind, VOCABULARY, HIDDEN)
        for rows in ROWS:
            ids = torch.randint(VOCABULARY, (rows,))
            moved = rows * (table.nbytes // VOCABULARY + HIDDEN * torch.float32.itemsize)
            yield Case(
                "lookup",
                f"{kind} {HIDDEN} wide",
                rows,
                moved,
                0,
                "",
                partial(embedding_rows, ids, table, cpu=backend.cpu),
            )


def _packed_product(cpu: Cpu, x: Tensor, weight: PackedWeight, residual: Tensor | None = None) -> Tensor:
    return packed_linear(x, weight, None, residual, cpu=cpu)


def linear_cases(backend: CpuBackend) -> Iterator[Case]:
    """Products with every kind of weight."""
    return _product_cases(backend, kernel="linear", product=_packed_product)


def residual_cases(backend: CpuBackend) -> Iterator[Case]:
    """The same with a residual added."""
    return _product_cases(backend, kernel="linear, residual", product=_packed_product, residual=True)


def gated_cases(backend: CpuBackend) -> Iterator[Case]:
    """Products that compute gates and the gated values together."""
    return _product_cases(backend, kernel="linear, gated", product=packed_gated_linear)
