"""References of recurrent layers with a matrix as state: the gated delta rule and selective scans; and gated norms.

Decides the formulas. Both recurrences decay the state of each head, add an outer product of the key and something made
of the value, and read the state with the query; they differ in what is added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.norm import unit_rows
from penstock.kernels.state_runs import FROM_ZERO, StateRuns

__all__ = [
    "GatedNormCall",
    "RecurrenceCall",
    "RecurrenceKind",
    "RecurrenceRule",
    "gated_norm_reference",
    "recurrence_reference",
]

_LENGTH_EPS = 1e-6


class RecurrenceKind(StrEnum):
    """What is added to a state."""

    DELTA = "gated_delta_rule"
    """What the value differs by from what the state says of the key (Yang et al. 2024, equation 10)."""
    SCAN = "selective_scan"
    """The value, by the length of the step (Mamba-2: Dao and Gu 2024, section 6)."""


@dataclass(frozen=True, slots=True, eq=False)
class RecurrenceRule:
    """Sizes and weights of one layer; vectors are float32, a number for each value head.

    Attributes:
        key_heads: of queries and keys; value head `h` has those of key head `h // (value_heads / key_heads)`, or, if
            `tiled`, `h % key_heads`: GGUF files of Qwen 3.5 have their value heads in this order.
        a_log: the decay of a step is `exp(-exp(a_log) * step)`.
        step_bias: added to `a`, of which softplus is the step.
        skip: the share of the value that is added to what is read; or None.
        steps: least and most length of a step; scans only.
    """

    kind: RecurrenceKind
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    a_log: Tensor
    step_bias: Tensor
    skip: Tensor | None = None
    steps: tuple[float, float] = (0.0, math.inf)
    tiled: bool = False

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Of each sequence: heads, keys, values."""
        return self.value_heads, self.key_dim, self.value_dim

    def __str__(self) -> str:
        heads = f"{self.key_heads} x {self.key_dim} keys, {self.value_heads} x {self.value_dim} values"
        return f"{self.kind}, {heads}{', skip' if self.skip is not None else ''}"


class RecurrenceCall(NamedTuple):
    """What a recurrence is told.

    Attributes:
        rule: sizes and weights.
        q: `[T, key_heads * key_dim]`; a scan's C.
        k: the same; a scan's B.
        v: `[T, value_heads * value_dim]`; a scan's x.
        a: `[T, value_heads]`; a scan's dt.
        b: `[T, value_heads]` for the delta rule, None for a scan.
        states: `[places, value_heads, key_dim, value_dim]` float32; changed.
        runs: which tokens continue which state.
    """

    rule: RecurrenceRule
    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor | None
    states: Tensor
    runs: StateRuns


class GatedNormCall(NamedTuple):
    """What a gated norm is told.

    Attributes:
        x: `[T, C]`.
        gate: `[T, C]`.
        weight: `[group]`, the same for all groups, or `[C]`; float32.
        eps: keeps groups of zeros finite.
        group: columns that are normed together, by the root of their mean square.
        gate_first: Mamba-2 with `norm_before_gate` false, and not Qwen3-Next.
    """

    x: Tensor
    gate: Tensor
    weight: Tensor
    eps: float
    group: int
    gate_first: bool


def recurrence_reference(call: RecurrenceCall) -> Tensor:
    """Token by token, in float32, rounded once at the end.

    With `S` a head's state, `step = softplus(a + step_bias)` and `decay = exp(-exp(a_log) step)`:
    delta rule: `q` and `k` are divided by their lengths and `q` by `sqrt(D)`;
    `S = decay S + k (v - decay S k) sigmoid(b)`, out `S q`. Scan: `S = decay S + k (step v)`, out `S q + skip v`.

    Returns:
        `[T, value_heads * value_dim]` in the dtype of `v`.
    """
    rule, q, k, v, a, b, states, runs = call
    groups, delta = rule.value_heads // rule.key_heads, rule.kind is RecurrenceKind.DELTA
    queries, keys = (each.float().unflatten(1, (rule.key_heads, -1)) for each in (q, k))  # [T, Hk, D]
    if delta:
        queries, keys = _unit(queries) * rule.key_dim**-0.5, _unit(keys)
    queries, keys = (  # [T, Hv, D]
        each.repeat(1, groups, 1) if rule.tiled else each.repeat_interleave(groups, dim=1) for each in (queries, keys)
    )
    values = v.float().unflatten(1, (rule.value_heads, -1))
    step = torch.nn.functional.softplus(a.float() + rule.step_bias)
    step = step if delta else step.clamp(*rule.steps)
    decay = torch.exp(-torch.exp(rule.a_log) * step)[:, :, None, None]  # [T, Hv, 1, 1]
    beta = None if b is None else b.float().sigmoid()
    out = torch.empty_like(values)
    for first, end, source, target in runs.each():
        state = torch.zeros_like(states[0]) if source == FROM_ZERO else states[source].clone()
        for t in range(first, end):
            state = state * decay[t]
            if beta is None:
                added = values[t] * step[t, :, None]
            else:
                added = (values[t] - (state * keys[t, :, :, None]).sum(1)) * beta[t, :, None]
            state = state + keys[t, :, :, None] * added[:, None]
            out[t] = (state * queries[t, :, :, None]).sum(1)
        states[target] = state
    if rule.skip is not None:
        out = out + rule.skip[:, None] * values
    return out.flatten(1).to(v.dtype)


def gated_norm_reference(call: GatedNormCall) -> Tensor:
    """`norm(x) * weight * silu(gate)`, or with `gate_first` `norm(x * silu(gate)) * weight`; in float32."""
    x, gate, weight, eps, group, gate_first = call
    opened = torch.nn.functional.silu(gate.float())
    inside = x.float() * opened if gate_first else x.float()
    groups = inside.unflatten(1, (-1, group))
    normed = unit_rows(groups, eps)
    scaled = (normed * weight.view(-1, group)).flatten(1)
    return (scaled if gate_first else scaled * opened).to(x.dtype)


def _unit(heads: Tensor) -> Tensor:
    if heads.is_cuda:
        width = heads.shape[-1]
        return unit_rows(heads, _LENGTH_EPS / width) * width**-0.5
    return heads * torch.rsqrt(heads.pow(2).sum(-1, keepdim=True) + _LENGTH_EPS)
