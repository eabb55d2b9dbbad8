"""Estimates step times before many steps were measured: from the program's cost, a first step and the machine's limits.

The program says how many bytes a step reads and how many operations each part of it takes (`nn.cost`). The warm-up
step, which reads all weights for one row, shows how fast the machine reads memory. A few milliseconds of independent
products in registers show how fast it computes, a rate that no kernel reaches. So each part may be off by half;
measured steps soon correct it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch

from penstock.contract.known_times import KnownParts, KnownTimes
from penstock.contract.model import StepCost, StepRow
from penstock.core.step_time import FEW, Chunks, Decoding
from penstock.kernels import native_peak
from penstock.kernels.backend import Backend
from penstock.kernels.cpu_backend import CpuBackend
from penstock.nn.cost import cost
from penstock.nn.program import Program

__all__ = ["calculated_times", "parts_of"]

_ROUNDS = 20_000
_TRIES = 3

_DOUBT = 0.75
"""How far each part may be off, as a share of the part."""

_PACE = 0.5
"""How far all parts may be off together: a first step is slow, and another program may have been busy."""

_CHUNK, _BACK = 64, 1024
"""Number of positions of a chunk, and before it, from which the cost of a pair of positions is derived."""


def calculated_times(
    program: Program, kv_dtype: torch.dtype, backend: Backend, decoding_seconds: float
) -> KnownTimes | None:
    """Calculate the parts of a step's time.

    Args:
        program: the model.
        kv_dtype: dtype of the cached keys and values.
        backend: computes the model; the result is None if its limits cannot be measured.
        decoding_seconds: duration of a step with one row that decodes near the start of its context.
    """
    if not isinstance(backend, CpuBackend) or not decoding_seconds > 0:
        return None
    rates: dict[str, float] = {}

    def rate(arithmetic: str) -> float:
        if arithmetic not in rates:
            rates[arithmetic] = _operations_a_second(backend, arithmetic)
        return rates[arithmetic]

    seconds = parts_of(cache(lambda row: cost(program, [row], kv_dtype)), rate, decoding_seconds)
    return KnownTimes(KnownParts(seconds, tuple(_DOUBT * each for each in seconds), _PACE))


def parts_of(
    cost_of: Callable[[StepRow], StepCost], rate: Callable[[str], float], decoding_seconds: float
) -> tuple[float, ...]:
    """Seconds of each part: the parts of `Decoding`, then the parts of `Chunks`.

    Args:
        cost_of: the cost of a step with one row.
        rate: operations per second, by arithmetic.
        decoding_seconds: see `calculated_times`.
    """

    def computing(row: StepRow) -> float:
        done = cost_of(row)
        kinds = (("fp32", done.fp32_ops), ("bf16", done.bf16_ops), ("int8", done.int8_ops))
        return sum(count / rate(kind) for kind, count in kinds if count)

    row = computing(StepRow(0, 1))
    few = min(row, decoding_seconds) / FEW
    step = decoding_seconds - few
    near, far = cost_of(StepRow(0, 1)), cost_of(StepRow(_BACK, 1))
    each_byte = step / max(1, near.weight_bytes)
    looking_back = (computing(StepRow(_BACK, 1)) - computing(StepRow(0, 1))) / _BACK
    seen = (far.kv_bytes - near.kv_bytes) / _BACK * each_byte + looking_back
    read = computing(StepRow(0, _CHUNK, 0))
    pair = (computing(StepRow(_BACK, _CHUNK, 0)) - read) / (_BACK * _CHUNK)
    position = max(0.0, read / _CHUNK - pair * _CHUNK / 2)
    return (*Decoding(step, few, row, seen), *Chunks(position, pair))


def _operations_a_second(backend: CpuBackend, arithmetic: str) -> float:
    """The highest rate of several tries: a disturbance can only lower it."""
    best = 0.0
    for _ in range(_TRIES):
        began = time.perf_counter()
        done = native_peak.compute(backend.cpu, arithmetic, _ROUNDS)
        best = max(best, done / max(1e-9, time.perf_counter() - began))
    return best
