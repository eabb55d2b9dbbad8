"""Builds the compiled program for `native/executor.cpp`, operation by operation.

Decides which neighbours are fused (`lowering`), where registers lie in scratch memory, and which of them are bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.kernels.native import required
from penstock.kernels.native_attention import score_rule, vector
from penstock.kernels.native_experts import expert_layer, stack_of
from penstock.kernels.native_recurrent import GATES, filter_of, group_norm_of, rule_of
from penstock.kernels.native_rows import ACTIVATION_CODES, rotation, vector_of
from penstock.kernels.packed_linear import ELEMENTS
from penstock.nn.lowering import Attended, Gated, Lowered, Recurrent, lower_layers
from penstock.nn.operations import (
    Activate,
    Adapt,
    AllReduce,
    Experts,
    Gate,
    GatedNorm,
    GateRows,
    Linear,
    Norm,
    NormHeads,
    NormKind,
    ProjectHeads,
    Recurrence,
    Register,
    Regroup,
    Scale,
    ShortConvolution,
)
from penstock.nn.program import Program
from penstock.nn.register_places import Place, place_registers
from penstock.nn.rope import RotaryTable

__all__ = ["compile_program"]

_NORMS = {NormKind.RMS: 0, NormKind.LAYER: 1}


def compile_program(program: Program, dtype: torch.dtype) -> Any:
    """Build the compiled program. It holds addresses only: `program` keeps the tensors alive.

    Args:
        program: `compiled.why_not_compiled` returns None for it.
        dtype: dtype of queries, keys and values before rotation and storing: bfloat16 or float32.
    """
    layers = lower_layers(program)
    places = place_registers([operation for layer in layers for operation in layer], dtype, program.inputs)
    compiled = required().Program(hidden=program.shape.hidden_size)
    inputs = {each.name: compiled.input(width=each.width) for each in program.inputs}
    for size in places.area_bytes:
        compiled.area(bytes=size)
    numbers: dict[Place, int] = {}
    for place in places.distinct():
        numbers[place] = compiled.register(width=place.width, element=ELEMENTS[place.dtype], area=place.area)
    builder = _Builder(compiled, places.resolve(numbers, inputs))
    index = 0
    for number, layer in enumerate(layers):
        if number < len(program.layers):  # the operations after the last layer count as part of it
            compiled.begin_layer()
        for operation in layer:
            builder.add(index, operation)
            index += 1
    compiled.finish()
    return compiled


class _Builder:
    """Adds operations to a compiled program; `resolve` maps an operation's index and a register name to its number."""

    def __init__(self, compiled: Any, resolve: Any) -> None:
        self._compiled = compiled
        self._resolve = resolve

    def add(self, index: int, operation: Lowered) -> None:
        match operation:
            case Norm():
                self._norm(index, operation)
            case NormHeads():
                self._norm_heads(index, operation)
            case Linear():
                self._linear(index, operation, operation.out, None)
            case Gated():
                self._linear(index, operation.linear, operation.out, ACTIVATION_CODES[operation.activation])
            case Adapt():
                self._compiled.adapt(
                    x=self._columns(index, operation.x),
                    out=self._columns(index, operation.out),
                    site=operation.site,
                )
            case Activate():
                self._compiled.activation(
                    kind=ACTIVATION_CODES[operation.kind],
                    x=self._columns(index, operation.x),
                    out=self._columns(index, operation.out),
                )
            case Attended():
                self._attend(index, operation)
            case Experts():
                self._compiled.experts(
                    x=self._columns(index, operation.x),
                    logits=self._columns(index, operation.logits),
                    out=self._columns(index, operation.out),
                    layer=expert_layer(
                        operation.stack,
                        operation.spec,
                        ACTIVATION_CODES[operation.activation],
                        operation.selection_bias,
                    ),
                    adds=operation.adds,
                )
            case ProjectHeads():
                self._compiled.project_heads(
                    x=self._columns(index, operation.x),
                    out=self._columns(index, operation.out),
                    heads=operation.weights.shape[0],
                    passed=operation.passed,
                    weights=stack_of("weights of heads", operation.weights),
                )
            case GateRows():
                self._compiled.gate_rows(
                    x=self._columns(index, operation.x),
                    logits=self._columns(index, operation.logits),
                    out=self._columns(index, operation.out),
                )
            case AllReduce():
                raise ValueError(f"{operation} lies between compiled programs (nn.divided), not in one")
            case _:
                self._recurrent(index, operation)

    def _recurrent(self, index: int, operation: Recurrent) -> None:
        def at(register: Register | None) -> Any:
            return None if register is None else self._columns(index, register)

        match operation:
            case ShortConvolution(out, x, weight, bias, state, silu, gate_in, gate_out):
                self._compiled.convolution(
                    state=state,
                    filter=filter_of(weight, bias, silu=silu),
                    x=at(x),
                    gate_in=at(gate_in),
                    gate_out=at(gate_out),
                    out=at(out),
                )
            case Recurrence(out, q, k, v, a, b, state, rule):
                operands = {"q": at(q), "k": at(k), "v": at(v), "a": at(a), "b": at(b), "out": at(out)}
                self._compiled.recurrence(state=state, rule=rule_of(rule), **operands)
            case GatedNorm(out, x, gate, weight, eps, group, gate_first):
                norm = group_norm_of(weight, eps, group, gate_first=gate_first)
                self._compiled.gated_norm(norm=norm, x=at(x), gate=at(gate), out=at(out))
            case Gate(out, x, gate, kind):
                self._compiled.gate(x=at(x), gate=at(gate), out=at(out), kind=GATES[kind])
            case Scale(x, factor):
                self._compiled.scale(x=at(x), factor=vector("a factor", factor, torch.float32, 1))
            case Regroup(out, x, groups):
                self._compiled.regroup(groups=groups, x=at(x), out=at(out))

    def _columns(self, index: int, register: Register) -> Any:
        return required().Columns(
            register=self._resolve(index, register.name), first=register.first, width=register.width
        )

    def _norm(self, index: int, norm: Norm) -> None:
        width = norm.x.width
        self._compiled.norm(
            kind=_NORMS[norm.kind],
            x=self._columns(index, norm.x),
            out=self._columns(index, norm.out),
            weight=vector_of("the weight of a norm", norm.weight, width),
            bias=vector_of("the bias of a norm", norm.bias, width),
            eps=norm.eps,
            adds=norm.adds,
        )

    def _norm_heads(self, index: int, norm: NormHeads) -> None:
        width = len(norm.weight)
        self._compiled.norm(
            kind=_NORMS[NormKind.RMS],
            x=self._columns(index, norm.x),
            out=self._columns(index, norm.written),
            weight=vector_of("the weight of a norm", norm.weight, width),
            bias=None,
            eps=norm.eps,
            adds=norm.adds,
            groups=norm.x.width // width,
        )

    def _linear(self, index: int, linear: Linear, out: Register, gate: int | None) -> None:
        first, parts = 0, linear.weight.parts
        for part in parts:  # a gated product has exactly one: `lower` ensures that
            columns = out if len(parts) == 1 else out.columns(first, part.outputs)
            bias = None if linear.bias is None else linear.bias[first : first + part.outputs]
            self._compiled.linear(
                x=self._columns(index, linear.x),
                out=self._columns(index, columns),
                weight=part.native,
                bias=vector_of("the bias of a projection", bias, part.outputs),
                adds=linear.adds,
                gate=gate,
            )
            first += part.outputs

    def _attend(self, index: int, attended: Attended) -> None:
        attend, heads, native = attended.attend, attended.attend.heads, required()
        self._compiled.attend(
            cache=attend.cache,
            heads=native.Heads(queries=heads.queries, keys=heads.keys, dim=heads.dim, value_dim=heads.value_dim),
            q=self._columns(index, attend.q),
            k=None if attend.k is None else self._columns(index, attend.k),
            v=None if attend.v is None else self._columns(index, attend.v),
            rotated=self._columns(index, attended.rotated),
            out=self._columns(index, attend.out),
            norms=native.HeadNorms(
                q=vector_of("q_norm", attended.q_norm, heads.dim),
                k=vector_of("k_norm", attended.k_norm, heads.dim),
                eps=attended.eps,
            ),
            rotation=None if attended.rope is None else _rotation(attended.rope),
            rule=score_rule(attend.spec, attend.sinks, heads.queries),
        )


def _rotation(rope: RotaryTable) -> Any:
    for name, table in (("cos", rope.cos), ("sin", rope.sin)):
        fits = table.dim() == 2 and table.shape[1] == rope.width // 2 and table.dtype == torch.float32
        if not fits or not len(table):  # an empty table has a null address, which would mean no rotation
            raise ValueError(f"{name} must be [P, {rope.width // 2}] float32, not {tuple(table.shape)} {table.dtype}")
        vector(name, table.view(-1), torch.float32, table.numel())
    return rotation(rope.cos, rope.sin, rope.width)
