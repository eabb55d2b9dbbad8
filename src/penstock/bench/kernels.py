"""The compiled kernels one by one beside what the machine can do at best; long, for each has operands of its own.

Decides what is run: random operands in the sizes of the default model, weights in turns so that none is in the cache
when it is used again (as in a model that does not fit there), keys and values in scattered blocks. Each time is the
best of a few short rounds, the calls from Python included. Counts only what must be read and computed: weights, keys
and values, or the rows themselves.

With `quality`, the only part of this room that holds tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from penstock.bench.limits import Limits
from penstock.contract.model import KvCacheSpec, ModelShape
from penstock.kernels import native_peak, onednn_linear
from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.cpu_backend import CpuBackend
from penstock.kernels.native import Cpu
from penstock.kernels.native_attention import (
    int8_keys_shape,
    int8_values_shape,
    packed_keys_shape,
    packed_values_shape,
    rotate_and_write,
)
from penstock.kernels.native_sampler import SamplingMetadata
from penstock.kernels.onednn_linear import pack_onednn
from penstock.kernels.packed_linear import embedding_rows, packed_gated_linear, packed_linear
from penstock.kernels.packed_weight import PackedWeight, pack_bf16, pack_f32, quantize_int4, quantize_int8
from penstock.kernels.weight_memory import WeightMemory
from penstock.nn.blocks import Attention, GatedMlp, Normalization, Projection, residual
from penstock.nn.compiled import CompiledExecutor
from penstock.nn.operations import Heads, NormKind, Operations, Register
from penstock.nn.paged import PagedAttend
from penstock.nn.program import OUT, STREAM, Head, Program
from penstock.nn.rope import RotaryTable

__all__ = ["KERNELS", "kernel_rows", "kernel_table", "measure_limits", "with_shares"]

HIDDEN, INNER, Q_HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCABULARY = 576, 1536, 9, 3, 64, 30, 49152
LINEAR_SHAPES = ((HIDDEN, 2 * INNER), (2048, 5632))
"""Inputs and outputs: the widest layer of the default model, and one of a model of 1.1 billion weights."""

ROWS = (1, 8, 32, 256)
CONTEXT, BLOCK = 512, 16
COLD_BYTES = 96 << 20
"""Weights in rotation, and more than the caches of most machines."""

LIMIT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to time: bytes and operations of a call; `arithmetic` is "" where operations are beside the point."""

    kernel: str
    form: str
    rows: int
    bytes: int
    ops: int
    arithmetic: str
    call: Callable[[], object]


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


def shortest_seconds(call: Callable[[], object], spent: float = 0.2) -> float:
    """The quickest of as many single calls as fill `spent` seconds: what others on the machine disturb counts less."""
    call()
    best, until = float("inf"), time.perf_counter() + spent
    while (start := time.perf_counter()) < until:
        call()
        best = min(best, time.perf_counter() - start)
    return best


def measure_limits(backend: CpuBackend, rounds: int = 100_000, memory_bytes: int = LIMIT_BYTES) -> Limits:
    """The machine's limits with the threads and instruction set of a backend; about a second.

    Args:
        backend: whose.
        rounds: of independent products, in one call.
        memory_bytes: read at once; must be far more than the caches hold.
    """
    memory = WeightMemory().take(memory_bytes).fill_(0)

    def ops(arithmetic: str) -> float:
        done = native_peak.compute(backend.cpu, arithmetic, rounds)
        return done / shortest_seconds(partial(native_peak.compute, backend.cpu, arithmetic, rounds))

    read = memory_bytes / shortest_seconds(partial(native_peak.read, backend.cpu, memory))
    return Limits(backend.isa, backend.threads, read, ops("fp32"), ops("bf16"), ops("int8"))


def kernel_rows(backend: CpuBackend, names: Sequence[str], announce: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Time the kernels of some of `KERNELS`; a row of JSON each; `announce` is called before each."""
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
    """The row with its shares of the limits; the share of operations is None where they are beside the point."""
    ops = row["ops_per_s"] / limits.ops(row["arithmetic"]) if row["arithmetic"] else None
    return row | {"read_share_of_limit": row["bytes_per_s"] / limits.read_bytes, "ops_share_of_limit": ops}


def kernel_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people; a share above 1 of the read limit means that the cache served."""
    heads = (
        f"{'kernel':<18} {'form':<20} {'rows':>5} {'us':>10} {'GB/s':>8} {'of limit':>8} {'GFLOP/s':>9} {'of limit':>8}"
    )
    return "\n".join([heads, *map(_line, rows)])


def _line(row: dict[str, Any]) -> str:
    share = row["ops_share_of_limit"]
    ops = "" if share is None else f" {row['ops_per_s'] / 1e9:9.1f} {share:8.0%}"
    read = f"{row['bytes_per_s'] / 1e9:8.1f} {row['read_share_of_limit']:8.0%}"
    return f"{row['kernel']:<18} {row['form']:<20} {row['rows']:5} {row['seconds'] * 1e6:10.1f} {read}{ops}"


# ---- weights --------------------------------------------------------------------------------------------------------


_PACK: dict[str, Callable[[Tensor], PackedWeight]] = {
    "bf16": pack_bf16,
    "q4": quantize_int4,
    "q8": quantize_int8,
    "f32": pack_f32,
}


def _weight(kind: str, outputs: int, inputs: int) -> PackedWeight:
    return _PACK[kind](torch.randn(outputs, inputs) * inputs**-0.5)


def _arithmetic(kind: str) -> str:
    return {"bf16": "bf16", "f32": "fp32"}.get(kind, "int8")


def _dtype(kind: str) -> torch.dtype:
    """Of the activations of a model with such weights."""
    return torch.float32 if kind == "f32" else torch.bfloat16


_AnyPacked = TypeVar("_AnyPacked")


class _Turns(Generic[_AnyPacked]):
    """Copies of a weight that take turns."""

    def __init__(self, copy: Callable[[], _AnyPacked], nbytes: int) -> None:
        self._copies = [copy() for _ in range(-(-COLD_BYTES // nbytes))]
        self._turn = 0

    def next(self) -> _AnyPacked:
        self._turn = (self._turn + 1) % len(self._copies)
        return self._copies[self._turn]


def _copied(weight: PackedWeight, memory: WeightMemory) -> PackedWeight:
    return replace(weight, data=memory.take(weight.nbytes).copy_(weight.data))


# ---- cases ----------------------------------------------------------------------------------------------------------


def _project(product: Callable[[Tensor, _AnyPacked], Tensor], x: Tensor, turns: _Turns[_AnyPacked]) -> Tensor:
    return product(x, turns.next())


def _linear_cases(
    backend: CpuBackend, *, kernel: str, product: Callable[..., Tensor], residual: bool = False
) -> Iterator[Case]:
    for inputs, outputs in LINEAR_SHAPES:
        for kind in _PACK:
            weight = _weight(kind, outputs, inputs)
            turns = _Turns(partial(_copied, weight, WeightMemory()), weight.nbytes)
            for rows in ROWS:
                x = torch.randn(rows, inputs).to(_dtype(kind))
                form, ops = f"{kind} {inputs}->{outputs}", 2 * rows * inputs * outputs
                ours = partial(product, backend.cpu)
                added = partial(ours, residual=torch.randn(rows, outputs)) if residual else ours
                yield Case(
                    kernel, form, rows, weight.nbytes, ops, _arithmetic(kind),
                    partial(_project, added, x, turns),
                )  # fmt: skip


def _onednn_cases(backend: CpuBackend) -> Iterator[Case]:
    """The same products by oneDNN, which serves where it has AMX or is asked to; none where torch lacks it."""
    for inputs, outputs in LINEAR_SHAPES if onednn_linear.available() else ():
        numbers = torch.randn(outputs, inputs) * inputs**-0.5
        weight = pack_onednn(numbers)
        turns = _Turns(partial(pack_onednn, numbers), weight.nbytes)
        for rows in ROWS:
            x = torch.randn(rows, inputs).bfloat16()
            yield Case(
                "linear", f"onednn {inputs}->{outputs}", rows, weight.nbytes, 2 * rows * inputs * outputs, "bf16",
                partial(_project, partial(onednn_linear.onednn_linear, threads=backend.threads), x, turns),
            )  # fmt: skip


def _lookup_cases(backend: CpuBackend) -> Iterator[Case]:
    for kind in _PACK:
        table = _weight(kind, VOCABULARY, HIDDEN)
        for rows in ROWS:
            ids = torch.randint(VOCABULARY, (rows,))
            moved = rows * (table.nbytes // VOCABULARY + HIDDEN * torch.float32.itemsize)
            yield Case(
                "lookup",
                f"{kind} {HIDDEN} wide",
                rows,
                moved,
                0,
                "",
                partial(embedding_rows, ids, table, cpu=backend.cpu),
            )


@dataclass(frozen=True, slots=True, eq=False)
class _Cache:
    """Keys and values of sequences of `CONTEXT` positions, in scattered blocks of which none is shared."""

    keys: Tensor
    values: Tensor
    block_table: Tensor
    kv_len: Tensor
    q_start: Tensor
    positions: Tensor
    write_slots: Tensor

    @classmethod
    def of(cls, backend: CpuBackend, sequences: int, new_tokens: int, dtype: torch.dtype = torch.bfloat16) -> _Cache:
        """For a step in which each sequence computes its last `new_tokens` positions."""
        count = -(-CONTEXT // BLOCK)
        blocks = torch.randperm(sequences * count).view(sequences, count)
        keys, values = _filled(backend, sequences * count, dtype)
        last = torch.arange(CONTEXT - new_tokens, CONTEXT)
        return cls(
            keys=keys,
            values=values,
            block_table=blocks.int(),
            kv_len=torch.full((sequences,), CONTEXT, dtype=torch.int32),
            q_start=torch.arange(sequences + 1, dtype=torch.int32) * new_tokens,
            positions=last.repeat(sequences),
            write_slots=(blocks[:, last // BLOCK] * BLOCK + last % BLOCK).flatten(),
        )

    @property
    def bytes(self) -> int:
        return int(self.keys.nbytes + self.values.nbytes)


def _filled(backend: CpuBackend, num_blocks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Random keys and values in every position of so many blocks, as the kernels store them."""
    shape = (num_blocks, BLOCK, KV_HEADS, HEAD_DIM)
    if dtype == torch.int8:
        keys, values = (
            torch.zeros(int8_keys_shape(*shape), dtype=dtype),
            torch.zeros(int8_values_shape(*shape), dtype=dtype),
        )
    else:
        keys, values = (torch.zeros(of(*shape, dtype), dtype=dtype) for of in (packed_keys_shape, packed_values_shape))
    for first in range(0, num_blocks * BLOCK, CONTEXT):  # in pieces, lest the numbers take more than the cache
        slots = torch.arange(first, min(first + CONTEXT, num_blocks * BLOCK))
        k, v = (torch.randn(len(slots), KV_HEADS, HEAD_DIM).bfloat16() for _ in range(2))
        backend.write_kv(keys, values, k, v, slots)
    return keys, values


def _pairs(sequences: int, new_tokens: int) -> int:
    """Pairs of a query and a position that it attends to."""
    return sequences * sum(range(CONTEXT - new_tokens + 1, CONTEXT + 1))


def _attend(backend: CpuBackend, q: Tensor, cache: _Cache) -> Tensor:
    spec = AttentionSpec(HEAD_DIM**-0.5)
    return backend.paged_attention(q, cache.keys, cache.values, cache.q_start, cache.kv_len, cache.block_table, spec)


def _attention_cases(backend: CpuBackend) -> Iterator[Case]:
    # Attention over int8 multiplies 16 bits by 8, for which no limit is measured.
    for kernel, dtype, arithmetic in (("attention", torch.bfloat16, "bf16"), ("attention, int8", torch.int8, "")):
        for sequences, new_tokens in ((1, 1), (8, 1), (32, 1), (1, 256)):
            cache, count = _Cache.of(backend, sequences, new_tokens, dtype), sequences * new_tokens
            q = torch.randn(count, Q_HEADS, HEAD_DIM).bfloat16()
            form = f"{'decode' if new_tokens == 1 else 'prefill'} at {CONTEXT}"
            ops = 4 * Q_HEADS * HEAD_DIM * _pairs(sequences, new_tokens) if arithmetic else 0
            yield Case(
                kernel, form, count, cache.bytes, ops, arithmetic,
                partial(_attend, backend, q, cache),
            )  # fmt: skip


def _angles() -> tuple[Tensor, Tensor]:
    angles = torch.rand(CONTEXT, HEAD_DIM // 2) * 6
    return angles.cos(), angles.sin()


def _rotate_and_write(cpu: Cpu, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, cache: _Cache) -> Tensor:
    return rotate_and_write(cpu, q, k, v, cache.positions, cos, sin, cache.keys, cache.values, cache.write_slots)


def _rope_cases(backend: CpuBackend) -> Iterator[Case]:
    cos, sin = _angles()
    for rows in ROWS:
        cache = _Cache.of(backend, 1, rows)
        q, k, v = (torch.randn(rows, heads, HEAD_DIM).bfloat16() for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
        yield Case(
            "rope and KV write", f"{Q_HEADS} + {KV_HEADS} heads", rows, 2 * (q.nbytes + k.nbytes + v.nbytes), 0, "",
            partial(_rotate_and_write, backend.cpu, q, k, v, cos, sin, cache),
        )  # fmt: skip


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
    for kind in _PACK:
        decoder, weight_bytes, weights = _decoder(backend, kind)
        for sequences, new_tokens in ((1, 1), (8, 1), (32, 1), (1, 256)):
            caches = [_Cache.of(backend, sequences, new_tokens, _dtype(kind)) for _ in range(LAYERS)]
            count, form = sequences * new_tokens, f"{kind} {'decode' if new_tokens == 1 else 'prefill'} at {CONTEXT}"
            ops = 2 * weights * count + LAYERS * 4 * Q_HEADS * HEAD_DIM * _pairs(sequences, new_tokens)
            moved = weight_bytes + sum(cache.bytes for cache in caches)
            run = _decoder_call(decoder, caches, torch.randn(count, HIDDEN))
            yield Case(f"decoder, {LAYERS} layers", form, count, moved, ops, _arithmetic(kind), run)


def _decoder(backend: CpuBackend, kind: str) -> tuple[CompiledExecutor, int, int]:
    """A decoder in the shape of the default model, its bytes and its weights; layers are copies of one."""
    memory = WeightMemory()
    width = (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM
    shapes = ((width, HIDDEN), (HIDDEN, Q_HEADS * HEAD_DIM), (2 * INNER, HIDDEN), (HIDDEN, INNER))
    made = [_weight(kind, *shape) for shape in shapes]
    rope, stream = RotaryTable(*_angles()), Register(STREAM, HIDDEN)
    normalize = Normalization(NormKind.RMS, torch.ones(HIDDEN), None, 1e-5)

    def layer(index: int) -> Operations:
        qkv, output, gate_up, down = (Projection(_copied(weight, memory)) for weight in made)
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
        head=Head(made[0]),  # not computed: it says in which dtype hidden states come out
        caches=(KvCacheSpec(KV_HEADS, HEAD_DIM),) * LAYERS,
    )
    executor = CompiledExecutor(program, _dtype(kind), backend)
    return executor, LAYERS * sum(each.nbytes for each in made), LAYERS * sum(a * b for a, b in shapes)


def _decoder_call(executor: CompiledExecutor, caches: list[_Cache], embedded: Tensor) -> Callable[[], object]:
    step, keys, values = caches[0], [cache.keys for cache in caches], [cache.values for cache in caches]
    rows = PagedAttend(keys, values, step.write_slots, step.q_start, step.kv_len, step.block_table, executor.backend)
    return lambda: executor.compute_layers(embedded.clone(), step.positions, rows)


def _packed_product(cpu: Cpu, x: Tensor, weight: PackedWeight, residual: Tensor | None = None) -> Tensor:
    return packed_linear(x, weight, None, residual, cpu=cpu)


def _products(backend: CpuBackend) -> Iterator[Case]:
    return chain(_linear_cases(backend, kernel="linear", product=_packed_product), _onednn_cases(backend))


KERNELS: dict[str, Callable[[CpuBackend], Iterator[Case]]] = {
    "linear": _products,
    "residual": partial(_linear_cases, kernel="linear, residual", product=_packed_product, residual=True),
    "gated": partial(_linear_cases, kernel="linear, gated", product=packed_gated_linear),
    "lookup": _lookup_cases,
    "attention": _attention_cases,
    "rope": _rope_cases,
    "norm": _norm_cases,
    "activation": _activation_cases,
    "sampler": _sampler_cases,
    "decoder": _decoder_cases,
}
"""What can be timed, by the name that the command line has for it."""
