"""Loading needs little more memory than the weights themselves."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from weights_samples import Tiny, weights, write_gguf

from penstock import freed_memory, loading
from penstock.contract.config import EngineConfig
from penstock.models import gguf_dialect
from penstock.weights.files import open_model
from penstock.weights.headers_only import META

PROGRAM = """
import pathlib, sys
import torch
from penstock.weights.bind import Binder
from penstock.models import gguf_dialect
from penstock.weights.files import open_model
from penstock.weights.headers_only import META

torch.set_num_threads(1)
torch.ones(4).bfloat16()


def peak():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


dtype = getattr(torch, sys.argv[2])
files = open_model(pathlib.Path(sys.argv[1]), gguf_dialect)
before = peak()
binder = Binder(files.source, dtype, "cpu", sys.argv[1])
loaded = [binder.take(name, files.source.shape(name)) for name in sorted(files.source.names())]
binder.finish()
print(peak() - before, sum(tensor.nbytes for tensor in loaded))
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")


def growth(path: Path, dtype: str) -> float:
    """Growth of the peak while loading, as a multiple of the weights in their final type."""
    command = [sys.executable, "-c", PROGRAM, str(path), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    grown, weights = map(int, done.stdout.split())
    assert weights > 90_000_000
    return grown / weights


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 MB in float32: one large embedding and some layers."""
    directory = tmp_path_factory.mktemp("large")
    tensors = {f"layer{index}": torch.empty(2048, 2048).uniform_() for index in range(6)}
    tensors["embedding"] = torch.empty(12_500, 2000).uniform_()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text("{}")
    return directory


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_safetensors_load_within_1_3_of_their_final_size(large: Path, dtype: str) -> None:
    assert 0.9 < growth(large, dtype) < 1.3


@pytest.mark.deep
@pytest.mark.model
def test_the_default_model_loads_within_1_3_of_its_final_size(default_model: Path) -> None:
    assert 0.9 < growth(default_model, "bfloat16") < 1.3


HOLES = """
import ctypes
import pathlib, sys
import torch
from penstock.freed_memory import give_back


def resident():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


kept = [torch.ones(16_000, dtype=torch.uint8) for _ in range(8_000)][::50]  # 128 MB, of which a fiftieth lives on
before = resident()
give_back()
print(before - resident(), sum(int(tensor.sum()) for tensor in kept))
"""


@pytest.mark.skipif("glibc" not in platform.libc_ver(), reason="only glibc is asked")
def test_what_was_freed_between_what_lives_on_goes_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True, timeout=300)
    returned, sum_of_kept = map(int, done.stdout.split())
    assert returned > 90_000_000
    assert sum_of_kept == 16_000 * 160


def test_a_c_library_that_cannot_is_asked_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda name: object())
    freed_memory.give_back()
    monkeypatch.setattr(freed_memory.sys, "platform", "win32")
    monkeypatch.delattr(freed_memory.ctypes, "CDLL")
    freed_memory.give_back()


def test_a_model_is_loaded_before_memory_is_given_back_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    load = loading.models.load

    def noted(config, binder, *given):
        happened.append("planned" if binder.device == META else "loaded")
        return load(config, binder, *given)

    monkeypatch.setattr(loading.models, "load", noted)
    monkeypatch.setattr(loading, "give_back", lambda: happened.append("given back"))
    path = write_gguf(tmp_path / "tiny.gguf", Tiny(), weights(Tiny()))
    loading.load_model(EngineConfig(model=str(path), threads=1), open_model(path, gguf_dialect), lambda line: None)
    assert happened == ["planned", "loaded", "given back"]
