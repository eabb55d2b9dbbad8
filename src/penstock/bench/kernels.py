"""Times the compiled kernels one by one against the machine's limits; a long file: each kernel has its own operands.

Decides what is run: random operands in the sizes of the default model, rotating weights so that none is in the cache
when it is used again (as in a model larger than the cache), keys and values in scattered blocks. Each time is the best
of a few short rounds and includes the calls from Python. Counts only what must be read and computed: weights, keys and
values, or the rows themselves.

With its cases (`kernel_products`, `kernel_attention`) and `quality`, the only part of this package that holds tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.bench.kernel_attention import FilledCache, angles, attention_cases, count_pairs, rope_cases
from penstock.bench.kernel_case import (
    CONTEXT,
    HEAD_DIM,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    Q_HEADS,
    ROWS,
    VOCABULARY,
    Case,
)
from penstock.bench.kernel_products import (
    NUMBER_KINDS,
    activations_dtype,
    arithmetic_of,
    copied_weight,
    gated_cases,
    linear_cases,
    lookup_cases,
    random_weight,
    residual_cases,
)
from penstock.bench.limits import Limits
from penstock.contract.model import KvCacheSpec, ModelShape
from penstock.kernels import native_peak
from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.cpu_backend import CpuBackend
from penstock.kernels.native_sampler import SamplingMetadata
from penstock.kernels.weight_memory import WeightMemory
from penstock.nn.blocks import Attention, GatedMlp, Normalization, Projection, residual
from penstock.nn.compiled import CompiledExecutor
from penstock.nn.operations import Heads, NormKind, Operations, Register
from penstock.nn.paged import PagedAttend
from penstock.nn.program import OUT, STREAM, Head, Program
from penstock.nn.rope import RotaryTable

__all__ = ["KERNELS", "kernel_rows", "kernel_table", "measure_limits", "with_shares"]

LIMIT_BYTES = 256 << 20


def best_seconds(call: Callable[[], object], rounds: int = 4, least: float = 0.03) -> float:
    """Seconds per call: the best of a few rounds, each with enough calls to last about `least` seconds."""
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


def shortest_seconds(call: Callable[[], object], spent: float = 0.2) -> float:
    """Seconds of the fastest single call within `spent` seconds: less sensitive to other processes."""
    call()
    best, until = float("inf"), time.perf_counter() + spent
    while (start := time.perf_counter()) < until:
        call()
        best = min(best, time.perf_counter() - start)
    return best


def measure_limits(backend: CpuBackend, rounds: int = 100_000, memory_bytes: int = LIMIT_BYTES) -> Limits:
    """The machine's limits with the threads and instruction set of a backend; about a second.

    Args:
        backend: the backend.
        rounds: rounds of independent products in one call.
        memory_bytes: bytes read at once; must be far more than the caches hold.
    """
    memory = WeightMemory().take(memory_bytes).fill_(0)

    def ops(arithmetic: str) -> float:
        done = native_peak.compute(backend.cpu, arithmetic, rounds)
        return done / shortest_seconds(partial(native_peak.compute, backend.cpu, arithmetic, rounds))

    read = memory_bytes / shortest_seconds(partial(native_peak.read, backend.cpu, memory))
    return Limits(backend.isa, backend.threads, read, ops("fp32"), ops("bf16"), ops("int8"))


def kernel_rows(backend: CpuBackend, names: Sequence[str], announce: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Time the cases of these entries of `KERNELS`; yields a JSON row per case and calls `announce` before each."""
    for name in names:
        for case in KERNELS[name](backend):
            announce(f"{case.kernel} {case.form} {case.rows}")
            seconds = best_seconds(case.call)
            row = {"kernel": case.kernel, "form": case.form, "rows": case.rows, "seconds": seconds}
            yield row | {
                "bytes": case.bytes,
                "ops": case.ops,
                "arithmetic": case.arithmetic,
                "bytes_per_s": case.bytes / seconds,
                "ops_per_s": case.ops / seconds,
            }


def with_shares(row: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """The row with its shares of the limits; the share of operations is None if they do not matter."""
    ops = row["ops_per_s"] / limits.ops(row["arithmetic"]) if row["arithmetic"] else None
    return row | {"read_share_of_limit": row["bytes_per_s"] / limits.read_bytes, "ops_share_of_limit": ops}


def kernel_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table; a share of the read limit above 1 means that reads hit the cache."""
    heads = (
        f"{'kernel':<18} {'form':<20} {'rows':>5} {'us':>10} {'GB/s':>8} {'of limit':>8} {'GFLOP/s':>9} {'of limit':>8}"
    )
    return "\n".join([heads, *map(_line, rows)])


def _line(row: dict[str, Any]) -> str:
    share = row["ops_share_of_limit"]
    ops = "" if share is None else f" {row['ops_per_s'] / 1e9:9.1f} {share:8.0%}"
    read = f"{row['bytes_per_s'] / 1e9:8.1f} {row['read_share_of_limit']:8.0%}"
    return f"{row['kernel']:<18} {row['form']:<20} {row['rows']:5} {row['seconds'] * 1e6:10.1f} {read}{ops}"


def _norm_cases(backend: CpuBackend) -> Iterator[Case]:
    weight, bias, form = torch.ones(HIDDEN), torch.zeros(HIDDEN), f"{HIDDEN} wide"
    for rows in ROWS:
        x = torch.randn(rows, HIDDEN).bfloat16()
        yield Case("rms_norm", form, rows, 2 * x.nbytes, 0, "", partial(backend.rms_norm, x, weight, 1e-5))
    for rows in ROWS:
        x = torch.randn(rows, HIDDEN).bfloat16()
        yield Case("layer_norm", form, rows, 2 * x.nbytes, 0, "", partial(backend.layer_norm, x, weight, bias, 1e-5))


def _activation_cases(backend: CpuBackend) -> Iterator[Case]:
    for rows in ROWS:
        x = torch.randn(rows, 2 * INNER).bfloat16()
        yield Case(
            "silu_and_mul",
            f"{INNER} wide",
            rows,
            x.nbytes * 3 // 2,
            0,
            "",
            partial(backend.activate, x, "silu_and_mul"),
        )
    for rows in ROWS:
        x = torch.randn(rows, INNER).bfloat16()
        yield Case("gelu_new", f"{INNER} wide", rows, 2 * x.nbytes, 0, "", partial(backend.activate, x, "gelu_new"))


def _sampler_cases(backend: CpuBackend) -> Iterator[Case]:
    for form, temperature in (("greedy", 0.0), ("temperature, top_p", 0.8)):
        for rows in (1, 8, 32):
            logits = torch.randn(rows, VOCABULARY) * 3
            metadata = SamplingMetadata(
                temperature=torch.full((rows,), temperature),
                top_k=torch.zeros(rows, dtype=torch.int32),
                top_p=torch.full((rows,), 0.95, dtype=torch.float64),
                min_p=torch.zeros(rows),
                wants_logprob=torch.zeros(rows, dtype=torch.bool),
            )
            uniform = torch.rand(rows, dtype=torch.float64)
            yield Case("sampler", form, rows, logits.nbytes, 0, "", partial(backend.choose, logits, metadata, uniform))


def _decoder_cases(backend: CpuBackend) -> Iterator[Case]:
    for kind in NUMBER_KINDS:
        decoder, weight_bytes, weights = _decoder(backend, kind)
        for sequences, new_tokens in ((1, 1), (8, 1), (32, 1), (1, 256)):
            caches = [FilledCache.of(backend, sequences, new_tokens, activations_dtype(kind)) for _ in range(LAYERS)]
            count, form = sequences * new_tokens, f"{kind} {'decode' if new_tokens == 1 else 'prefill'} at {CONTEXT}"
            ops = 2 * weights * count + LAYERS * 4 * Q_HEADS * HEAD_DIM * count_pairs(sequences, new_tokens)
            moved = weight_bytes + sum(cache.bytes for cache in caches)
            run = _decoder_call(decoder, caches, torch.randn(count, HIDDEN))
            yield Case(f"decoder, {LAYERS} layers", form, count, moved, ops, arithmetic_of(kind), run)


def _decoder(backend: CpuBackend, kind: str) -> tuple[CompiledExecutor, int, int]:
    """A decoder in the shape of the default model, its bytes and its weight count; all layers are copies of one."""
    memory = WeightMemory()
    width = (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM
    shapes = ((width, HIDDEN), (HIDDEN, Q_HEADS * HEAD_DIM), (2 * INNER, HIDDEN), (HIDDEN, INNER))
    made = [random_weight(kind, *shape) for shape in shapes]
    rope, stream = RotaryTable(*angles()), Register(STREAM, HIDDEN)
    normalize = Normalization(NormKind.RMS, torch.ones(HIDDEN), None, 1e-5)

    def layer(index: int) -> Operations:
        qkv, output, gate_up, down = (Projection(copied_weight(weight, memory)) for weight in made)
        attention = Attention(
            Heads(Q_HEADS, KV_HEADS, HEAD_DIM), qkv, output, index, AttentionSpec(HEAD_DIM**-0.5), rope
        )
        mlp = GatedMlp(gate_up, down, INNER)
        return (*residual(stream, attention, before=normalize), *residual(stream, mlp, before=normalize))

    program = Program(
        shape=ModelShape(LAYERS, HIDDEN, Q_HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, CONTEXT),
        embedding=(),
        layers=tuple(layer(index) for index in range(LAYERS)),
        final=normalize(stream, Register(OUT, HIDDEN)),
        head=Head(made[0]),  # not computed: it decides the dtype of the hidden states
        caches=(KvCacheSpec(KV_HEADS, HEAD_DIM),) * LAYERS,
    )
    executor = CompiledExecutor(program, activations_dtype(kind), backend)
    return executor, LAYERS * sum(each.nbytes for each in made), LAYERS * sum(a * b for a, b in shapes)


def _decoder_call(executor: CompiledExecutor, caches: list[FilledCache], embedded: Tensor) -> Callable[[], object]:
    step, keys, values = caches[0], [cache.keys for cache in caches], [cache.values for cache in caches]
    rows = PagedAttend(keys, values, step.write_slots, step.q_start, step.kv_len, step.block_table, executor.backend)
    return lambda: executor.compute_layers(embedded.clone(), step.positions, rows)


KERNELS: dict[str, Callable[[CpuBackend], Iterator[Case]]] = {
    "linear": linear_cases,
    "residual": residual_cases,
    "gated": gated_cases,
    "lookup": lookup_cases,
    "attention": attention_cases,
    "rope": rope_cases,
    "norm": _norm_cases,
    "activation": _activation_cases,
    "sampler": _sampler_cases,
    "decoder": _decoder_cases,
}
"""What can be timed, by its name on the command line."""
