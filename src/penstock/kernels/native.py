"""The compiled kernels: whether this installation has them, and how a processor is had to run them on.

Decides nothing. A package installed without a C++ compiler or Python's headers has no `penstock._native`. A module that
is there but cannot be loaded is an error, not an absence.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

__all__ = [
    "MAX_HEAD_DIM",
    "MAX_LATENT_DIM",
    "MAX_THREADS",
    "Cpu",
    "available",
    "isas",
    "module",
    "open_cpu",
    "required",
]

MAX_HEAD_DIM = 512
"""The widest head that the compiled kernels take."""

MAX_LATENT_DIM = 1024
"""The widest key of a latent cache that they take."""

MAX_THREADS = 1024

Cpu = Any
"""`penstock._native.Cpu`: the kernels of one instruction set (`isa`), and threads of its own (`threads`), whose methods
take addresses: only kernels call them. Threads of Python may share one."""


def _load() -> ModuleType | None:
    if importlib.util.find_spec("penstock._native") is None:
        return None
    return importlib.import_module("penstock._native")


module = _load()
"""`penstock._native`, or None where it was not built."""


def available() -> bool:
    """Whether the compiled kernels are there."""
    return module is not None


def required() -> ModuleType:
    """The compiled kernels.

    Raises:
        RuntimeError: this installation has none.
    """
    if module is None:
        raise RuntimeError("this installation of penstock has no compiled kernels")
    return module


def isas() -> list[str]:
    """The instruction sets that this machine can run, best first: `avx512_bf16`, `avx512`, `avx2`, `portable`."""
    return [] if module is None else module.isas()


def open_cpu(isa: str = "", threads: int = 1) -> Cpu:
    """Kernels and threads for one owner; the threads end with the value.

    Args:
        isa: one of `isas()`, or "" for the best of them. Bits of results may differ from one to another.
        threads: that kernels run on, the caller's included; at most `MAX_THREADS`. Results do not depend on it.

    Raises:
        RuntimeError: this installation has no compiled kernels.
        ValueError: this machine has no such kernels, or `threads` is out of range.
    """
    return required().Cpu(isa, threads)
