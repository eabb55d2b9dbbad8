"""Compiled loops that run the machine at its limits: independent products, and reads of memory.

The caller times the calls and interprets the result. The loops run on the threads and with the instruction set of a
`Cpu`; they are in `native/peak.cpp`.
"""

from __future__ import annotations

from torch import Tensor

from penstock.kernels.native import Cpu, required

__all__ = ["ARITHMETIC", "compute", "read"]

ARITHMETIC = ("fp32", "bf16", "int8")


def compute(cpu: Cpu, arithmetic: str, rounds: int) -> int:
    """Run independent products on every thread.

    Args:
        cpu: provides the threads and kernels.
        arithmetic: one of `ARITHMETIC`: float32, pairs of bfloat16 into float32, groups of four bytes into int32.
        rounds: iterations of the loop, a dozen vectors of products each.

    Returns:
        The number of multiplications and additions done.
    """
    done: int = getattr(cpu, f"peak_{arithmetic}")(rounds)
    return done


def read(cpu: Cpu, memory: Tensor) -> None:
    """Read the whole 64-byte lines of `memory` once, divided among the threads.

    Raises:
        ValueError: `memory` is not contiguous, not aligned to 64 bytes, or shorter than 64 bytes.
    """
    if not memory.is_contiguous():
        raise ValueError("memory to be read must be contiguous")
    cpu.read_memory(required().Memory(memory.data_ptr(), memory.nbytes))
