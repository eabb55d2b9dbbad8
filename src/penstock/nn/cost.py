"""What a program asks of a machine: the bytes that a step reads and its arithmetic.

Decides how it is counted: every projection by its weight, attention by its heads. Norms, rotations and the reading of
keys and values are left out: a few parts in a hundred.
"""

from __future__ import annotations

import torch

from penstock.contract.model import ModelWork
from penstock.kernels.linear import Weight
from penstock.kernels.packed_weight import PackedKind, PackedWeight
from penstock.nn.operations import Attend, Linear
from penstock.nn.program import Program

__all__ = ["work_of"]


def work_of(program: Program) -> ModelWork:
    """Count a program."""
    operations = list(program.operations())
    weights = [each.weight for each in operations if isinstance(each, Linear)]
    heads = [each.heads for each in operations if isinstance(each, Attend)]
    head = program.head.weight
    return ModelWork(
        weight_bytes=sum(weight.nbytes for weight in weights) + head.nbytes,
        ops_a_token=2 * sum(_numbers(weight) for weight in weights),
        ops_a_sample=2 * _numbers(head),
        ops_a_pair=4 * sum(each.queries * each.dim for each in heads),
        arithmetic=_arithmetic(weights[0]),
    )


def _numbers(weight: Weight) -> int:
    return weight.numel() if isinstance(weight, torch.Tensor) else weight.outputs * weight.inputs


def _arithmetic(weight: Weight) -> str:
    """In what products are computed: quantised weights meet activations of 8 bits."""
    if isinstance(weight, PackedWeight):
        return {PackedKind.F32: "fp32", PackedKind.BF16: "bf16"}.get(weight.kind, "int8")
    return "fp32" if isinstance(weight, torch.Tensor) and weight.dtype == torch.float32 else "bf16"
