"""Damaged files of quantised formats: each loads the same numbers or is refused by name; no damage ends the process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from block_samples import KINDS
from mixed_gguf import Q4_K_M, part_path, shapes, write_mixed
from mutations import COUNTS, check_message, check_mutations, damage_bytes
from quantised_cases import (
    AWQ,
    BNB,
    FP8,
    GPTQ,
    Tensors,
    binder,
    compressed,
    every_format,
    opened,
    settings,
)
from quantised_samples import awq, floats, fp8, gptq, integers, nf4, pack_quantized
from weights_samples import Tiny, weights, write_directory, write_gguf, write_shards

from penstock.contract.errors import ModelFileError
from penstock.kernels.packed_linear import PackedWeight, unpack
from penstock.models import gguf_dialect
from penstock.weights.bind import Binder
from penstock.weights.files import open_model
from penstock.weights.gguf_header import read_gguf_header
from penstock.weights.packing import WeightFormat

FORMATS = {name: rest for name, *rest in every_format()}
QUICK = ("gptq_order", "awq", "packed", "fp8_blocks", "nf4_nested")
"""The formats of which `make test` damages some files."""


def quick_and_deep(names: Mapping[str, Any]) -> list[Any]:
    """Each name with the mutations of a deep test, and some also with those of a quick one."""
    quick, deep = COUNTS
    return [(name, quick) for name in QUICK] + [pytest.param(name, *deep.values, marks=deep.marks) for name in names]


def load_packed(path: Path, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Load matrices in the form that serves them; what the form holds, and what is not packed, as float32."""
    files = open_model(path, gguf_dialect)
    taking = Binder(files.source, torch.float32, "cpu", str(path), weight_format=WeightFormat.STORED)
    loaded = {}
    for name, shape in wanted.items():
        if len(shape) == 2:
            weight = taking.take_linear([(name, (shape[0], shape[1]))])
            packed = isinstance(weight, PackedWeight)
            loaded[name] = unpack(weight) if packed else files.source.read(name, torch.float32, "cpu")
        else:
            loaded[name] = taking.take(name, shape, torch.float32)
    taking.finish()
    return loaded


def numbers_of(path: Path) -> dict[str, torch.Tensor]:
    source = open_model(path, gguf_dialect).source
    return {name: source.read(name, torch.float32, "cpu") for name in source.names()}


# ---- safetensors


@pytest.mark.parametrize(("name", "mutations"), quick_and_deep(FORMATS))
def test_damaged_headers_of_quantised_safetensors_load_the_same_or_are_refused(tmp_path, name, mutations):
    tensors, section, numbers = FORMATS[name]
    write_directory(tmp_path / "m", contiguous(tensors), settings(section))
    target = tmp_path / "m" / "model.safetensors"
    end = 8 + int.from_bytes(target.read_bytes()[:8], "little")
    check_mutations(tmp_path / "m", target, end, {"a.weight": numbers}, mutations, load=load_packed)


@pytest.mark.parametrize(("name", "mutations"), quick_and_deep(FORMATS))
def test_damaged_settings_of_quantised_safetensors_load_the_same_or_are_refused(tmp_path, name, mutations):
    tensors, section, numbers = FORMATS[name]
    write_directory(tmp_path / "m", contiguous(tensors), settings(section))
    target = tmp_path / "m" / "config.json"
    end = len(target.read_bytes())
    check_mutations(tmp_path / "m", target, end, {"a.weight": numbers}, mutations, load=load_packed)


@pytest.mark.parametrize(("name", "mutations"), quick_and_deep(FORMATS))
def test_damaged_numbers_of_quantised_safetensors_never_crash(tmp_path, name, mutations):
    """The formats carry no checksums, so other numbers may come out; what names groups or sizes is checked."""
    tensors, section, numbers = FORMATS[name]
    write_directory(tmp_path, contiguous(tensors), settings(section))
    target, random = tmp_path / "model.safetensors", np.random.default_rng(mutations)
    original = target.read_bytes()
    start = 8 + int.from_bytes(original[:8], "little")
    rows, inputs = numbers.shape
    loaded = 0
    for number in range(mutations):
        target.write_bytes(damage_bytes(original, start, random))
        dtype = (torch.float32, torch.bfloat16)[number % 2]
        try:
            weight = binder(open_model(tmp_path, gguf_dialect), dtype).take_linear([("a.weight", (rows, inputs))])
        except ModelFileError as refused:
            check_message(str(refused), tmp_path)
        else:
            assert weight.matmul(None, torch.ones(1, inputs, dtype=dtype)).shape == (1, rows)
            loaded += 1
    assert loaded


@pytest.mark.parametrize("mutations", COUNTS)
@pytest.mark.parametrize("damaged", ["model.safetensors.index.json", "model-1.safetensors"])
def test_damaged_shards_load_the_same_or_are_refused(tmp_path, damaged, mutations):
    matrix = integers(24, 256)
    halves: list[Tensors] = [{}, {}]
    for place, (name, tensor) in enumerate(sorted(gptq("a", matrix).items())):
        halves[place % 2][name] = tensor
    shards = {f"model-{i}.safetensors": half for i, half in enumerate(halves)}
    write_shards(tmp_path, shards, settings(GPTQ))
    target = tmp_path / damaged
    raw = target.read_bytes()
    end = len(raw) if damaged.endswith("json") else 8 + int.from_bytes(raw[:8], "little")
    check_mutations(tmp_path, target, end, {"a.weight": matrix.numbers}, mutations, load=load_packed)


ONE = integers(16, 64)
CASES: list[tuple[Tensors, dict[str, Any]]] = [
    (gptq("a", ONE), GPTQ),
    (awq("a", ONE), AWQ),
    (pack_quantized("a", ONE), compressed()),
    (fp8("a", floats(16, 64, (8, 32))), {**FP8}),
    (nf4("a", 16, 64, nested=True)[0], BNB),
]
VALUES: list[Any] = [None, True, -1, 0, 4, 8, 128, 1 << 40, "gptq", "gemm", [1, 2], {}, {"a": 1}, 1e300, "int"]


@pytest.mark.parametrize("mutations", COUNTS)
@pytest.mark.parametrize("seed", range(2))
def test_any_settings_and_tensors_are_read_or_refused(tmp_path, seed, mutations):
    """Values of the config swapped, and parts left out or cut: an error of ours, or numbers."""
    random = np.random.default_rng(seed)
    outcomes = set()
    for _ in range(mutations):
        tensors, section = CASES[random.integers(len(CASES))]
        changed = {**section, str(random.choice(list(section))): VALUES[random.integers(len(VALUES))]}
        kept = {name: tensor.contiguous() for name, tensor in tensors.items() if random.random() > 0.1}
        cut = str(random.choice(list(tensors)))
        if random.random() < 0.3 and cut in kept:
            kept[cut] = kept[cut].flatten()[: int(random.integers(0, 99))].clone()
        if not kept:
            continue
        try:
            source = opened(tmp_path, kept, changed).source
            for name in source.names():
                source.read(name, torch.float32, "cpu")
            outcomes.add("read")
        except ModelFileError as error:
            check_message(str(error), tmp_path)
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


def contiguous(tensors: Tensors) -> Tensors:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


# ---- GGUF

MATRICES = [name.removesuffix(".weight") for name, shape in shapes().items() if len(shape) == 2]
EVERY_KIND = {"": "Q4_K", **dict(zip(MATRICES, KINDS, strict=True))}
MIXTURES = {"Q4_K_M": Q4_K_M, "every kind": EVERY_KIND}


@pytest.mark.parametrize(
    ("mixture", "mutations"),
    [("Q4_K_M", 20)] + [pytest.param(name, 500, marks=pytest.mark.deep) for name in MIXTURES],
)
def test_damaged_headers_of_mixed_kinds_load_the_same_or_are_refused(tmp_path, mixture, mutations):
    target = write_mixed(tmp_path / "tiny.gguf", MIXTURES[mixture])
    end = read_gguf_header(target).data_start
    check_mutations(target, target, end, numbers_of(target), mutations, load=load_packed)


@pytest.mark.parametrize("mutations", [20, COUNTS[1]])
@pytest.mark.parametrize("part", [1, 2])
def test_damaged_headers_of_a_split_file_load_the_same_or_are_refused(tmp_path, part, mutations):
    first = write_mixed(tmp_path / "tiny.gguf", Q4_K_M, parts=2)
    target = part_path(tmp_path / "tiny.gguf", part, 2)
    end = read_gguf_header(target).data_start
    check_mutations(first, target, end, numbers_of(first), mutations, folder=tmp_path, load=load_packed)


@pytest.mark.deep
def test_damaged_headers_of_experts_load_the_same_or_are_refused(tmp_path):
    tiny = Tiny("qwen3moe")
    kinds = {"experts": "MXFP4", "": "Q8_0", "mlp.gate.": "F32"}
    target = write_gguf(tmp_path / "tiny.gguf", tiny, weights(tiny), kinds)
    check_mutations(target, target, read_gguf_header(target).data_start, numbers_of(target), 500)


@pytest.mark.parametrize(
    ("mixture", "mutations"),
    [("Q4_K_M", 2)] + [pytest.param(name, 250, marks=pytest.mark.deep) for name in MIXTURES],
)
def test_damaged_blocks_of_mixed_kinds_never_crash(tmp_path, mixture, mutations):
    """Other numbers may come out, infinite ones too: then a product has them, or a scale is refused."""
    target = write_mixed(tmp_path / "tiny.gguf", MIXTURES[mixture])
    original, start = target.read_bytes(), read_gguf_header(target).data_start
    random = np.random.default_rng(3)
    for _ in range(mutations):
        damaged = bytearray(original)
        for at in random.integers(start, len(damaged), 200):
            damaged[at] = int(random.integers(0, 256))
        target.write_bytes(damaged)
        source = open_model(target, gguf_dialect).source
        taking = Binder(source, torch.float32, "cpu", str(target), weight_format=WeightFormat.STORED)
        for name in sorted(source.names()):
            shape = source.shape(name)
            if len(shape) == 2:
                check_product(taking, name, shape)


def check_product(taking: Binder, name: str, shape: tuple[int, ...]) -> None:
    try:
        weight = taking.take_linear([(name, (shape[0], shape[1]))])
    except ModelFileError as refused:
        message = str(refused)
    else:
        message = name
        assert weight.matmul(None, torch.ones(1, shape[1])).shape == (1, shape[0])
    assert name in message


def test_every_kind_of_block_that_files_hold_is_among_the_damaged(tmp_path):
    target = write_mixed(tmp_path / "tiny.gguf", EVERY_KIND)
    found = {tensor.tensor_type.name for tensor in gguf.GGUFReader(target).tensors}
    assert found == {*KINDS, "F32"}
