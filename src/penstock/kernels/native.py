"""Access to the compiled kernels: whether this installation has them, and how to open a `Cpu` that runs them.

A package installed without a C++ compiler or Python's headers has no `penstock._native`. A module that exists but fails
to load is an error; it does not count as absent.
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
"""The widest head that the compiled kernels support."""

MAX_LATENT_DIM = 1024
"""The widest key of a latent cache that the compiled kernels support."""

MAX_THREADS = 1024

Cpu = Any
"""`penstock._native.Cpu`: the kernels of one instruction set (`isa`) and its own threads (`threads`). Its methods take
raw addresses, so only kernels call them. Python threads may share one."""


def _load() -> ModuleType | None:
    if importlib.util.find_spec("penstock._native") is None:
        return None
    return importlib.import_module("penstock._native")


module = _load()
"""`penstock._native`, or None if it was not built."""


def available() -> bool:
    """Whether this installation has the compiled kernels."""
    return module is not None


def required() -> ModuleType:
    """The module `penstock._native`.

    Raises:
        RuntimeError: this installation has no compiled kernels.
    """
    if module is None:
        raise RuntimeError("this installation of penstock has no compiled kernels")
    return module


def isas() -> list[str]:
    """The instruction sets that this machine can run, best first.

    They are among `avx512_amx`, `avx512_bf16`, `avx512`, `avx2` and `portable`.
    """
    return [] if module is None else module.isas()


def open_cpu(isa: str = "", threads: int = 1) -> Cpu:
    """Open kernels and threads for one owner; the threads end when the returned object is destroyed.

    Args:
        isa: one of `isas()`, or "" for the best of them. Results may differ in bits between instruction sets.
        threads: number of threads for kernels, the caller's included; at most `MAX_THREADS`. Results do not depend on
            it.

    Raises:
        RuntimeError: this installation has no compiled kernels.
        ValueError: this machine cannot run `isa`, or `threads` is out of range.
    """
    return required().Cpu(isa, threads)
