"""The operations that every model is made of: a closed set of frozen values, each of which names its operands.

A model is described once, as a tuple of these (`nn.program`). Nothing is computed here: `nn.reference` computes each of
them with torch, `nn.compiled` hands them to the compiled kernels, `nn.cost` adds up what they read and multiply. A new
operation needs a class here, a case in each of these readers, and a struct in `native/program.h`. Operations that
carry state are in `nn.recurrent_operations`, operations that few families need in `nn.further_operations`.

Operands are registers (`nn.register`), which hold what earlier operations wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.experts import ExpertStack, RouterSpec
from penstock.kernels.linear import Weight
from penstock.nn.further_operations import (
    Adapt,
    AllReduce,
    Gate,
    GateKind,
    GateRows,
    Module,
    ProjectHeads,
    Regroup,
    Scale,
    copied,
)
from penstock.nn.recurrent_operations import GatedNorm, Recurrence, ShortConvolution
from penstock.nn.register import Register
from penstock.nn.rope import RotaryTable

__all__ = [
    "Activate",
    "Activation",
    "Adapt",
    "AllReduce",
    "Attend",
    "Embed",
    "Experts",
    "Gate",
    "GateKind",
    "GateRows",
    "GatedNorm",
    "Heads",
    "Linear",
    "Module",
    "Norm",
    "NormHeads",
    "NormKind",
    "Operation",
    "Operations",
    "ProjectHeads",
    "Recurrence",
    "Register",
    "Regroup",
    "Rotate",
    "Scale",
    "ShortConvolution",
    "copied",
]


class NormKind(StrEnum):
    """How rows are normalised."""

    RMS = "rms_norm"
    """`x / sqrt(mean(x^2) + eps) * weight`."""
    LAYER = "layer_norm"
    """`(x - mean) / sqrt(var + eps) * weight + bias`, with or without a bias."""


class Activation(StrEnum):
    """Activation functions, named as in `kernels.activation`."""

    SILU_AND_MUL = "silu_and_mul"
    """`silu(gate) * up` of the columns `[gate | up]`; the output is half as wide as the input."""
    GELU_NEW_AND_MUL = "gelu_new_and_mul"
    """The same with tanh-approximated GELU."""
    GELU_AND_MUL = "gelu_and_mul"
    """The same with exact (erf) GELU."""
    CLAMPED_SWIGLU_AND_MUL = "clamped_swiglu_and_mul"
    """`g * sigmoid(1.702 g) * (u + 1)`, with `g` the gate clamped to at most 7 and `u` up clamped to +-7 (gpt-oss)."""
    GELU_NEW = "gelu_new"
    GELU = "gelu"
    RELU = "relu"

    @property
    def gated(self) -> bool:
        """Whether one half of the input columns gates the other half."""
        return self.value.endswith("_and_mul")


@dataclass(frozen=True, slots=True)
class Heads:
    """`queries` query heads, `keys` key heads and as many value heads, each `dim` wide.

    A nonzero `value_dim` means a latent cache: one key head, whose last `value_dim` elements are the value.
    """

    queries: int
    keys: int
    dim: int
    value_dim: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Embed:
    """`out = table[index] * scale` for each token, or added to `out`.

    Attributes:
        table: `[V, H]`.
        of_positions: index by the token's position, not by its id.
        first: token id of the table's first row, if the table holds only some rows of a divided vocabulary; other rows
            are zeros. None for a whole table.
    """

    out: Register
    table: Weight
    of_positions: bool = False
    scale: float = 1.0
    adds: bool = False
    first: int | None = None

    def __str__(self) -> str:
        index = "positions" if self.of_positions else "token_ids"
        index += "" if self.first is None else f" - {self.first}"
        factor = "" if self.scale == 1.0 else f" * {self.scale:g}"
        return self.out.line(f"embed({index}, {_weight(self.table)}){factor}", adds=self.adds)


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """`out = norm(x)` over all columns of `x`, or added to `out`.

    Attributes:
        weight: `[width]`.
        bias: `[width]` for a layer norm that has one; else None.
        adds: add to `out` instead of overwriting it; RMS norms only.
    """

    out: Register
    x: Register
    kind: NormKind
    weight: Tensor
    bias: Tensor | None
    eps: float
    adds: bool = False

    def __str__(self) -> str:
        return self.out.line(f"{self.kind}({self.x}, w[{self.x.width}], eps {self.eps:g})", adds=self.adds)


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """`out = x @ weight.T + bias`, or added to `out`.

    Attributes:
        weight: `[N, K]`.
        bias: `[N]` or None.
        modules: the checkpoint's modules that the outputs belong to, in order; adapters refer to modules by these
            names. () for a projection that takes no adapter.
    """

    out: Register
    x: Register
    weight: Weight
    bias: Tensor | None = None
    adds: bool = False
    modules: tuple[Module, ...] = ()

    def __str__(self) -> str:
        shift = "" if self.bias is None else ", bias"
        return self.out.line(f"linear({self.x}, {_weight(self.weight)}{shift})", adds=self.adds)


@dataclass(frozen=True, slots=True, eq=False)
class Activate:
    """`out = kind(x)`; for a gated kind, `x` is twice as wide as `out`."""

    out: Register
    x: Register
    kind: Activation

    def __str__(self) -> str:
        return self.out.line(f"{self.kind}({self.x})")


@dataclass(frozen=True, slots=True, eq=False)
class NormHeads:
    """An RMS norm of each head in `x`, that is, of every `D` neighbouring columns.

    Attributes:
        weight: `[D]`, the same for all heads.
        out: as wide as `x`; None to work in place.
        adds: add to `out` instead of overwriting it.
    """

    x: Register
    weight: Tensor
    eps: float
    out: Register | None = None
    adds: bool = False

    @property
    def written(self) -> Register:
        """Where the normed heads go."""
        return self.x if self.out is None else self.out

    def __str__(self) -> str:
        text = f"rms_norm_heads({self.x}, w[{len(self.weight)}], eps {self.eps:g})"
        return self.written.line(text, adds=self.adds)


@dataclass(frozen=True, slots=True, eq=False)
class Rotate:
    """Rotary position embedding of each head in `x`, `head_dim` wide, in place."""

    x: Register
    head_dim: int
    table: RotaryTable

    def __str__(self) -> str:
        return self.x.line(f"rotate({self.x}, {self.table})")


@dataclass(frozen=True, slots=True, eq=False)
class Attend:
    """Store `k` and `v` in a cache, then let each query attend to the visible positions of its own sequence.

    Attributes:
        out: `[T, Hq * D]`, or `[T, Hq * value_dim]` for a latent cache.
        q: `[T, Hq * D]`.
        k: `[T, Hkv * D]`; None if the layer reads what another layer stored.
        v: `[T, Hkv * D]`; None if `k` is None, or if values are part of the keys.
        cache: index into `Program.caches`.
        sinks: `[Hq]` float32, one extra logit per head in its softmax that contributes no value; or None.
    """

    out: Register
    q: Register
    k: Register | None
    v: Register | None
    cache: int
    heads: Heads
    spec: AttentionSpec
    sinks: Tensor | None = None

    def __str__(self) -> str:
        operands = ", ".join(str(each) for each in (self.q, self.k, self.v) if each is not None)
        limits = f"scale {self.spec.scale:g}"
        if self.spec.softcap is not None:
            limits += f", softcap {self.spec.softcap:g}"
        if self.spec.window is not None:
            limits += f", window {self.spec.window}"
        if self.spec.looks_ahead:
            limits += f", {'all' if self.spec.ahead is None else self.spec.ahead} ahead"
        sinks = "" if self.sinks is None else ", sinks"
        return self.out.line(f"attend({operands}, cache {self.cache}, {limits}{sinks})")


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """The weighted sum of the outputs of each token's chosen experts; see `kernels.experts`.

    Attributes:
        x: `[T, H]`.
        logits: `[T, E]`, router logits.
        selection_bias: `[E]` float32, added to scores for selection only; or None.
        adds: add to `out` instead of overwriting it.
    """

    out: Register
    x: Register
    logits: Register
    stack: ExpertStack
    spec: RouterSpec
    activation: Activation
    selection_bias: Tensor | None = None
    adds: bool = True

    def __str__(self) -> str:
        spec, (_, inside, hidden) = self.spec, self.stack.gate_up.shape
        choice = f"{spec.top_k} of {spec.experts}, {spec.scoring}{', normalised' if spec.normalise else ''}"
        choice += f", {spec.top_groups} of {spec.groups} groups" if spec.groups > 1 else ""
        choice += ", biases" if self.stack.has_biases else ""
        choice += ", scales" if self.stack.scale is not None else ""
        weights = f"W{[inside, hidden]}, W{[hidden, self.stack.down.shape[2]]}, {self.activation}"
        return self.out.line(f"experts({self.x}, {self.logits}, {choice}, {weights})", adds=self.adds)


Operation = (
    Embed
    | Norm
    | Linear
    | Activate
    | NormHeads
    | Rotate
    | Attend
    | Experts
    | GateRows
    | ShortConvolution
    | Recurrence
    | GatedNorm
    | Gate
    | Scale
    | Regroup
    | ProjectHeads
    | Adapt
    | AllReduce
)
Operations = tuple[Operation, ...]


def _weight(weight: Weight) -> str:
    """Format the shape and form of a weight."""
    return f"W[{weight.outputs}, {weight.inputs}] {weight.form}"
