"""Chooses device, backend, dtype, threads and memory from the operator's options and the hardware.

Decides what `auto` and 0 mean. About a checkpoint it knows only the name of its stored dtype.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

from penstock.contract.errors import ConfigError
from penstock.exec.free_memory import free_memory
from penstock.kernels import native
from penstock.kernels.backend import Backend
from penstock.kernels.cpu_backend import CpuBackend
from penstock.kernels.torch_backend import TorchBackend
from penstock.weights.packing import WeightFormat

__all__ = [
    "compute_threads",
    "good_dtypes",
    "kv_budget",
    "open_backend",
    "resolve_device",
    "resolve_dtype",
    "resolve_weight_format",
    "set_torch_threads",
]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_PLAIN = {torch.float32: WeightFormat.F32, torch.bfloat16: WeightFormat.BF16}

_WEIGHT_FORMATS = {"file": WeightFormat.STORED, "int8": WeightFormat.INT8, "int4": WeightFormat.INT4}

_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""CPU flags (Linux names, x86 and Arm) for bfloat16 products in hardware."""

_AUTO_KV_SHARE = 4  # kv_cache_memory 0 takes one part in four of the free memory

_CPUINFO = Path("/proc/cpuinfo")
_CGROUP = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")


def resolve_device(option: str) -> torch.device:
    """The device for the option `device`: `auto`, `cpu` or `cuda`.

    Raises:
        ConfigError: for `cuda` if torch finds no CUDA device.
    """
    available = torch.cuda.is_available()
    if option == "cuda" and not available:
        raise ConfigError("device", "cuda was asked for, but torch finds no CUDA device; use cpu or auto")
    if option == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def good_dtypes(device: torch.device, compiled: bool, cpuinfo: Path = _CPUINFO) -> frozenset[torch.dtype]:
    """The dtypes that `auto` may choose on this device.

    With compiled kernels only bfloat16, which has half the bytes of float32 and is multiplied faster. Otherwise the
    dtypes in which the device is fast, always including float32.

    Args:
        device: where the model runs.
        compiled: whether compiled kernels exist; they are fast at bfloat16 on any CPU.
        cpuinfo: where Linux describes its processors.
    """
    if device.type == "cuda":
        return frozenset(
            {torch.float32, torch.float16} | ({torch.bfloat16} if torch.cuda.is_bf16_supported() else set())
        )
    if compiled:
        return frozenset({torch.bfloat16})
    return frozenset({torch.float32} | ({torch.bfloat16} if _BFLOAT16_FLAGS & _cpu_flags(cpuinfo) else set()))


def resolve_dtype(option: str, stored: str, device: torch.device, good: frozenset[torch.dtype]) -> torch.dtype:
    """The dtype of activations for the option `dtype`.

    Args:
        option: `auto`, `float32`, `bfloat16` or `float16`.
        stored: the name of the checkpoint's dtype; any other word means that it is quantised.
        device: where the model will run.
        good: the dtypes that `auto` may choose here, from `good_dtypes`.

    Raises:
        ConfigError: for float16 on a CPU, where sums overflow and nothing is gained.
    """
    if option == "float16" and device.type == "cpu":
        raise ConfigError("dtype", "float16 is not supported on a CPU; use bfloat16 or float32")
    if option != "auto":
        return _DTYPES[option]
    preferred = _DTYPES.get(stored, torch.bfloat16)
    if preferred in good:
        return preferred
    return torch.float32 if torch.float32 in good else torch.bfloat16


def resolve_weight_format(option: str, stored: str, dtype: torch.dtype, device: torch.device, isa: str) -> WeightFormat:
    """The weight format for the option `quantization`: `auto`, `none`, `file`, `int8` or `int4`.

    Args:
        option: what the operator chose.
        stored: as for `resolve_dtype`.
        dtype: of the activations.
        device: where the model runs.
        isa: the instruction set of the compiled kernels, or `torch` if there are none.

    Raises:
        ConfigError: a quantised format for which no kernel runs here.
    """
    packs = isa != "torch" and device.type == "cpu"
    if option == "auto":
        option = "file" if packs and dtype == torch.bfloat16 and stored not in _DTYPES else "none"
    if option == "none":
        return _PLAIN[dtype] if packs else WeightFormat.DENSE
    if not packs:
        raise ConfigError("quantization", f"{option} needs the compiled CPU kernels; here {_instead(device)}")
    if option == "file" and stored in _DTYPES:
        raise ConfigError("quantization", f"the file is not quantised: its weights are {stored}")
    return _WEIGHT_FORMATS[option]


def _instead(device: torch.device) -> str:
    return "the model runs on CUDA" if device.type == "cuda" else "this was installed without compiled kernels"


def compute_threads(option: int) -> int:
    """Threads for the option `threads`: its value, or for 0 one thread per physical core that this process may use."""
    return option or min(_physical_cores(), _cpu_quota(_CGROUP))


def open_backend(device: torch.device, threads: int, isa: str = "", option: str = "PENSTOCK_ISA") -> Backend:
    """The backend for a device: compiled kernels on a CPU, Triton's on CUDA, if this installation has them; else torch.

    Args:
        device: where the model runs.
        threads: number of threads for the compiled kernels, from `compute_threads`; every backend has its own threads.
        isa: for tests and comparisons: one of `native.isas()`, or `torch` for the references; "" takes the best.
        option: the option by which the operator gave `isa`, for messages.

    Raises:
        ConfigError: there are no such kernels, or this machine cannot run them.
    """
    if isa and isa != "torch" and isa not in native.isas():
        there = ", ".join(native.isas()) or "none: this was installed without compiled kernels"
        raise ConfigError(option, f"{isa!r} cannot run here; there are {there}")
    if device.type == "cuda":
        return _open_cuda(device, isa)
    if not native.available():
        return TorchBackend(device, _instead(device))
    return TorchBackend(device) if isa == "torch" else CpuBackend(isa, threads)


def _open_cuda(device: torch.device, isa: str) -> Backend:
    if isa == "torch":
        return TorchBackend(device, _instead(device))
    if find_spec("triton") is None:
        return TorchBackend(device, f"{_instead(device)}, and Triton is not installed")
    from penstock.kernels.cuda_backend import CudaBackend  # imports Triton

    return CudaBackend(device, _instead(device))


def set_torch_threads(threads: int, packed: bool = False) -> None:
    """Set the number of threads of torch's own operations, which torch shares across the whole process.

    Args:
        threads: how many.
        packed: whether the model's projections are packed. Then torch has only small operations and gets one thread:
            its waiting threads would occupy CPUs that the compiled kernels need.
    """
    torch.set_num_threads(1 if packed else threads)


def kv_budget(
    option: int, device: torch.device, least: int = 0, free: Callable[[torch.device], int] = free_memory
) -> int:
    """Bytes for the KV cache, for the option `kv_cache_memory`.

    Args:
        option: bytes, or 0 for a quarter of what is free now.
        device: where the cache will be.
        least: the least that 0 gives: room for the longest request that the operator wants.
        free: returns the free bytes of a device.
    """
    return option or max(least, free(device) // _AUTO_KV_SHARE)


def _cpu_flags(cpuinfo: Path) -> frozenset[str]:
    """The flags of the first processor; empty if the system does not tell."""
    if not cpuinfo.exists():
        return frozenset()
    for line in cpuinfo.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _physical_cores() -> int:
    """Number of physical cores among the processors that this process may use."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    allowed = os.sched_getaffinity(0)
    siblings = [_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list" for cpu in allowed]
    if not all(file.exists() for file in siblings):
        return len(allowed)
    return len({file.read_text() for file in siblings})


def _cpu_quota(cgroup: Path) -> int:
    """Processors' worth of time that the container gets, rounded up; without a limit, the number of processors."""
    file = cgroup / "cpu.max"
    fields = file.read_text().split() if file.exists() else ["max"]
    if fields[0] == "max":
        return os.cpu_count() or 1
    quota, period = int(fields[0]), int(fields[1])
    return max(1, -(-quota // period))
