"""Device, dtype, threads and memory: what `auto` and 0 mean, on machines that are only described."""

from __future__ import annotations

import os

import pytest
import torch

from needs import COMPILED
from penstock.contract.errors import ConfigError
from penstock.exec import device as room
from penstock.kernels import native
from penstock.weights.packing import WeightFormat

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def test_cuda_without_a_device_is_refused_by_option(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError) as refused:
        room.resolve_device("cuda")
    assert refused.value.option == "device"
    assert room.resolve_device("auto") == room.resolve_device("cpu") == CPU


def test_auto_takes_a_cuda_device_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert room.resolve_device("auto") == room.resolve_device("cuda") == CUDA
    assert room.resolve_device("cpu") == CPU


@pytest.mark.parametrize(
    ("stored", "good", "expected"),
    [
        ("bfloat16", {FP32, BF16}, BF16),
        ("bfloat16", {FP32}, FP32),
        ("float32", {FP32, BF16}, FP32),
        ("float16", {FP32, BF16}, FP32),
        ("float16", {FP32, FP16}, FP16),
        ("float32", {BF16}, BF16),  # compiled kernels: quick, and exact bit for bit
        ("float16", {BF16}, BF16),
        ("quantised", {BF16}, BF16),
        ("quantised", {FP32, BF16}, BF16),
        ("quantised", {FP32}, FP32),
    ],
)
def test_auto_dtype_is_the_checkpoints_where_the_device_is_good_at_it(stored, good, expected):
    assert room.resolve_dtype("auto", stored, CPU, frozenset(good)) is expected


def test_a_named_dtype_is_taken_except_float16_on_a_cpu():
    assert room.resolve_dtype("bfloat16", "float32", CPU, frozenset({FP32})) is BF16
    assert room.resolve_dtype("float16", "float32", CUDA, frozenset({FP32})) is FP16
    with pytest.raises(ConfigError) as refused:
        room.resolve_dtype("float16", "float16", CPU, frozenset({FP32, FP16}))
    assert refused.value.option == "dtype"


@pytest.mark.parametrize(
    ("cpuinfo", "good"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 avx512_bf16 sse\n", {FP32, BF16}),
        ("flags : fpu amx_bf16\n", {FP32, BF16}),
        ("Features\t: fp asimd i8mm bf16\n", {FP32, BF16}),
        ("flags : fpu avx2 avx512f\n", {FP32}),
        ("model name : avx512_bf16\n", {FP32}),
        (None, {FP32}),
    ],
)
def test_a_cpu_is_good_at_bfloat16_with_instructions_for_it_or_with_compiled_kernels(tmp_path, cpuinfo, good):
    file = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        file.write_text(cpuinfo)
    assert room.good_dtypes(CPU, False, file) == good
    assert room.good_dtypes(CPU, True, file) == {BF16}


@pytest.mark.skipif(not native.available(), reason=COMPILED)
def test_a_backend_is_what_the_device_and_the_installation_allow(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(room, "find_spec", lambda name: None)
    by_torch = room.open_backend(cuda, 2)
    assert (by_torch.name, by_torch.device) == ("torch", cuda)
    assert by_torch.why_torch() == "the model runs on CUDA, and Triton is not installed"
    compiled = room.open_backend(CPU, 2)
    assert (compiled.name, compiled.isa, compiled.threads, compiled.exact) == ("cpu", native.isas()[0], 2, True)
    assert room.open_backend(CPU, 1, "portable").isa == "portable"
    by_torch = room.open_backend(CPU, 1, "torch")
    assert (by_torch.name, by_torch.isa, by_torch.threads, by_torch.exact) == ("torch", "torch", 0, False)
    monkeypatch.setattr(native, "module", None)
    assert room.open_backend(CPU, 2).why_torch() == "this was installed without compiled kernels"


def test_on_cuda_triton_computes_where_it_is_installed():
    pytest.importorskip("triton")
    cuda = torch.device("cuda")
    assert (room.open_backend(cuda, 2).name, room.open_backend(cuda, 2, "torch").name) == ("cuda", "torch")


def test_an_instruction_set_that_cannot_run_is_refused_by_what_named_it(monkeypatch):
    monkeypatch.setattr(native, "isas", lambda: ["avx2", "portable"])
    with pytest.raises(ConfigError, match=r"PENSTOCK_ISA.*'mmx'.*avx2, portable"):
        room.open_backend(CPU, 1, "mmx")
    monkeypatch.setattr(native, "isas", list)
    with pytest.raises(ConfigError, match=r"isa: .*without compiled kernels"):
        room.open_backend(CPU, 1, "avx2", "isa")


def test_threads_are_as_told_or_one_a_core_within_the_containers_quota(monkeypatch, tmp_path):
    assert room.compute_threads(3) == 3
    monkeypatch.setattr(room, "_physical_cores", lambda: 8)
    monkeypatch.setattr(room, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert room.compute_threads(0) == 8
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert room.compute_threads(0) == 2
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert room.compute_threads(0) == 8


def test_hardware_threads_of_one_core_count_once(monkeypatch, tmp_path):
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings)
    monkeypatch.setattr(room, "_CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert room._physical_cores() == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2})
    assert room._physical_cores() == 1


def test_torch_has_one_thread_beside_packed_projections():
    before = torch.get_num_threads()
    try:
        room.set_torch_threads(2)
        assert torch.get_num_threads() == 2
        room.set_torch_threads(2, packed=True)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_this_machine_has_a_core():
    assert room.compute_threads(0) >= 1


def test_the_kv_budget_is_as_told_or_a_quarter_of_what_is_free():
    assert room.kv_budget(5, CPU, 400, lambda device: 1000) == 5
    assert room.kv_budget(0, CPU, 0, lambda device: 1000) == 250


def test_the_kv_budget_has_room_for_the_longest_request_that_is_wanted():
    assert room.kv_budget(0, CPU, 400, lambda device: 1000) == 400


@pytest.mark.parametrize(
    ("option", "stored", "dtype", "isa", "fmt"),
    [
        ("none", "bfloat16", torch.bfloat16, "avx2", WeightFormat.BF16),
        ("none", "quantised", torch.bfloat16, "avx2", WeightFormat.BF16),
        ("none", "bfloat16", torch.float32, "avx2", WeightFormat.F32),
        ("none", "bfloat16", torch.float32, "torch", WeightFormat.DENSE),
        ("none", "bfloat16", torch.bfloat16, "torch", WeightFormat.DENSE),
        ("file", "quantised", torch.bfloat16, "avx2", WeightFormat.STORED),
        ("auto", "quantised", torch.bfloat16, "avx2", WeightFormat.STORED),
        ("auto", "quantised", torch.float32, "avx2", WeightFormat.F32),
        ("file", "quantised", torch.float32, "avx2", WeightFormat.STORED),
        ("auto", "quantised", torch.bfloat16, "torch", WeightFormat.DENSE),
        ("auto", "bfloat16", torch.bfloat16, "avx2", WeightFormat.BF16),
        ("int8", "bfloat16", torch.float32, "avx2", WeightFormat.INT8),
        ("int4", "float32", torch.bfloat16, "portable", WeightFormat.INT4),
    ],
)
def test_the_weight_format_follows_the_option_and_the_kernels(option, stored, dtype, isa, fmt):
    assert room.resolve_weight_format(option, stored, dtype, CPU, isa) is fmt


@pytest.mark.parametrize(
    ("option", "stored", "device", "isa"),
    [("int8", "bfloat16", "cpu", "torch"), ("int4", "bfloat16", "cuda", "avx2"), ("file", "bfloat16", "cpu", "avx2")],
)
def test_a_form_that_nothing_can_compute_is_refused_by_its_option(option, stored, device, isa):
    with pytest.raises(ConfigError, match="quantization"):
        room.resolve_weight_format(option, stored, torch.bfloat16, torch.device(device), isa)
