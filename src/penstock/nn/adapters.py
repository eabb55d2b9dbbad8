"""Adapters: low-rank updates of a program's projections, for some of a step's tokens (Hu et al. 2021, "LoRA").

An adapter is an operand beside a projection, never part of its weight: with `A` `[r, K]` and `B` `[N, r]` it adds
`(x @ A.T) @ B.T` to the projection's result. So any number of adapters share one program with tokens that have none.
Decides where a program takes adapters, and what an adapter is made of. Does not know files or names in requests.

Invariant: a program that takes adapters computes, for tokens without one, the bits of the program that takes none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from penstock.kernels.linear import Weight
from penstock.nn.operations import Adapt, Linear, Module, Operations
from penstock.nn.program import Program

__all__ = [
    "Adapted",
    "AdaptedTokens",
    "Adapter",
    "LowRank",
    "Up",
    "adapter_bytes",
    "adapters_step_bytes",
    "columns_of",
    "sites_of",
    "taking_adapters",
]


class Up(NamedTuple):
    """The second product of one module: from the module's columns of the first product to its columns of the result.

    Attributes:
        first: the module's first column in the projection's result.
        inner: the module's first column in the product with `LowRank.down`.
        weight: `[N, r]`; whatever scales the update is part of it.
    """

    first: int
    inner: int
    weight: Weight


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """What an adapter adds to one projection.

    Attributes:
        down: `[R, K]`: the first factors of all modules that it updates, one below the other.
        ups: the second product of each of these modules.
    """

    down: Weight
    ups: tuple[Up, ...]

    @property
    def nbytes(self) -> int:
        """Memory of its weights."""
        return self.down.nbytes + sum(up.weight.nbytes for up in self.ups)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """Low-rank updates of some projections of a program. Immutable.

    Attributes:
        updates: by site; see `operations.Adapt`.
    """

    updates: Mapping[int, LowRank]

    @property
    def nbytes(self) -> int:
        """Memory of its weights."""
        return sum(update.nbytes for update in self.updates.values())


class AdaptedTokens(NamedTuple):
    """Tokens `[first, end)` of a step have this adapter."""

    first: int
    end: int
    adapter: Adapter


Adapted = Sequence[AdaptedTokens]
"""The tokens of a step that have adapters, in ascending order and without overlap."""


def taking_adapters(program: Program) -> Program:
    """The same program with an `Adapt` after every projection that takes adapters."""
    sites = iter(range(sum(1 for _ in _adaptable(program))))
    return replace(
        program,
        embedding=_with_sites(program.embedding, sites),
        layers=tuple(_with_sites(layer, sites) for layer in program.layers),
        final=_with_sites(program.final, sites),
    )


def sites_of(program: Program) -> tuple[Linear, ...]:
    """The projections of a program that take adapters, by site."""
    return tuple(_adaptable(program))


def _adaptable(program: Program) -> Iterator[Linear]:
    for operation in program.operations():
        if isinstance(operation, Linear) and _takes_adapters(operation):
            yield operation


def _takes_adapters(linear: Linear) -> bool:
    """Whether its modules are known, and its input still exists when its result has been written."""
    return bool(linear.modules) and linear.x.name != linear.out.name


def _with_sites(operations: Operations, sites: Iterator[int]) -> Operations:
    adapted = []
    for operation in operations:
        adapted.append(operation)
        if isinstance(operation, Linear) and _takes_adapters(operation):
            adapted.append(Adapt(operation.out, operation.x, next(sites), operation.modules))
    return tuple(adapted)


def adapter_bytes(program: Program, rank: int, itemsize: int) -> int:
    """Memory of the largest adapter with this rank, one that updates every module, in bytes."""
    total = 0
    for linear in sites_of(program):
        total += _panels(rank * len(linear.modules)) * linear.weight.inputs
        total += sum(_panels(module.outputs) * rank for module in linear.modules)
    return total * itemsize


def adapters_step_bytes(program: Program, rank: int) -> int:
    """Working memory that adapters with this rank need per token of a step, in bytes."""
    sites = sites_of(program)
    inner = max((rank * len(linear.modules) for linear in sites), default=0)
    return 4 * (inner + max((max(linear.weight.inputs, inner) for linear in sites), default=0))


def _panels(outputs: int) -> int:
    """Round up to whole panels of 16 outputs, to which packed weights are padded."""
    return -(-outputs // 16) * 16


def columns_of(modules: Sequence[Module]) -> Iterator[tuple[Module, int]]:
    """Each module with its first column in the projection's result."""
    first = 0
    for module in modules:
        yield module, first
        first += module.outputs
