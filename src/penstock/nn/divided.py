"""Runs one rank's part of a divided program, with one compiled call between one sum over the ranks and the next.

Decides what lies between the calls: the stream, the rank's part of the next sum, and registers that are written before
a sum and read after it. All are float32 and belong to the step. Everything else is up to `CompiledExecutor`.

Invariant, as there: a token's bits depend only on its own sequence, because a sum over ranks is in order of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.contract.model import ModelShape
from penstock.kernels.cpu_backend import CpuBackend
from penstock.kernels.scratch import Scratch
from penstock.nn.adapters import Adapted
from penstock.nn.causal_lm import Attend
from penstock.nn.compiled import CompiledExecutor
from penstock.nn.lowering import lower, operands
from penstock.nn.operations import AllReduce, Embed, Operation, Operations, Register
from penstock.nn.paged import PagedAttend
from penstock.nn.program import OUT, PARTIAL, STREAM, Program
from penstock.nn.rank_group import RankGroup, all_reduced, joined_logits
from penstock.nn.reference import embedded, head_logits

__all__ = ["DividedExecutor"]


class _Segment(NamedTuple):
    """A compiled part of the program, and the sum that follows; None after the last part."""

    executor: CompiledExecutor
    sum: AllReduce | None


class DividedExecutor:
    """A `CausalLM` that computes with other ranks, each of which calls it with the same arguments.

    Args:
        program: this rank's part; `why_not_compiled` must return None for it.
        dtype: as for `CompiledExecutor`.
        backend: provides the kernels and threads.
        group: the ranks.
    """

    def __init__(self, program: Program, dtype: torch.dtype, backend: CpuBackend, group: RankGroup) -> None:
        self.program = program
        self.backend = backend
        self._group = group
        lookups = [each for each in program.embedding if isinstance(each, Embed | AllReduce)]
        self._lookups = lookups
        rest = [each for each in program.embedding if each not in lookups]
        parts = _between_sums([*rest, *(each for layer in program.layers for each in layer), *program.final])
        kept = {each.name: each for each in program.inputs} | _crossing([operations for operations, _ in parts])
        kept[PARTIAL] = Register(PARTIAL, program.shape.hidden_size)
        self._kept = kept
        scratch = Scratch()
        self._segments = [
            _Segment(CompiledExecutor(_part(program, operations, kept), dtype, backend, scratch), total)
            for operations, total in parts
        ]

    @property
    def shape(self) -> ModelShape:
        """See `CausalLM.shape`."""
        return self.program.shape

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        part = head_logits(self.backend, self.program.head, hidden)
        return joined_logits(self._group, part, self.shape.vocab_size)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        adapted: Adapted = (),
        taps: Tensor | None = None,
    ) -> Tensor:
        """See `CausalLM.forward`.

        Raises:
            ValueError: as in `CompiledExecutor.forward`.
            EngineFault: another rank is gone.
        """
        assert isinstance(attend, PagedAttend), "the compiled executor reads and writes the caches itself"
        assert taps is None and not adapted, "a divided program has neither taps nor adapters"  # noqa: PT018
        held = {name: torch.empty(len(positions), each.width) for name, each in self._kept.items()}
        held[STREAM] = torch.empty(len(positions), self.shape.hidden_size)
        self._look_up(held, token_ids, positions)
        out = held[STREAM]
        for executor, total in self._segments:
            inputs = [held[each.name] for each in executor.program.inputs]
            out = executor.compute_layers(held[STREAM], positions, attend, inputs)
            if total is not None:
                self._sum(held, total, held[PARTIAL])
        return out

    def forward_given(self, given: Tensor, positions: Tensor, attend: Attend, taps: Tensor | None = None) -> Tensor:
        """Never called: only predictors are given a register, and a predictor is not divided."""
        raise NotImplementedError("a divided program looks its tokens up")

    def _look_up(self, held: dict[str, Tensor], token_ids: Tensor, positions: Tensor) -> None:
        rows = held[STREAM]
        for each in self._lookups:
            if isinstance(each, AllReduce):
                self._sum(held, each, rows)
                continue
            rows = embedded(self.backend, each, token_ids, positions, torch.float32)
            if each.out.name != PARTIAL:  # a partial sum is as wide as its table; the next `AllReduce` takes `rows`
                held[each.out.name] = held[each.out.name] + rows if each.adds else rows

    def _sum(self, held: dict[str, Tensor], by: AllReduce, part: Tensor) -> None:
        total = all_reduced(self._group, part)
        out = held[by.out.name][:, by.out.first : by.out.first + by.out.width]
        if by.adds:
            out += total
        else:
            out[:] = total


def _between_sums(operations: Iterable[Operation]) -> list[tuple[Operations, AllReduce | None]]:
    parts: list[tuple[Operations, AllReduce | None]] = []
    own: list[Operation] = []
    for operation in operations:
        if isinstance(operation, AllReduce):
            parts.append((tuple(own), operation))
            own = []
        else:
            own.append(operation)
    return [*parts, (tuple(own), None)]


def _registers(operations: Operations) -> tuple[dict[str, Register], set[str]]:
    """The registers that operations name, each wide enough for all uses; and the names read before they are written.

    The stream and the result, which every part is given, are left out.
    """
    named: dict[str, Register] = {}
    unwritten, written = set[str](), set[str]()
    for operation in lower(operations):
        read, wrote = operands(operation)
        unwritten |= {each.name for each in read} - written
        written |= {each.name for each in wrote}
        for each in (*read, *wrote):
            if each.name not in named or each.first + each.width > named[each.name].width:
                named[each.name] = Register(each.name, each.first + each.width)
    owned = {STREAM, OUT}
    return {name: each for name, each in named.items() if name not in owned}, unwritten - owned


def _crossing(parts: Sequence[Operations]) -> dict[str, Register]:
    """Registers that some part reads from an earlier one."""
    registers = [_registers(each) for each in parts]
    names = {name for _, unwritten in registers for name in unwritten}
    widest: dict[str, Register] = {}
    for named, _ in registers:
        for name in names & named.keys():
            if name not in widest or named[name].width > widest[name].width:
                widest[name] = named[name]
    return widest


def _part(program: Program, operations: Operations, kept: dict[str, Register]) -> Program:
    """Make a program of some of a program's operations, which is given the kept registers that it names."""
    named, _ = _registers(operations)
    given = tuple(register for name, register in kept.items() if name in named)
    return replace(program, embedding=(), layers=(operations,), final=(), given=given)
