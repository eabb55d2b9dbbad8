"""The machine's limits as compiled loops: products that wait for nothing, memory that is read and not used.

Decides nothing: how long a call took, and what that means, is for the caller to say. Runs on the threads and with the
instruction set of a `Cpu`; the loops are in `native/peak.cpp`.
"""

from __future__ import annotations

from torch import Tensor

from penstock.kernels.native import Cpu, required

__all__ = ["ARITHMETIC", "compute", "read"]

ARITHMETIC = ("fp32", "bf16", "int8")


def compute(cpu: Cpu, arithmetic: str, rounds: int) -> int:
    """Run independent products on every thread.

    Args:
        cpu: whose threads and kernels.
        arithmetic: one of `ARITHMETIC`: float32, bfloat16 pairs into float32, bytes by fours into int32.
        rounds: of the loop, a dozen vectors of products each.

    Returns:
        Multiplications and additions done.
    """
    done: int = getattr(cpu, f"peak_{arithmetic}")(rounds)
    return done


def read(cpu: Cpu, memory: Tensor) -> None:
    """Read `memory`, contiguous and on a line of 64 bytes, once, every thread a part of it.

    Raises:
        ValueError: it does not lie so.
    """
    if not memory.is_contiguous():
        raise ValueError("memory to be read must be contiguous")
    cpu.read_memory(required().Memory(memory.data_ptr(), memory.nbytes))
