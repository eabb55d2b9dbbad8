"""Recurrent layers of Granite 4 and Qwen 3.5, from the convolution on: sizes, tensors and operations.

Does not decide how inputs are projected: each family has its own order of columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.contract.model import StateSpec
from penstock.kernels.recurrence import RecurrenceKind, RecurrenceRule
from penstock.nn.blocks import Projection
from penstock.nn.operations import Operations
from penstock.nn.recurrent_operations import GatedNorm, Recurrence, ShortConvolution
from penstock.nn.register import Register
from penstock.nn.weight_loader import WeightLoader

__all__ = ["MixerInputs", "MixerSizes", "RecurrentMixer", "bind_mixer"]


@dataclass(frozen=True, slots=True)
class MixerSizes:
    """The sizes of a recurrent layer; see `RecurrenceRule`. `taps` is the length of the convolution."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    tiled: bool = False

    @property
    def keys(self) -> int:
        """Width of keys, and of queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of values."""
        return self.value_heads * self.value_dim

    @property
    def convolved(self) -> int:
        """Width of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def states(self) -> tuple[StateSpec, StateSpec]:
        """The states of the convolution and of the recurrence."""
        recurrence = StateSpec((self.value_heads, self.key_dim, self.value_dim))
        return StateSpec((self.taps - 1, self.convolved)), recurrence


class MixerInputs(NamedTuple):
    """Registers that a mixer reads.

    Attributes:
        convolved: queries, keys and values, in the family's order.
        q: first column of the queries within `convolved`.
        k: first column of the keys.
        v: first column of the values.
        gate: as wide as values.
        a: see `Recurrence`.
        b: see `Recurrence`.
    """

    convolved: Register
    q: int
    k: int
    v: int
    gate: Register
    a: Register
    b: Register | None


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentMixer:
    """A convolution with SiLU, a recurrence over its output, a gated norm, and a projection.

    Attributes:
        taps: `[L, width of queries, keys and values]` float32.
        bias: `[width of queries, keys and values]` float32; or None.
        norm: `[group]` or as wide as values, float32.
        group: number of columns normed together.
        gate_first: see `GatedNorm`.
        states: indices into `Program.states`: the convolution's, and the recurrence's.
    """

    sizes: MixerSizes
    taps: Tensor
    bias: Tensor | None
    rule: RecurrenceRule
    norm: Tensor
    eps: float
    group: int
    gate_first: bool
    output: Projection
    states: tuple[int, int]

    def operations(self, x: MixerInputs, out: Register, *, adds: bool) -> Operations:
        """Write or add to `out`."""
        sizes, of_filter, of_rule = self.sizes, *self.states
        filtered, mixed, gated = (
            Register(name, width)
            for name, width in (("filtered", sizes.convolved), ("mixed", sizes.values), ("gated", sizes.values))
        )
        q, k = (filtered.columns(first, sizes.keys) for first in (x.q, x.k))
        v = filtered.columns(x.v, sizes.values)
        return (
            ShortConvolution(filtered, x.convolved, self.taps, self.bias, of_filter, silu=True),
            Recurrence(mixed, q, k, v, x.a, x.b, of_rule, self.rule),
            GatedNorm(gated, mixed, x.gate, self.norm, self.eps, self.group, self.gate_first),
            self.output.linear(out, gated, adds=adds),
        )


def bind_mixer(
    weights: WeightLoader,
    name: str,
    sizes: MixerSizes,
    kind: RecurrenceKind,
    hidden: int,
    eps: float,
    number: int,
    *,
    conv_bias: bool = False,
    output_bias: bool = False,
) -> RecurrentMixer:
    """Take the tensors under `name` of recurrent layer number `number`, except its input projections.

    A scan has a skip connection, and norms whole groups of heads after the gate; the delta rule norms each head before
    the gate.
    """
    scan, heads = kind is RecurrenceKind.SCAN, sizes.value_heads

    def vector(part: str, count: int) -> Tensor:
        return weights.take(f"{name}.{part}", (count,), torch.float32)

    filters = weights.take(f"{name}.conv1d.weight", (sizes.convolved, 1, sizes.taps), torch.float32)
    rule = RecurrenceRule(
        kind=kind,
        key_heads=sizes.key_heads,
        value_heads=heads,
        key_dim=sizes.key_dim,
        value_dim=sizes.value_dim,
        a_log=vector("A_log", heads),
        step_bias=vector("dt_bias", heads),
        skip=vector("D", heads) if scan else None,
        tiled=sizes.tiled,
    )
    return RecurrentMixer(
        sizes=sizes,
        taps=filters[:, 0].T.contiguous(),
        bias=vector("conv1d.bias", sizes.convolved) if conv_bias else None,
        rule=rule,
        norm=vector("norm.weight", sizes.values if scan else sizes.value_dim),
        eps=eps,
        group=sizes.values // sizes.key_heads if scan else sizes.value_dim,
        gate_first=scan,
        output=Projection.bind(weights, f"{name}.out_proj", hidden, sizes.values, bias=output_bias),
        states=(2 * number, 2 * number + 1),
    )
