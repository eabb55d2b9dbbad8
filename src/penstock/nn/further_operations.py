"""Operations for a few families (gates, scaling, column reordering, per-head weights), for adapters, and for ranks.

Part of the closed set of `nn.operations`, which re-exports them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from torch import Tensor

from penstock.kernels.experts import StackedWeight, stack_arithmetic
from penstock.nn.register import Register

__all__ = ["Adapt", "AllReduce", "Gate", "GateKind", "GateRows", "Module", "ProjectHeads", "Regroup", "Scale", "copied"]


class Module(NamedTuple):
    """A linear module of the checkpoint, as adapters name it, and the number of its outputs."""

    name: str
    outputs: int


@dataclass(frozen=True, slots=True, eq=False)
class Adapt:
    """Add to `out` the adapter's update for each row of `x` that has an adapter; see `nn.adapters`.

    Follows the projection that writes `out`, and occurs only in programs that take adapters.

    Attributes:
        site: index of the projection among all that take adapters, from 0.
        modules: the modules that the columns of `out` belong to, in order.
    """

    out: Register
    x: Register
    site: int
    modules: tuple[Module, ...]
    adds = True

    def __str__(self) -> str:
        return self.out.line(f"adapt({self.x}, site {self.site})", adds=True)


@dataclass(frozen=True, slots=True, eq=False)
class AllReduce:
    """`out = x` summed over the ranks that compute a divided program, or added to `out`; see `nn.rank_group`.

    Follows the operation that writes `x`, and occurs only in divided programs (`nn.dividing`).

    Attributes:
        x: always float32, even if other registers have the activations' dtype.
    """

    out: Register
    x: Register
    adds: bool

    def __str__(self) -> str:
        return self.out.line(f"all_reduce({self.x})", adds=self.adds)


class GateKind(StrEnum):
    """The function applied to a gate before the multiplication."""

    SIGMOID = "sigmoid"
    GELU_NEW = "gelu_new"
    """Tanh-approximated GELU, as in `kernels.activation`."""


@dataclass(frozen=True, slots=True, eq=False)
class ProjectHeads:
    """Project each head by its own weight: the first `passed` columns are copied, the others multiplied.

    Attributes:
        out: `[T, heads * (passed + N)]`.
        x: `[T, heads * (passed + K)]`.
        weights: `[heads, N, K]`.
    """

    out: Register
    x: Register
    weights: StackedWeight
    passed: int = 0

    @property
    def arithmetic(self) -> str:
        """The arithmetic of the products, named as in `Weight.arithmetic`."""
        return stack_arithmetic(self.weights)

    def __str__(self) -> str:
        passed = f", {self.passed} passed" if self.passed else ""
        return self.out.line(f"project_heads({self.x}, W{list(self.weights.shape)}{passed})")


@dataclass(frozen=True, slots=True, eq=False)
class GateRows:
    """Add to `out` the rows of `x`, each weighted by the sigmoid of its logit (a gated shared expert).

    Attributes:
        logits: `[T, 1]`.
    """

    out: Register
    x: Register
    logits: Register

    def __str__(self) -> str:
        return self.out.line(f"sigmoid({self.logits}) * {self.x}", adds=True)


@dataclass(frozen=True, slots=True, eq=False)
class Gate:
    """`out = x * kind(gate)`."""

    out: Register
    x: Register
    gate: Register
    kind: GateKind = GateKind.SIGMOID

    def __str__(self) -> str:
        return self.out.line(f"{self.x} * {self.kind}({self.gate})")


@dataclass(frozen=True, slots=True, eq=False)
class Scale:
    """Multiply `x` in place by a number from the checkpoint.

    Attributes:
        factor: `[1]` float32.
    """

    x: Register
    factor: Tensor

    def __str__(self) -> str:
        return self.x.line(f"{self.x} * w[1]")


@dataclass(frozen=True, slots=True, eq=False)
class Regroup:
    """Reorder columns from `[groups][2][D]` in `x` to `[2][groups][D]` in `out`, separating each head's two halves."""

    out: Register
    x: Register
    groups: int

    def __str__(self) -> str:
        return self.out.line(f"{self.x}" if self.groups == 1 else f"regroup({self.x}, {self.groups} pairs)")


def copied(out: Register, x: Register) -> Regroup:
    """`out = x`: the two halves of a single group stay where they are. The width is even."""
    return Regroup(out, x, groups=1)
