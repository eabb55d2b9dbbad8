"""Runs a program one operation at a time on any backend; with torch's, it is the golden reference for others.

Decides how operations become backend calls. Knows no family, no cache and no batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.contract.model import ModelShape
from penstock.kernels.backend import Backend
from penstock.kernels.recurrence import GatedNormCall, RecurrenceCall
from penstock.kernels.short_convolution import ConvolutionCall
from penstock.kernels.state_runs import StateRuns
from penstock.nn.adapters import Adapted, taking_adapters
from penstock.nn.causal_lm import Attend
from penstock.nn.operations import (
    Activate,
    Adapt,
    AllReduce,
    Embed,
    Experts,
    Gate,
    GatedNorm,
    GateRows,
    Linear,
    Norm,
    NormHeads,
    NormKind,
    Operation,
    ProjectHeads,
    Recurrence,
    Register,
    Regroup,
    Rotate,
    Scale,
    ShortConvolution,
)
from penstock.nn.operations import Attend as AttendOperation
from penstock.nn.program import OUT, PARTIAL, TAPS, Head, Program
from penstock.nn.rank_group import RankGroup, all_reduced, joined_logits
from penstock.nn.rope import RotaryTable
from penstock.thread_turns import letting_others

__all__ = ["ReferenceExecutor", "embedded", "head_logits"]


class ReferenceExecutor:
    """A `CausalLM` that walks its program.

    Args:
        program: what to compute.
        dtype: dtype of the activations.
        backend: computes each operation.
        group: the ranks, if `program` is one rank's part of a divided one; else None.
    """

    def __init__(self, program: Program, dtype: torch.dtype, backend: Backend, group: RankGroup | None = None) -> None:
        self.program = program
        self._group = group
        self._adapted_program: Program | None = None  # made for the first step with adapters
        self.dtype = dtype
        self.backend = backend

    @property
    def shape(self) -> ModelShape:
        """See `CausalLM.shape`."""
        return self.program.shape

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        adapted: Adapted = (),
        taps: Tensor | None = None,
    ) -> Tensor:
        """See `CausalLM.forward`."""
        return self._walk({}, token_ids, positions, attend, taps, adapted)

    def forward_given(self, given: Tensor, positions: Tensor, attend: Attend, taps: Tensor | None = None) -> Tensor:
        """See `CausalLM.forward_given`."""
        nothing = positions[:0]  # no operation looks up tokens
        return self._walk({self.program.given[0].name: given.to(self.dtype)}, nothing, positions, attend, taps)

    def _walk(
        self,
        given: dict[str, Tensor],
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        taps: Tensor | None,
        adapted: Adapted = (),
    ) -> Tensor:
        register = self.program.taps
        if register is not None:
            place = torch.empty(len(positions), register.width, device=positions.device) if taps is None else taps
            given[register.name] = place
        program = self._taking_adapters() if adapted else self.program
        walk = _Walk(program, self.backend, token_ids, positions, attend, self.dtype, given, adapted, self._group)
        with letting_others():
            for operation in program.operations():
                walk.compute(operation)
        return walk.result()

    def _taking_adapters(self) -> Program:
        if self._adapted_program is None:
            self._adapted_program = taking_adapters(self.program)
        return self._adapted_program

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        logits = head_logits(self.backend, self.program.head, hidden)
        return logits if self._group is None else joined_logits(self._group, logits, self.shape.vocab_size)


class _Walk:
    """One step: the contents of its registers, `[T, width]` each."""

    def __init__(
        self,
        program: Program,
        backend: Backend,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        dtype: torch.dtype,
        given: dict[str, Tensor],
        adapted: Adapted = (),
        group: RankGroup | None = None,
    ) -> None:
        self._adapted = adapted
        self._group = group
        self._program = program
        self._backend = backend
        self._token_ids, self._positions = token_ids, positions
        self._attend = attend
        self._dtype = dtype
        self._registers = given
        self._angles_of: dict[RotaryTable, tuple[Tensor, Tensor]] = {}

    def compute(self, operation: Operation) -> None:
        backend = self._backend
        match operation:
            case Embed(out, adds=adds):
                rows = embedded(backend, operation, self._token_ids, self._positions, self._dtype)
                self._write(out, rows, adds=adds)
            case Norm(out, x, kind, weight, bias, eps, adds):
                wide = self._read(x)
                self._write(out, _norm(backend, kind, wide, weight, bias, eps), adds=adds)
            case Linear(out, x, weight, bias, adds):
                residual = self._read(out) if adds else None
                wide = torch.float32 if out.name == PARTIAL else None
                self._registers[out.name] = backend.linear(self._read(x), weight, bias, residual, wide)
            case AllReduce(out, x, adds):
                self._all_reduce(out, x, adds=adds)
            case Adapt():
                self._adapt(operation)
            case Activate(out, x, kind):
                self._write(out, backend.activate(self._read(x), kind.value))
            case NormHeads(x, weight, eps, adds=adds):
                heads = self._read(x).unflatten(1, (-1, len(weight)))  # [T, heads, D]
                self._write(operation.written, backend.rms_norm(heads, weight, eps).flatten(1), adds=adds)
            case Rotate(x, head_dim, table):
                heads = self._read(x).unflatten(1, (-1, head_dim))
                rotated = backend.rotate(heads, *self._angles(table))
                if rotated is not heads:
                    self._write(x, rotated.flatten(1))
            case Experts(out, x, logits, stack, spec, kind, bias, adds):
                if out.name == PARTIAL:  # experts return the dtype of their residual
                    self._registers[PARTIAL], adds = (
                        self._read(x).new_zeros(self._read(x).shape, dtype=torch.float32),
                        True,
                    )
                self._registers[out.name] = backend.experts(
                    self._read(x),
                    self._read(logits),
                    stack,
                    spec,
                    kind.value,
                    selection_bias=bias,
                    residual=self._read(out) if adds else None,
                )
            case GateRows(out, x, logits):
                gated = backend.gate_rows(self._read(x), self._read(logits), self._read(out))
                self._registers[out.name] = gated
            case AttendOperation(out, q, k, v, cache, heads, spec, sinks):
                q, k, v = (
                    None if each is None else self._read(each).unflatten(1, (-1, heads.dim)) for each in (q, k, v)
                )
                if heads.value_dim:
                    v = k[..., heads.dim - heads.value_dim :]
                self._write(out, self._attend(cache, q, k, v, spec, sinks).flatten(1))
            case ProjectHeads(out, x, weights, passed):
                self._write(out, backend.project_heads(self._read(x), weights, passed))
            case ShortConvolution():
                self._convolve(operation)
            case Recurrence(out, q, k, v, a, b, state, rule):
                operands = [self._read(each) for each in (q, k, v, a)]
                call = RecurrenceCall(rule, *operands, self._optional(b), *self._carried(state))
                self._write(out, backend.recurrence(call))
            case GatedNorm(out, x, gate, weight, eps, group, gate_first):
                norm = GatedNormCall(self._read(x), self._read(gate), weight, eps, group, gate_first)
                self._write(out, backend.gated_norm(norm))
            case Gate(out, x, gate, kind):
                self._write(out, backend.gate(self._read(x), self._read(gate), kind.value))
            case Scale(x, factor):
                wide = self._read(x)
                self._write(x, (wide * factor).to(wide.dtype))
            case Regroup(out, x, groups):
                regrouped = self._read(x).unflatten(1, (groups, 2, -1)).transpose(1, 2).flatten(1)
                self._write(out, regrouped.clone() if groups == 1 else regrouped)  # not a view of `x`

    def _all_reduce(self, out: Register, x: Register, *, adds: bool) -> None:
        assert self._group is not None, "a divided program is computed by a group of ranks"
        total = all_reduced(self._group, self._read(x))
        total = self._read(out).float() + total if adds else total
        self._write(out, total.to(self._dtype))

    def _adapt(self, by: Adapt) -> None:
        """Add each adapter's update to its tokens, group by group."""
        x, out = self._read(by.x), self._read(by.out)
        for first, end, adapter in self._adapted:
            update = adapter.updates.get(by.site)
            if update is None:
                continue
            inner = self._backend.linear(x[first:end], update.down)
            for up in update.ups:
                of_up = inner[:, up.inner : up.inner + up.weight.inputs]
                columns = out[first:end, up.first : up.first + up.weight.outputs]
                columns[:] = self._backend.linear(of_up, up.weight, None, columns, columns.dtype)

    def _angles(self, table: RotaryTable) -> tuple[Tensor, Tensor]:
        """The cosines and sines of this step's positions, looked up once for all layers."""
        if table not in self._angles_of:
            self._angles_of[table] = table.rows(self._positions)
        return self._angles_of[table]

    def _convolve(self, by: ShortConvolution) -> None:
        call = ConvolutionCall(
            self._read(by.x),
            by.weight,
            by.bias,
            *self._carried(by.state),
            silu=by.silu,
            gate_in=self._optional(by.gate_in),
            gate_out=self._optional(by.gate_out),
        )
        self._write(by.out, self._backend.short_convolution(call))

    def _carried(self, state: int) -> tuple[Tensor, StateRuns]:
        return self._attend.carried(state, self._program.states[state], len(self._positions))

    def result(self) -> Tensor:
        """The `OUT` register, `[T, H]`."""
        return self._registers[OUT]

    def _read(self, register: Register) -> Tensor:
        return self._registers[register.name][:, register.first : register.first + register.width]

    def _optional(self, register: Register | None) -> Tensor | None:
        return None if register is None else self._read(register)

    def _write(self, register: Register, value: Tensor, *, adds: bool = False) -> None:
        """Write columns of an existing register, or replace a whole one, whose width may change; taps are kept."""
        if adds:
            value = self._read(register) + value
        if register.is_part or register.name == TAPS:
            self._registers[register.name][:, register.first : register.first + register.width] = value
        else:
            self._registers[register.name] = value


def embedded(backend: Backend, by: Embed, token_ids: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Look up the rows of an `Embed`, `[T, H]`; zeros for tokens whose rows another rank holds."""
    ids = positions if by.of_positions else token_ids
    if by.first is None:
        rows = backend.embedding(ids, by.table, dtype)
    else:
        own = ids - by.first
        known = (own >= 0) & (own < by.table.outputs)
        rows = backend.embedding(own.clamp(0, by.table.outputs - 1), by.table, dtype)
        rows = rows.masked_fill_(~known[:, None], 0.0)
    return rows if by.scale == 1.0 else rows * by.scale


def _norm(backend: Backend, kind: NormKind, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    if kind is NormKind.RMS:
        return backend.rms_norm(x, weight, eps)
    return backend.layer_norm(x, weight, bias, eps)


def head_logits(backend: Backend, head: Head, hidden: Tensor) -> Tensor:
    """Map `[S, H]` to `[S, V]` float32 logits, unrounded where the weight's form allows: rounding would create ties."""
    logits = backend.linear(hidden, head.weight, out_dtype=torch.float32)
    if head.scale != 1.0:
        logits = logits * head.scale
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)
