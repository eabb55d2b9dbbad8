"""A program computed operation by operation: the golden that every other executor is compared with.

Decides how operations become calls of `kernels`. Serves wherever torch runs; knows no family, no cache and no batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.contract.model import ModelShape
from penstock.kernels import activation as activations
from penstock.kernels import native
from penstock.kernels.embedding import embedding
from penstock.kernels.experts import experts
from penstock.kernels.linear import linear
from penstock.kernels.native_experts import NativeExperts
from penstock.kernels.norm import layer_norm, rms_norm
from penstock.kernels.packed_linear import packed_linear
from penstock.kernels.packed_weight import PackedStack, PackedWeight
from penstock.kernels.rope import rotate
from penstock.nn.causal_lm import Attend
from penstock.nn.operations import (
    Activate,
    Activation,
    Embed,
    Experts,
    Linear,
    Norm,
    NormHeads,
    NormKind,
    Operation,
    Register,
    Rotate,
)
from penstock.nn.operations import Attend as AttendOperation
from penstock.nn.program import OUT, Head, Program

__all__ = ["ReferenceExecutor", "head_logits"]

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    each: getattr(activations, each.value) for each in Activation
}


class ReferenceExecutor:
    """A `CausalLM` that walks its program.

    Args:
        program: what to compute.
        dtype: of activations.
    """

    def __init__(self, program: Program, dtype: torch.dtype) -> None:
        self.program = program
        self.dtype = dtype

    @property
    def shape(self) -> ModelShape:
        """See `CausalLM.shape`."""
        return self.program.shape

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `CausalLM.forward`."""
        walk = _Walk(token_ids, positions, attend, self.dtype)
        for operation in self.program.operations():
            walk.compute(operation)
        return walk.result()

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        return head_logits(self.program.head, hidden)


class _Walk:
    """One step: what its registers hold, `[T, width]` each."""

    def __init__(self, token_ids: Tensor, positions: Tensor, attend: Attend, dtype: torch.dtype) -> None:
        self._token_ids, self._positions = token_ids, positions
        self._attend = attend
        self._dtype = dtype
        self._registers: dict[str, Tensor] = {}

    def compute(self, operation: Operation) -> None:
        match operation:
            case Embed(out, table, of_positions, scale, adds):
                rows = embedding(self._positions if of_positions else self._token_ids, table, self._dtype)
                self._write(out, rows if scale == 1.0 else rows * scale, adds=adds)
            case Norm(out, x, kind, weight, bias, eps, adds):
                wide = self._read(x)
                normed = rms_norm(wide, weight, eps) if kind is NormKind.RMS else layer_norm(wide, weight, bias, eps)
                self._write(out, normed, adds=adds)
            case Linear(out, x, weight, bias, adds):
                self._registers[out.name] = linear(self._read(x), weight, bias, self._read(out) if adds else None)
            case Activate(out, x, kind):
                self._write(out, _ACTIVATIONS[kind](self._read(x)))
            case NormHeads(x, weight, eps):
                heads = self._read(x).unflatten(1, (-1, len(weight)))  # [T, heads, D]
                self._write(x, rms_norm(heads, weight, eps).flatten(1))
            case Rotate(x, head_dim, table):
                heads = self._read(x).unflatten(1, (-1, head_dim))
                self._write(x, rotate(heads, *table.rows(self._positions)).flatten(1))
            case Experts(out, x, logits):
                self._registers[out.name] = _experts(operation, self._read(x), self._read(logits), self._read(out))
            case AttendOperation(out, q, k, v, cache, heads, spec, sinks):
                q, k, v = (
                    None if each is None else self._read(each).unflatten(1, (-1, heads.dim)) for each in (q, k, v)
                )
                self._write(out, self._attend(cache, q, k, v, spec, sinks).flatten(1))

    def result(self) -> Tensor:
        """`[T, H]`."""
        return self._registers[OUT]

    def _read(self, register: Register) -> Tensor:
        return self._registers[register.name][:, register.first : register.first + register.width]

    def _write(self, register: Register, value: Tensor, *, adds: bool = False) -> None:
        """Columns of a register that is there already; or a whole one, which may have had another width before."""
        if adds:
            value = self._read(register) + value
        if register.is_part:
            self._registers[register.name][:, register.first : register.first + register.width] = value
        else:
            self._registers[register.name] = value


def _experts(operation: Experts, x: Tensor, logits: Tensor, residual: Tensor) -> Tensor:
    """Compiled where the weights are packed, as other products are; else in torch."""
    stack, activation, bias = operation.stack, _ACTIVATIONS[operation.activation], operation.selection_bias
    if isinstance(stack.gate_up, PackedStack) and native.available():
        return NativeExperts(stack, operation.spec, activation, bias)(x, logits, residual)
    return experts(x, logits, stack, operation.spec, activation, selection_bias=bias, residual=residual)


def head_logits(head: Head, hidden: Tensor) -> Tensor:
    """`[S, H]` to `[S, V]` float32."""
    if isinstance(head.weight, PackedWeight):  # never rounded: in bfloat16 near-equal logits would tie
        logits = packed_linear(hidden, head.weight, None, out_dtype=torch.float32)
    else:
        logits = linear(hidden, head.weight).float()
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)
