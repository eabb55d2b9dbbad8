"""Matrices in every quantised format of safetensors that is read, with the settings that say so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from quantised_samples import (
    Integers,
    awq,
    compressed_config,
    floats,
    fp8,
    gptq,
    int_quantized,
    integers,
    nf4,
    pack_quantized,
)
from weights_samples import write_directory

from penstock.models import gguf_dialect
from penstock.weights.bind import Binder
from penstock.weights.files import ModelFiles, open_model
from penstock.weights.packing import WeightFormat

N, K = 24, 256
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 128]}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
Tensors = dict[str, torch.Tensor]


def settings(section: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "llama", "quantization_config": section}


def opened(path: Path, tensors: Tensors, section: dict[str, Any]) -> ModelFiles:
    return open_model(write_directory(path, tensors, settings(section)), gguf_dialect)


def binder(files: ModelFiles, dtype: torch.dtype = torch.bfloat16) -> Binder:
    return Binder(files.source, dtype, "cpu", str(files.path), weight_format=WeightFormat.STORED)


def compressed(**changes: Any) -> dict[str, Any]:
    return compressed_config({**INT4, **changes}, format="pack-quantized")


STORED: dict[str, tuple[Integers, Any, dict[str, Any], str]] = {
    "gptq": (integers(N, K), gptq, GPTQ, "Z4"),
    "gptq_64": (integers(N, K, group=64), gptq, {**GPTQ, "group_size": 64}, "Z4"),
    "gptq_128": (integers(N, K, group=128, symmetric=True), gptq, {**GPTQ, "group_size": 128, "sym": True}, "Z4W"),
    "gptq_row": (integers(N, K, group=K), gptq, {**GPTQ, "group_size": -1}, "Z4W"),
    "gptq_short_group": (integers(N, 160, group=128), gptq, {**GPTQ, "group_size": 128}, "Z4"),
    "gptq_8": (integers(N, K, 8, symmetric=True), gptq, {**GPTQ, "bits": 8, "sym": True}, "Q8"),
    "gptq_8_zeros": (integers(N, K, 8), gptq, {**GPTQ, "bits": 8}, "F32"),
    "gptq_order": (integers(N, K, ordered=True), gptq, {**GPTQ, "desc_act": True}, "F32"),
    "gptq_16": (integers(N, K, group=16), gptq, {**GPTQ, "group_size": 16}, "F32"),
    "gptq_v2": (integers(N, K), lambda m, i: gptq(m, i, second=True), {**GPTQ, "checkpoint_format": "gptq_v2"}, "Z4"),
    "awq": (integers(N, K), awq, AWQ, "Z4"),
    "awq_128": (integers(N, K, group=128), awq, {**AWQ, "group_size": 128, "version": "GEMM"}, "Z4W"),
    "awq_8": (integers(N, K, 8), awq, {**AWQ, "bits": 8}, "F32"),
    "packed": (integers(N, K, dtype=torch.bfloat16), pack_quantized, compressed(), "Z4"),
    "packed_symmetric": (integers(N, K, group=128, symmetric=True), pack_quantized, compressed(group_size=128), "Z4W"),
    "packed_row": (integers(21, 132, group=132), pack_quantized, compressed(strategy="channel"), "F32"),
    "packed_8": (integers(N, K, 8, symmetric=True), pack_quantized, compressed(num_bits=8), "Q8"),
    "packed_order": (integers(N, K, ordered=True), pack_quantized, compressed(actorder="group"), "F32"),
    "bytes": (integers(N, K, 8, K, symmetric=True), int_quantized, compressed(num_bits=8, strategy="channel"), "Q8"),
    "bytes_zeros": (integers(N, K, 8, K), int_quantized, compressed(num_bits=8, strategy="channel"), "F32"),
}
"""A matrix, how it is laid out, what the config says, and the form that holds it in a model in float32."""


FLOATS = {
    "blocks": (floats(N, K, (16, 128)), {"weight_block_size": [16, 128]}),
    "cut_off": (floats(50, 200, (16, 128)), {"weight_block_size": [16, 128]}),
    "small_scales": (floats(N, K, (16, 128), torch.bfloat16), {"weight_block_size": [16, 128]}),
    "rows": (floats(N, K, (1, K)), {}),
    "all": (floats(N, K, (N, K)), {"activation_scheme": "static"}),
}
"""A matrix, and what the config says beside `FP8`'s method."""


def every_format() -> Iterator[tuple[str, Tensors, dict[str, Any], torch.Tensor]]:
    """For every case, NF4 too: name, tensors of the module `a`, `quantization_config`, and the numbers."""
    for name, (matrix, lay_out, section, _) in STORED.items():
        yield name, lay_out("a", matrix), section, matrix.numbers
    for name, (of_floats, changes) in FLOATS.items():
        yield f"fp8_{name}", fp8("a", of_floats), {"quant_method": "fp8", **changes}, of_floats.numbers
    for name, nested in (("nf4", False), ("nf4_nested", True)):
        tensors, numbers = nf4("a", 40, 208, nested=nested)
        yield name, tensors, BNB, numbers
