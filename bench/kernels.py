"""Times the compiled linear kernels: GB/s of weights and GFLOP/s, beside what memory gives and what Python costs.

Weights take turns so that none is still in the cache when it is used again, as in a model that does not fit into it.
Each figure is the best of a few short runs; compare figures of one run only.

    python bench/kernels.py [--threads 2] [--isa avx512_bf16]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from penstock.kernels import native
from penstock.kernels.packed_linear import packed_linear
from penstock.kernels.packed_weight import PackedWeight, pack_bf16, pack_q8_0, quantize_int4, quantize_int8
from penstock.kernels.weight_memory import WeightMemory

SHAPES = ((576, 1536), (2048, 5632))
ROWS = (1, 4, 8, 32, 256)
COLD_BYTES = 96 << 20
"""Weights in rotation: three times the cache of the machine that this was written on."""


def random_q8_0(weight: torch.Tensor) -> PackedWeight:
    """A Q8_0 weight of the same shape; its numbers do not matter here."""
    outputs, inputs = weight.shape
    blocks = torch.randint(0, 256, (outputs * inputs // 32, 34), dtype=torch.uint8)
    blocks[:, :2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    return pack_q8_0(blocks.flatten(), outputs, inputs)


KINDS: dict[str, Callable[[torch.Tensor], PackedWeight]] = {
    "bf16": pack_bf16,
    "int8": quantize_int8,
    "q4": quantize_int4,
    "q8": random_q8_0,
}


def best_seconds(call: Callable[[], object], rounds: int = 4, least: float = 0.03) -> float:
    """Seconds of one call: the best of a few rounds, each of as many calls as fill a moment."""
    call()
    start = time.perf_counter()
    call()
    count = max(1, int(least / (time.perf_counter() - start + 1e-9)))
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - start) / count)
    return best


def measure_bandwidth() -> float:
    """GB/s of summing 256 MB with torch."""
    numbers = torch.ones(32 << 20, dtype=torch.int64)
    return numbers.numel() * 8 / best_seconds(lambda: numbers.sum(), least=0.1) / 1e9


def measure(weight: PackedWeight, rows: int) -> float:
    """Seconds of one product with a weight that is out of the cache."""
    copies = max(1, COLD_BYTES // len(weight.data))
    memory = WeightMemory()
    turns = [replace(weight, data=memory.take(len(weight.data)).copy_(weight.data)) for _ in range(copies)]
    x = torch.randn(rows, weight.inputs).bfloat16()
    turn = 0

    def call() -> None:
        nonlocal turn
        turn = (turn + 1) % copies
        packed_linear(x, turns[turn])

    for _ in range(copies):
        call()
    return best_seconds(call)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--isa", choices=native.isas(), default=native.isa())
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    options = parser.parse_args()
    native.set_isa(options.isa)
    native.set_threads(options.threads)
    torch.set_num_threads(options.threads)
    print(f"{options.isa}, {options.threads} threads, memory {measure_bandwidth():.0f} GB/s (torch sum)")
    tiny = pack_bf16(torch.zeros(1, 2))
    row = torch.zeros(1, 2, dtype=torch.bfloat16)
    print(f"a call that computes nothing: {best_seconds(lambda: packed_linear(row, tiny)) * 1e6:.1f} us")
    for inputs, outputs in SHAPES:
        numbers = torch.randn(outputs, inputs) * inputs**-0.5
        print(f"\n{inputs} -> {outputs}\n{'kind':6}{'rows':>6}{'us':>10}{'GB/s':>8}{'GFLOP/s':>9}")
        for name in options.kinds:
            weight = KINDS[name](numbers)
            for rows in ROWS:
                seconds = measure(weight, rows)
                gflops = 2 * rows * inputs * outputs / seconds / 1e9
                print(f"{name:6}{rows:6}{seconds * 1e6:10.1f}{len(weight.data) / seconds / 1e9:8.1f}{gflops:9.0f}")


if __name__ == "__main__":
    main()
