"""Recurrent layers in compiled code, behind the signatures of their references.

Decides how tensors are handed over as addresses; the work is in `native/recurrent.h`. A token's bits depend on its own
sequence alone, neither on neighbouring runs and rows nor on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.native import Cpu, required
from penstock.kernels.native_attention import vector
from penstock.kernels.native_rows import optional_rows, rows
from penstock.kernels.recurrence import GatedNormCall, RecurrenceCall, RecurrenceKind, RecurrenceRule
from penstock.kernels.short_convolution import ConvolutionCall
from penstock.kernels.state_runs import StateRuns

__all__ = [
    "GATES",
    "filter_of",
    "gate",
    "gated_norm",
    "group_norm_of",
    "recurrence",
    "rule_of",
    "runs_of",
    "short_convolution",
    "states_of",
]

GATES = {"sigmoid": 0, "gelu_new": 1}
"""Codes of gate functions in the compiled kernels (`native/recurrent_call.h`)."""


def runs_of(runs: StateRuns) -> Any:
    """The addresses of a step's runs; the tensors must outlive the result.

    Raises:
        ValueError: a shape or dtype does not fit. The functions below raise likewise.
    """
    count = len(runs.sources)
    return required().Runs(
        count=count,
        starts=vector("starts", runs.starts, torch.int32, count + 1),
        sources=vector("sources", runs.sources, torch.int32, count),
        targets=vector("targets", runs.targets, torch.int32, count),
    )


def states_of(states: Sequence[Tensor]) -> Any:
    """The addresses of states, `[places, ...]` float32 each; the tensors must outlive the result."""
    found = required().States()
    for each in states:
        address = vector("a state", each.view(-1), torch.float32, each.numel())
        found.add(address=address, places=len(each), numbers=each[0].numel())
    return found


def filter_of(weight: Tensor, bias: Tensor | None, *, silu: bool) -> Any:
    """The compiled `Filter` of a short convolution, `[L, C]`; here and below, the tensors must outlive the result."""
    taps, width = weight.shape
    address = vector("the weight of a convolution", weight.view(-1), torch.float32, taps * width)
    return required().Filter(taps=taps, width=width, weight=address, bias=_address("its bias", bias, width), silu=silu)


def rule_of(rule: RecurrenceRule) -> Any:
    """The compiled `Recurrence` of a rule."""
    heads = rule.value_heads
    return required().Recurrence(
        delta=rule.kind is RecurrenceKind.DELTA,
        key_heads=rule.key_heads,
        value_heads=heads,
        key_dim=rule.key_dim,
        value_dim=rule.value_dim,
        a_log=_address("a_log", rule.a_log, heads),
        step_bias=_address("step_bias", rule.step_bias, heads),
        skip=_address("skip", rule.skip, heads),
        least_step=rule.steps[0],
        most_step=rule.steps[1],
        tiled=rule.tiled,
    )


def group_norm_of(weight: Tensor, eps: float, group: int, *, gate_first: bool) -> Any:
    """The compiled `GroupNorm`: a norm of groups of columns, before a gate or, with `gate_first`, after it."""
    address = vector("the weight of a gated norm", weight, torch.float32, weight.numel())
    return required().GroupNorm(group=group, weight=address, period=len(weight), eps=eps, gate_first=gate_first)


def short_convolution(cpu: Cpu, call: ConvolutionCall) -> Tensor:
    """See `kernels.short_convolution.short_convolution_reference`."""
    x, out = call.x, torch.empty(call.x.shape, dtype=call.x.dtype)
    _check_shapes(tuple(x.shape), x=x, gate_in=call.gate_in, gate_out=call.gate_out)
    cpu.short_convolution(
        filter=filter_of(call.weight, call.bias, silu=call.silu),
        tokens=len(x),
        x=rows("x", x),
        gate_in=optional_rows("gate_in", call.gate_in),
        gate_out=optional_rows("gate_out", call.gate_out),
        states=states_of([call.states]),
        runs=runs_of(call.runs),
        out=rows("out", out),
    )
    return out


def recurrence(cpu: Cpu, call: RecurrenceCall) -> Tensor:
    """See `kernels.recurrence.recurrence_reference`."""
    rule, out, count = call.rule, torch.empty(call.v.shape, dtype=call.v.dtype), len(call.v)
    _check_shapes((count, rule.key_heads * rule.key_dim), q=call.q, k=call.k)
    _check_shapes((count, rule.value_heads * rule.value_dim), v=call.v)
    _check_shapes((count, rule.value_heads), a=call.a, b=call.b)
    cpu.recurrence(
        rule=rule_of(rule),
        tokens=count,
        q=rows("q", call.q),
        k=rows("k", call.k),
        v=rows("v", call.v),
        a=rows("a", call.a),
        b=optional_rows("b", call.b),
        states=states_of([call.states]),
        runs=runs_of(call.runs),
        out=rows("out", out),
    )
    return out


def gated_norm(cpu: Cpu, call: GatedNormCall) -> Tensor:
    """See `kernels.recurrence.gated_norm_reference`."""
    x, out = call.x, torch.empty(call.x.shape, dtype=call.x.dtype)
    _check_shapes(tuple(x.shape), x=x, gate=call.gate)
    cpu.gated_norm(
        norm=group_norm_of(call.weight, call.eps, call.group, gate_first=call.gate_first),
        rows=len(x),
        width=x.shape[1],
        x=rows("x", x),
        gate=rows("gate", call.gate),
        out=rows("out", out),
    )
    return out


def gate(cpu: Cpu, x: Tensor, gates: Tensor, kind: str) -> Tensor:
    """`x * kind(gates)`, for matrices of the same shape; `kind` is one of `GATES`."""
    out = torch.empty(x.shape, dtype=x.dtype)
    _check_shapes(tuple(x.shape), x=x, gate=gates)
    cpu.gate_columns(
        rows=len(x),
        width=x.shape[1],
        x=rows("x", x),
        gate=rows("gate", gates),
        out=rows("out", out),
        kind=GATES[kind],
    )
    return out


def _address(name: str, x: Tensor | None, width: int) -> int:
    return 0 if x is None else vector(name, x, torch.float32, width)


def _check_shapes(shape: tuple[int, ...], **operands: Tensor | None) -> None:
    for name, x in operands.items():
        if x is not None and (x.dim() != 2 or tuple(x.shape) != shape):
            raise ValueError(f"{name} must be {list(shape)}, not {list(x.shape)}")
