"""A model from a quantised checkpoint is transformers' model of the numbers that the checkpoint stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import compiled_kernels as here
import pytest
import torch
from quantised_samples import awq, compressed_config, floats, fp8, gptq, int_quantized, integers, nf4, pack_quantized
from safetensors.torch import load_file, save_file
from tiny_checkpoints import forget_references, reference_logits, write_checkpoint

from penstock import models
from penstock.kernels import native
from penstock.kernels.torch_backend import TorchBackend
from penstock.models import gguf_dialect, load
from penstock.nn.compiled import why_not_compiled
from penstock.nn.dense import DenseAttention
from penstock.nn.program import Program
from penstock.nn.reference import ReferenceExecutor
from penstock.weights.bind import Binder
from penstock.weights.files import open_model
from penstock.weights.headers_only import META, HeadersOnly
from penstock.weights.packing import WeightFormat

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16, "vocab_size": 128}
TOKENS = list(range(3, 63))
Stored = tuple[dict[str, torch.Tensor], torch.Tensor]


def in_gptq(module: str, outputs: int, inputs: int, seed: int) -> Stored:
    matrix = integers(outputs, inputs, group=32, seed=seed)
    return gptq(module, matrix), matrix.numbers


def in_awq(module: str, outputs: int, inputs: int, seed: int) -> Stored:
    matrix = integers(outputs, inputs, group=64, seed=seed)
    return awq(module, matrix), matrix.numbers


def packed(module: str, outputs: int, inputs: int, seed: int) -> Stored:
    """Of several widths: keys have 8 bits, and the first layer's output has an order of its own."""
    bits, ordered = 8 if "k_proj" in module else 4, module == "model.layers.0.self_attn.o_proj"
    matrix = integers(outputs, inputs, bits, symmetric=bits == 8, ordered=ordered, dtype=torch.bfloat16, seed=seed)
    return pack_quantized(module, matrix), matrix.numbers


def in_bytes(module: str, outputs: int, inputs: int, seed: int) -> Stored:
    matrix = integers(outputs, inputs, 8, inputs, symmetric=True, dtype=torch.bfloat16, seed=seed)
    return int_quantized(module, matrix), matrix.numbers


def in_fp8(module: str, outputs: int, inputs: int, seed: int) -> Stored:
    matrix = floats(outputs, inputs, (64, 32), seed=seed)
    return fp8(module, matrix), matrix.numbers


def in_nf4(module: str, outputs: int, inputs: int, seed: int) -> Stored:
    return nf4(module, outputs, inputs, nested=True, seed=seed)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
INT = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32}
FORMATS: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "gptq": (in_gptq, GPTQ, ["INT4"]),
    "awq": (in_awq, {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, ["INT4"]),
    "packed": (packed, compressed_config(INT, format="pack-quantized"), ["INT4", "INT8"]),
    "bytes": (in_bytes, compressed_config({**INT, "num_bits": 8}, format="int-quantized"), ["INT8"]),
    "fp8_narrow": (in_fp8, {"quant_method": "fp8", "weight_block_size": [64, 32]}, []),
    "nf4": (in_nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, []),
}
CASES = ["packed", *(pytest.param(name, marks=pytest.mark.deep) for name in FORMATS if name != "packed")]


LATENT = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 64, "v_head_dim": 32}


@pytest.fixture(params=[*CASES, "transposed"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path, list[str]]:
    """A checkpoint with its numbers, the quantised one, and the kinds of its blocks; heads and embeddings are plain."""
    transposed = request.param == "transposed"  # what makes keys of a latent is multiplied so
    lay_out, section, kinds = FORMATS["packed" if transposed else request.param]
    if transposed:
        plain, chosen = write_checkpoint(tmp_path / "plain", "deepseek_v2", "one_head_dense_but_last", **LATENT), "kv_b"
    else:
        plain, chosen = write_checkpoint(tmp_path / "plain", "llama", "one_to_one_tied_linear", **SIZES), ""
    numbers, stored = load_file(plain / "model.safetensors"), {}
    for seed, (name, tensor) in enumerate(sorted(numbers.items())):
        if f"{chosen}_proj.weight" in name:
            tensors, numbers[name] = lay_out(name.removesuffix(".weight"), *tensor.shape, seed)
            stored |= tensors
        else:
            stored[name] = tensor
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    forget_references()
    quantised = tmp_path / "quantised"
    quantised.mkdir()
    save_file(stored, quantised / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    return plain, quantised, ["INT4"] if transposed else kinds


def logits(executor: ReferenceExecutor) -> torch.Tensor:
    ids = torch.tensor(TOKENS)
    return executor.logits(executor.forward(ids, torch.arange(len(TOKENS)), DenseAttention())).float()


def built(path: Path, dtype: torch.dtype, form: WeightFormat) -> tuple[Program, Binder]:
    files = open_model(path, gguf_dialect)
    binder = Binder(files.source, dtype, "cpu", str(path), weight_format=form)
    return load(files.config, binder, str(path)), binder


def test_logits_are_those_of_the_numbers(case):
    plain, quantised, kinds = case
    wanted = reference_logits(plain, TOKENS)
    program, _ = built(quantised, torch.float32, WeightFormat.DENSE)
    ours = logits(ReferenceExecutor(program, torch.float32, TorchBackend()))
    assert (ours - wanted).abs().max() < 1e-4 * max(1.0, float(wanted.abs().max()))
    if not native.available():
        return
    program, binder = built(quantised, torch.bfloat16, WeightFormat.STORED)
    assert list(binder.formats) == ["bfloat16", *kinds]
    here.reset()
    assert why_not_compiled(program, torch.bfloat16, here.backend()) is None
    rounded = logits(ReferenceExecutor(program, torch.bfloat16, here.backend()))
    assert (rounded - wanted).square().mean() < 3e-3 * wanted.square().mean()
    planned = Binder(
        HeadersOnly(open_model(quantised, gguf_dialect).source),
        torch.bfloat16,
        META,
        "m",
        weight_format=WeightFormat.STORED,
    )
    models.load(open_model(quantised, gguf_dialect).config, planned, "m")
    assert planned.bytes == binder.bytes
