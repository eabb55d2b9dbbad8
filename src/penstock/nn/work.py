"""What a model asks of a machine: the bytes that a step reads and the arithmetic of a token, counted from its weights.

Decides how it is counted: every linear projection that a model's fields hold, found by walking them, and attention from
the model's shape. Norms, rotations and the reading of keys and values are left out: a few parts in a hundred.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from penstock.contract.model import ModelWork
from penstock.kernels.onednn_linear import OneDnnWeight
from penstock.kernels.packed_weight import PackedKind, PackedWeight
from penstock.nn.causal_lm import CausalLM
from penstock.nn.layers import Linear

__all__ = ["work_of"]


def work_of(model: CausalLM) -> ModelWork:
    """Count a model whose fields are its layers, and whose `head` makes the logits."""
    head: Linear = model.head  # type: ignore[attr-defined]
    linears = [each for each in _linears(model) if each is not head]
    shape = model.shape
    return ModelWork(
        weight_bytes=sum(each.weight.nbytes for each in linears) + head.weight.nbytes,
        ops_a_token=2 * sum(_numbers(each) for each in linears),
        ops_a_sample=2 * _numbers(head),
        ops_a_pair=4 * shape.num_layers * shape.num_heads * shape.head_dim,
        arithmetic=_arithmetic(linears[0]),
    )


def _linears(part: Any) -> Iterator[Linear]:
    if isinstance(part, Linear):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from _linears(each)
    elif is_dataclass(part) and not isinstance(part, PackedWeight | OneDnnWeight):
        for field in fields(part):
            yield from _linears(getattr(part, field.name))


def _numbers(linear: Linear) -> int:
    weight = linear.weight
    return weight.numel() if isinstance(weight, torch.Tensor) else weight.outputs * weight.inputs


def _arithmetic(linear: Linear) -> str:
    """In what the products are computed: quantised weights meet activations of 8 bits."""
    weight = linear.weight
    if isinstance(weight, PackedWeight):
        return {PackedKind.F32: "fp32", PackedKind.BF16: "bf16"}.get(weight.kind, "int8")
    return "fp32" if isinstance(weight, torch.Tensor) and weight.dtype == torch.float32 else "bf16"
