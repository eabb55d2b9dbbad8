"""Operations that few families need: gates, factors, columns in another order, a weight for each head.

Part of the closed set of `nn.operations`, which has them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from penstock.kernels.experts import StackedWeight, stack_arithmetic
from penstock.nn.register import Register

__all__ = ["Gate", "GateKind", "GateRows", "ProjectHeads", "Regroup", "Scale"]


class GateKind(StrEnum):
    """What is made of a gate before it is multiplied by."""

    SIGMOID = "sigmoid"
    GELU_NEW = "gelu_new"
    """GELU by tanh, as in `kernels.activation`."""


@dataclass(frozen=True, slots=True, eq=False)
class ProjectHeads:
    """Each head by a weight of its own: its first `passed` columns as they are, then `weight @` the others.

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
        """In what products are computed, as `Weight.arithmetic` names it."""
        return stack_arithmetic(self.weights)

    def __str__(self) -> str:
        passed = f", {self.passed} passed" if self.passed else ""
        return self.out.line(f"project_heads({self.x}, W{list(self.weights.shape)}{passed})")


@dataclass(frozen=True, slots=True, eq=False)
class GateRows:
    """Add to `out` the rows of `x`, each weighted by the sigmoid of its logit: a shared expert behind a gate.

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
    """`x` times a number of the checkpoint, in place.

    Attributes:
        factor: `[1]` float32.
    """

    x: Register
    factor: Tensor

    def __str__(self) -> str:
        return self.x.line(f"{self.x} * w[1]")


@dataclass(frozen=True, slots=True, eq=False)
class Regroup:
    """Columns that lie as `[groups][2][D]` in `x` lie as `[2][groups][D]` in `out`: two halves of each head apart."""

    out: Register
    x: Register
    groups: int

    def __str__(self) -> str:
        return self.out.line(f"regroup({self.x}, {self.groups} pairs)")
