"""The small layers: weights that know which kernel they belong to.

Decides how a layer's tensors are named under its prefix and what shape they must have. Knows no family and no config.
Layers are immutable and hold nothing but weights: two calls with the same input give the same output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.embedding import embedding
from penstock.kernels.linear import Weight, linear
from penstock.kernels.norm import layer_norm, rms_norm
from penstock.nn.parameters import Parameters

__all__ = ["Embedding", "LayerNorm", "Linear", "RMSNorm"]


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A projection; `weight` is `[N, K]`, `bias` `[N]` or None."""

    weight: Weight
    bias: Tensor | None = None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Project: `[T, K]` to `[T, N]`; `residual` `[T, N]` is added where it is cheapest."""
        return linear(x, self.weight, self.bias, residual)

    @classmethod
    def bind(cls, parameters: Parameters, name: str, outputs: int, inputs: int, *, bias: bool) -> Linear:
        """Take `name.weight` `[outputs, inputs]` and, where there is one, `name.bias`."""
        weight = parameters.take_linear([(f"{name}.weight", (outputs, inputs))])
        return cls(weight, parameters.take(f"{name}.bias", (outputs,)) if bias else None)

    @classmethod
    def bind_fused(cls, parameters: Parameters, parts: dict[str, int], inputs: int, *, bias: bool) -> Linear:
        """Take several projections of one input as a single weight: one pass over memory and one call instead of many.

        Args:
            parameters: where the tensors come from.
            parts: number of outputs by name; outputs follow each other in this order.
            inputs: width of the common input.
            bias: whether each part has one.
        """
        weight = parameters.take_linear([(f"{name}.weight", (outputs, inputs)) for name, outputs in parts.items()])
        if not bias:
            return cls(weight)
        return cls(weight, parameters.take_fused([(f"{name}.bias", (outputs,)) for name, outputs in parts.items()]))

    @classmethod
    def bind_head(cls, parameters: Parameters, name: str, vocabulary: int, hidden: int) -> Linear:
        """Take `name.weight` `[vocabulary, hidden]`, the weight of a head that is not the embedding."""
        return cls(parameters.take_head(f"{name}.weight", (vocabulary, hidden)))

    @classmethod
    def bind_transposed(cls, parameters: Parameters, name: str, outputs: int, inputs: int) -> Linear:
        """Take `name.weight` stored as `[inputs, outputs]` (GPT-2's Conv1D), and `name.bias`."""
        weight = parameters.take_linear([(f"{name}.weight", (outputs, inputs))], transposed=True)
        return cls(weight, parameters.take(f"{name}.bias", (outputs,)))


@dataclass(frozen=True, slots=True, eq=False)
class RMSNorm:
    """Root mean square norm; `weight` is `[H]`."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise each row: `[..., H]` to `[..., H]`."""
        return rms_norm(x, self.weight, self.eps)

    @classmethod
    def bind(cls, parameters: Parameters, name: str, width: int, eps: float) -> RMSNorm:
        """Take `name.weight`."""
        return cls(parameters.take(f"{name}.weight", (width,)), eps)


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """Layer norm; `weight` and `bias` are `[H]`."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise each row: `[..., H]` to `[..., H]`."""
        return layer_norm(x, self.weight, self.bias, self.eps)

    @classmethod
    def bind(cls, parameters: Parameters, name: str, width: int, eps: float) -> LayerNorm:
        """Take `name.weight` and `name.bias`."""
        return cls(parameters.take(f"{name}.weight", (width,)), parameters.take(f"{name}.bias", (width,)), eps)


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """A table of rows; `weight` is `[V, H]`, looked up in `dtype`."""

    weight: Weight
    dtype: torch.dtype

    def __call__(self, indices: Tensor) -> Tensor:
        """Look up: `[T]` int64 to `[T, H]`."""
        return embedding(indices, self.weight, self.dtype)

    @classmethod
    def bind(cls, parameters: Parameters, name: str, rows: int, width: int) -> Embedding:
        """Take `name.weight`."""
        return cls(parameters.take_table(f"{name}.weight", (rows, width)), parameters.dtype)
