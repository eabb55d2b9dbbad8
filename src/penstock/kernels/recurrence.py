"""References for recurrent layers with matrix state (the gated delta rule and selective scans) and gated norms.

Decides the formulas. Both recurrences decay the state of each head, add an outer product of the key and a vector
derived from the value, and read the state with the query; they differ in that vector.
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
    """The kind of update added to a state."""

    DELTA = "gated_delta_rule"
    """The difference between the value and the state's prediction for the key (Yang et al. 2024, equation 10)."""
    SCAN = "selective_scan"
    """The value times the step size (Mamba-2: Dao and Gu 2024, section 6)."""


@dataclass(frozen=True, slots=True, eq=False)
class RecurrenceRule:
    """Sizes and weights of one layer; vectors are float32, one number per value head.

    Attributes:
        key_heads: number of query and key heads; value head `h` uses key head `h // (value_heads / key_heads)`.
        a_log: the decay of a step is `exp(-exp(a_log) * step)`.
        step_bias: added to `a`; the step size is softplus of the sum.
        skip: factor of the value that is added to the output; or None.
        steps: minimum and maximum step size; scans only.
        tiled: value head `h` uses key head `h % key_heads` instead: the order of value heads in GGUF files of Qwen 3.5.
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
        """Shape of a sequence's state: (value heads, key_dim, value_dim)."""
        return self.value_heads, self.key_dim, self.value_dim

    def __str__(self) -> str:
        heads = f"{self.key_heads} x {self.key_dim} keys, {self.value_heads} x {self.value_dim} values"
        return f"{self.kind}, {heads}{', skip' if self.skip is not None else ''}"


class RecurrenceCall(NamedTuple):
    """The arguments of a recurrence.

    Attributes:
        rule: sizes and weights.
        q: `[T, key_heads * key_dim]`; a scan's C.
        k: `[T, key_heads * key_dim]`; a scan's B.
        v: `[T, value_heads * value_dim]`; a scan's x.
        a: `[T, value_heads]`; a scan's dt.
        b: `[T, value_heads]` for the delta rule, None for a scan.
        states: `[places, value_heads, key_dim, value_dim]` float32; updated in place.
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
    """The arguments of a gated norm.

    Attributes:
        x: `[T, C]`.
        gate: `[T, C]`.
        weight: `[group]`, the same for all groups, or `[C]`; float32.
        eps: keeps groups of zeros finite.
        group: number of columns normed together (RMS norm).
        gate_first: gate before the norm, as in Mamba-2 with `norm_before_gate` false; Qwen3-Next gates after it.
    """

    x: Tensor
    gate: Tensor
    weight: Tensor
    eps: float
    group: int
    gate_first: bool


def recurrence_reference(call: RecurrenceCall) -> Tensor:
    """Run the recurrence token by token, in float32, rounded once at the end.

    `S` is a head's state, `step = softplus(a + step_bias)` (clamped in a scan), `decay = exp(-exp(a_log) step)`.
    Delta rule: `q` and `k` are normalised to unit length and `q` is divided by `sqrt(key_dim)`; then
    `S = decay S + k (v - decay S k) sigmoid(b)`, out `S q`. Scan: `S = decay S + k (step v)`, out `S q`.
    With `skip`, `skip v` is added to out.

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
    """`norm(x) * weight * silu(gate)`, or with `gate_first`, `norm(x * silu(gate)) * weight`; in float32."""
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
