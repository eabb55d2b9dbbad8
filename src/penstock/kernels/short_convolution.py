"""The reference for short causal convolutions: one filter per channel, over the newest few tokens of a sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.state_runs import FROM_ZERO, StateRuns

__all__ = ["ConvolutionCall", "short_convolution_reference"]


class ConvolutionCall(NamedTuple):
    """The arguments of a short convolution.

    Attributes:
        x: `[T, C]`.
        weight: `[L, C]` float32, L at least 2; one tap per row, the newest last.
        bias: `[C]` float32, or None.
        states: `[places, L - 1, C]` float32, each the newest inputs (`gate_in * x`) of a sequence; updated in place.
        runs: which tokens continue which state.
        silu: whether f is SiLU (Gu and Dao 2023, section 3.4); else it is the identity.
        gate_in: `[T, C]` or None.
        gate_out: `[T, C]` or None. LFM2 has both gates (transformers, `Lfm2ShortConv`).
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    states: Tensor
    runs: StateRuns
    silu: bool = False
    gate_in: Tensor | None = None
    gate_out: Tensor | None = None


def short_convolution_reference(call: ConvolutionCall) -> Tensor:
    """`gate_out * f(bias + sum_l weight[l] * (gate_in * x)[t - L + 1 + l])`, in float32, rounded once at the end.

    Inputs before a sequence's first position count as 0. Taps are always summed in order, oldest first, however the
    sequence is cut into runs.

    Returns:
        `[T, C]` in the dtype of `x`.
    """
    x, weight, states = call.x, call.weight, call.states
    inputs = x.float() if call.gate_in is None else call.gate_in.float() * x.float()
    out, taps = torch.empty_like(inputs), weight.shape[0]
    for first, end, source, target in call.runs.each():
        before = torch.zeros_like(states[0]) if source == FROM_ZERO else states[source]
        seen = torch.cat((before, inputs[first:end]))  # [L - 1 + n, C]
        mixed = torch.zeros_like(seen[taps - 1 :]) if call.bias is None else call.bias.float().expand(end - first, -1)
        for tap in range(taps):
            mixed = mixed + weight[tap] * seen[tap : tap + end - first]
        out[first:end] = torch.nn.functional.silu(mixed) if call.silu else mixed
        states[target] = seen[end - first :]
    return (out if call.gate_out is None else call.gate_out.float() * out).to(x.dtype)
