"""What a program asks of a machine: the bytes that a step reads, and its arithmetic by kind.

Decides how cost is counted. Each weight is read once per step; of the experts, only as many as the step's tokens are
expected to choose. Every row reads the keys and values that its layers can see, and its recurrent state. Products and
attention count two operations per multiplication. Norms, rotations and activations are ignored: a few percent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from penstock.contract.model import KvCacheSpec, StepCost, StepRow
from penstock.kernels.experts import bytes_read, stack_arithmetic
from penstock.kernels.linear import Weight
from penstock.kernels.native_attention import int8_latent_shape
from penstock.kernels.recurrence import RecurrenceKind
from penstock.nn.operations import Attend, Embed, Experts, Linear, ProjectHeads, Recurrence, ShortConvolution
from penstock.nn.program import Program

__all__ = ["cost"]


def cost(program: Program, rows: Sequence[StepRow], kv_dtype: torch.dtype) -> StepCost:
    """Count the cost of one step.

    Args:
        program: the model.
        rows: rows of the step.
        kv_dtype: dtype of the cached keys and values.
    """
    tokens, samples = sum(row.count for row in rows), sum(row.samples for row in rows)
    total = StepCost()
    for operation in program.operations():
        match operation:
            case Embed(table=table):
                total += StepCost(weight_bytes=tokens * table.nbytes // _numbers_and_outputs(table)[1])
            case Linear(weight=weight):
                total += _product(weight, tokens)
            case ProjectHeads(weights=weights):
                total += StepCost(weight_bytes=weights.nbytes)
                total += _operations(operation.arithmetic, 2 * math.prod(weights.shape) * tokens)
            case Experts(stack=stack, spec=spec):
                chosen = spec.top_k * tokens
                total += StepCost(weight_bytes=bytes_read(stack, spec, tokens))
                for each in stack.weights:
                    total += _operations(stack_arithmetic(each), 2 * each.shape[1] * each.shape[2] * chosen)
            case ShortConvolution(weight=weight):
                total += StepCost(weight_bytes=weight.nbytes, fp32_ops=2 * weight.numel() * tokens)
            case Recurrence(rule=rule):
                total += StepCost(
                    fp32_ops=(8 if rule.kind is RecurrenceKind.DELTA else 5) * math.prod(rule.state_shape) * tokens
                )
            case Attend():
                total += _attention(operation, program.caches[operation.cache], rows, kv_dtype)
    total += StepCost(kv_bytes=len(rows) * sum(4 * math.prod(state.shape) for state in program.states))
    return total + _product(program.head.weight, samples) if samples else total


def _product(weight: Weight, tokens: int) -> StepCost:
    total = StepCost(weight_bytes=weight.nbytes)
    for part in weight.parts:
        total += _operations(part.arithmetic, 2 * part.outputs * part.inputs * tokens)
    return total


def _attention(attend: Attend, cache: KvCacheSpec, rows: Sequence[StepRow], kv_dtype: torch.dtype) -> StepCost:
    position_bytes = _position_bytes(cache, kv_dtype)
    seen = pairs = 0
    for row in rows:
        first, last = attend.spec.window_start(row.computed), row.computed + row.count
        seen += last - first
        spec, positions = attend.spec, range(row.computed, last)
        pairs += sum(spec.window_end(each, last) - spec.window_start(each) for each in positions)
    arithmetic = "fp32" if kv_dtype == torch.float32 else "bf16"
    widths = attend.heads.dim + (attend.heads.value_dim or attend.heads.dim)
    products = _operations(arithmetic, 2 * attend.heads.queries * widths * pairs)
    return StepCost(kv_bytes=seen * position_bytes) + products


def _position_bytes(cache: KvCacheSpec, dtype: torch.dtype) -> int:
    """Bytes of one position's keys and values, including the scales of int8."""
    if cache.value_dim:  # values are part of the keys
        in_int8 = dtype == torch.int8
        return (
            int8_latent_shape(1, 1, cache.head_dim, cache.value_dim)[3] if in_int8 else cache.head_dim * dtype.itemsize
        )
    return 2 * cache.heads * (cache.head_dim * dtype.itemsize + (4 if dtype == torch.int8 else 0))


def _operations(arithmetic: str, count: int) -> StepCost:
    return StepCost(**{f"{arithmetic}_ops": count})


def _numbers_and_outputs(weight: Weight) -> tuple[int, int]:
    return weight.outputs * weight.inputs, weight.outputs
