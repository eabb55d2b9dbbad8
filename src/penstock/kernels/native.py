"""The compiled kernels: whether this installation has them, and how they are set up.

Decides nothing. A package installed without a C++ compiler has no `penstock._native`; then the torch kernels serve. A
module that is there but cannot be loaded is an error, not an absence.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import torch
from torch import Tensor

__all__ = [
    "MAX_HEAD_DIM",
    "available",
    "isa",
    "isas",
    "module",
    "serves",
    "serves_heads",
    "set_isa",
    "set_threads",
    "threads",
]

MAX_HEAD_DIM = 256
"""The widest head that the compiled kernels take."""

_DTYPES = (torch.float32, torch.bfloat16)


def _load() -> ModuleType | None:
    if importlib.util.find_spec("penstock._native") is None:
        return None
    return importlib.import_module("penstock._native")


module = _load()
"""`penstock._native`, or None where it was not built. Its functions take addresses: only kernels call them."""


def available() -> bool:
    """Whether the compiled kernels are there."""
    return module is not None


def serves(x: Tensor) -> bool:
    """Whether compiled kernels take over for this operand: float32 or bfloat16 on a CPU."""
    return module is not None and x.dtype in _DTYPES and x.device.type == "cpu"


def serves_heads(x: Tensor) -> bool:
    """Whether they do for heads `[..., D]`: such as they serve, and not too wide."""
    return serves(x) and x.shape[-1] <= MAX_HEAD_DIM


def isa() -> str:
    """The instruction set that the kernels use: `avx512_bf16`, `avx512`, `avx2`, `portable`; `torch` without them."""
    return "torch" if module is None else module.isa()


def isas() -> list[str]:
    """The instruction sets that this machine can run, best first; the first is used unless `set_isa` says otherwise."""
    return [] if module is None else module.isas()


def set_isa(name: str) -> None:
    """Use the kernels of one of `isas()`. Bits of results may differ from one to another.

    Raises:
        ValueError: this build or this machine has no such kernels.
    """
    if module is None:
        raise ValueError(f"kernels for {name} were asked for, but this installation has no compiled kernels")
    module.set_isa(name)


def set_threads(threads: int) -> None:
    """Run compiled kernels on this many threads, the caller's included; without them there is nothing to set.

    Raises:
        ValueError: not between 1 and 1024.
    """
    if module is not None:
        module.set_threads(threads)


def threads() -> int:
    """The threads that compiled kernels run on; 0 without them."""
    return 0 if module is None else module.threads()
