"""The parts of a layer as papers name them, each bound to its weights and lowered to operations over registers.

Decides tensor names under a part's prefix, and the registers in which parts pass values. Families choose and combine
parts; a part that only one family has lives in that family's file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.experts import ExpertStack, RouterSpec
from penstock.kernels.linear import Weight
from penstock.nn.operations import (
    Activate,
    Activation,
    Attend,
    Experts,
    Heads,
    Linear,
    Module,
    Norm,
    NormHeads,
    NormKind,
    Operations,
    Register,
    Rotate,
)
from penstock.nn.rope import RotaryTable
from penstock.nn.weight_loader import WeightLoader

__all__ = [
    "Attention",
    "Block",
    "GatedMlp",
    "MixtureOfExperts",
    "Normalization",
    "PlainMlp",
    "Projection",
    "residual",
    "rms_norm",
]


class Block(Protocol):
    """One branch of a layer, from its input register to its output register."""

    def __call__(self, x: Register, out: Register, *, adds: bool) -> Operations:
        """The operations that write `out`, or add to it if `adds`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """A weight `[N, K]` and its bias `[N]`, or None.

    Attributes:
        modules: see `operations.Linear`.
    """

    weight: Weight
    bias: Tensor | None = None
    modules: tuple[Module, ...] = ()

    def linear(self, out: Register, x: Register, *, adds: bool = False) -> Linear:
        """The operation that writes `out`, or adds to it if `adds`."""
        return Linear(out, x, self.weight, self.bias, adds, self.modules)

    @classmethod
    def bind(cls, weights: WeightLoader, name: str, outputs: int, inputs: int, *, bias: bool = False) -> Projection:
        """Take `name.weight` `[outputs, inputs]` and, if `bias`, `name.bias`."""
        weight = weights.take_linear([(f"{name}.weight", (outputs, inputs))])
        shift = weights.take(f"{name}.bias", (outputs,)) if bias else None
        return cls(weight, shift, (Module(name, outputs),))

    @classmethod
    def bind_fused(
        cls, weights: WeightLoader, parts: Mapping[str, int], inputs: int, *, bias: bool = False
    ) -> Projection:
        """Take several projections of one input as a single weight: one pass over memory and one call instead of many.

        Args:
            weights: where the tensors come from.
            parts: number of outputs by name; outputs are concatenated in this order.
            inputs: width of the common input.
            bias: whether each part has a bias.
        """
        weight = weights.take_linear([(f"{name}.weight", (outputs, inputs)) for name, outputs in parts.items()])
        modules = tuple(Module(name, outputs) for name, outputs in parts.items())
        if not bias:
            return cls(weight, None, modules)
        shift = weights.take_fused([(f"{name}.bias", (outputs,)) for name, outputs in parts.items()])
        return cls(weight, shift, modules)

    @classmethod
    def bind_transposed(cls, weights: WeightLoader, name: str, outputs: int, inputs: int) -> Projection:
        """Take `name.weight` stored as `[inputs, outputs]` (GPT-2's Conv1D), and `name.bias`."""
        weight = weights.take_linear([(f"{name}.weight", (outputs, inputs))], transposed=True)
        return cls(weight, weights.take(f"{name}.bias", (outputs,)), (Module(name, outputs),))


@dataclass(frozen=True, slots=True, eq=False)
class Normalization:
    """A norm and its weights; see `operations.Norm`."""

    kind: NormKind
    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Register, out: Register, *, adds: bool = False) -> Operations:
        """`out = norm(x)`, or added to `out`."""
        return (Norm(out, x, self.kind, self.weight, self.bias, self.eps, adds),)

    @classmethod
    def bind_layer(
        cls, weights: WeightLoader, name: str, width: int, eps: float, *, has_bias: bool = True
    ) -> Normalization:
        """A layer norm: take `name.weight` and, if `has_bias`, `name.bias`."""
        weight = weights.take(f"{name}.weight", (width,))
        bias = weights.take(f"{name}.bias", (width,)) if has_bias else None
        return cls(NormKind.LAYER, weight, bias, eps)


def rms_norm(weights: WeightLoader, name: str, width: int, eps: float, *, plus_one: bool = False) -> Normalization:
    """An RMS norm: take `name.weight`.

    Args:
        weights: where the tensor comes from.
        name: prefix of the tensor.
        width: width of the rows.
        eps: keeps rows of zeros finite.
        plus_one: the checkpoint stores the weight minus 1 (Gemma). The sum is float32, because near 1 bfloat16 would
            lose the stored difference.
    """
    if not plus_one:
        return Normalization(NormKind.RMS, weights.take(f"{name}.weight", (width,)), None, eps)
    weight = weights.take(f"{name}.weight", (width,), torch.float32).add_(1.0)  # out of place loads a compiler
    return Normalization(NormKind.RMS, weight, None, eps)


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """Self-attention: one fused projection to queries, keys and values, and one output projection.

    Attributes:
        qkv: `[(Hq + 2 Hkv) * D, H]`.
        output: `[H, Hq * D]`.
        cache: index into `Program.caches`.
        rope: rotation of queries and keys by position; None for no rotation.
        q_norm: a norm of queries before they are rotated; or None.
        k_norm: the same for keys.
        norms_heads: norm each head by itself (RMS, with weights `[D]`); else norm all heads together.
        sinks: see `operations.Attend`.
    """

    heads: Heads
    qkv: Projection
    output: Projection
    cache: int
    spec: AttentionSpec
    rope: RotaryTable | None = None
    q_norm: Normalization | None = None
    k_norm: Normalization | None = None
    norms_heads: bool = True
    sinks: Tensor | None = None

    def __call__(self, x: Register, out: Register, *, adds: bool) -> Operations:
        """See `Block`."""
        q_width, kv_width = self.heads.queries * self.heads.dim, self.heads.keys * self.heads.dim
        qkv = Register("qkv", q_width + 2 * kv_width)
        q, k, v = qkv.columns(0, q_width), qkv.columns(q_width, kv_width), qkv.columns(q_width + kv_width, kv_width)
        mixed = Register("mixed", q_width)
        return (
            self.qkv.linear(qkv, x),
            *self._norms(q, self.q_norm),
            *self._norms(k, self.k_norm),
            *(
                ()
                if self.rope is None
                else (Rotate(q, self.heads.dim, self.rope), Rotate(k, self.heads.dim, self.rope))
            ),
            Attend(mixed, q, k, v, self.cache, self.heads, self.spec, self.sinks),
            self.output.linear(out, mixed, adds=adds),
        )

    def _norms(self, x: Register, norm: Normalization | None) -> Operations:
        if norm is None:
            return ()
        return (NormHeads(x, norm.weight, norm.eps),) if self.norms_heads else norm(x, x)


@dataclass(frozen=True, slots=True, eq=False)
class GatedMlp:
    """`down(activation([gate(x) | up(x)]))` (Shazeer 2020); `gate_up` has F outputs of the gate, then F of up."""

    gate_up: Projection
    down: Projection
    inner_size: int
    activation: Activation = Activation.SILU_AND_MUL

    def __call__(self, x: Register, out: Register, *, adds: bool) -> Operations:
        """See `Block`."""
        gate_up, activated = Register("gate_up", 2 * self.inner_size), Register("activated", self.inner_size)
        return (
            self.gate_up.linear(gate_up, x),
            Activate(activated, gate_up, self.activation),
            self.down.linear(out, activated, adds=adds),
        )


@dataclass(frozen=True, slots=True, eq=False)
class PlainMlp:
    """`down(activation(up(x)))`."""

    up: Projection
    down: Projection
    inner_size: int
    activation: Activation

    def __call__(self, x: Register, out: Register, *, adds: bool) -> Operations:
        """See `Block`."""
        inner, activated = Register("inner", self.inner_size), Register("activated", self.inner_size)
        return (
            self.up.linear(inner, x),
            Activate(activated, inner, self.activation),
            self.down.linear(out, activated, adds=adds),
        )


@dataclass(frozen=True, slots=True, eq=False)
class MixtureOfExperts:
    """Experts, and the router that chooses among them for each token.

    Attributes:
        selection_bias: see `operations.Experts`.
    """

    router: Projection
    stack: ExpertStack
    spec: RouterSpec
    activation: Activation = Activation.SILU_AND_MUL
    selection_bias: Tensor | None = None

    def __call__(self, x: Register, out: Register, *, adds: bool) -> Operations:
        """See `Block`."""
        logits = Register("logits", self.spec.experts)
        return (
            self.router.linear(logits, x),
            Experts(out, x, logits, self.stack, self.spec, self.activation, self.selection_bias, adds=adds),
        )


def residual(
    stream: Register, block: Block, *, before: Normalization | None = None, after: Normalization | None = None
) -> Operations:
    """`stream + after(block(before(stream)))`; either norm may be None."""
    normed, branch = Register("normed", stream.width), Register("branch", stream.width)
    x = stream if before is None else normed
    first = () if before is None else before(stream, normed)
    if after is None:
        return (*first, *block(x, stream, adds=True))
    return (*first, *block(x, branch, adds=False), *after(branch, stream, adds=True))
