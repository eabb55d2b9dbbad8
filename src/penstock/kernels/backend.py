"""What computes: the signature that every backend has.

Decides what executors, the sampler and the KV store may ask. A backend is a value: whoever puts an engine together
chooses one and hands it to all that compute with it; nobody below asks which one it is. Two engines with different
backends live in one process without seeing each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.experts import ExpertStack, RouterSpec, StackedWeight
from penstock.kernels.linear import Weight
from penstock.kernels.native_sampler import Choices, SamplingMetadata
from penstock.kernels.recurrence import GatedNormCall, RecurrenceCall
from penstock.kernels.short_convolution import ConvolutionCall

__all__ = ["Backend", "Choose"]

Choose = Callable[[Tensor, SamplingMetadata, Tensor | None], Choices]
"""Chooses a token for each row of logits; see `native_sampler.choose`."""


class Backend(Protocol):
    """Operations on the tensors of one device. Immutable; Python threads may share one."""

    @property
    def name(self) -> str:
        """`torch` or `cpu`."""
        ...

    @property
    def device(self) -> torch.device:
        """Where its tensors lie."""
        ...

    @property
    def exact(self) -> bool:
        """Whether a row's bits depend on that row alone, in every operation that it does by itself."""
        ...

    @property
    def isa(self) -> str:
        """The instruction set of its compiled kernels; `torch` where it has none."""
        ...

    @property
    def threads(self) -> int:
        """The threads that compiled kernels run on; 0 where there are none."""
        ...

    @property
    def choose(self) -> Choose | None:
        """What chooses tokens in one call, or None where sampling is left to torch, stage by stage."""
        ...

    def why_not(self, dtype: torch.dtype, head_dim: int, *, latent: bool = False) -> str | None:
        """What it leaves to torch in a model with such activations and heads, in words; None if nothing.

        With `latent` heads are those of the keys of a latent cache.
        """
        ...

    def packs_kv(self, dtype: torch.dtype, head_dim: int, block_size: int) -> bool:
        """Whether its attention reads a packed KV cache of such numbers, heads and blocks, and is quicker with it."""
        ...

    def why_torch(self) -> str | None:
        """Why torch computes, which has no int8 KV cache, and not compiled kernels; in words. None where they do."""
        ...

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """`x @ weight.T + bias + residual`; see `Weight.matmul`."""
        ...

    def embedding(self, ids: Tensor, table: Weight, dtype: torch.dtype) -> Tensor:
        """The rows of `table` at `ids`; see `Weight.rows`."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `kernels.norm.rms_norm_reference`; a backend may round once, at the end."""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """See `kernels.norm.layer_norm_reference`."""
        ...

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """One of `kernels.activation.ACTIVATIONS`, by its name."""
        ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `kernels.rope.rotate_reference`."""
        ...

    def experts(
        self,
        x: Tensor,
        router_logits: Tensor,
        stack: ExpertStack,
        spec: RouterSpec,
        activation: str,
        *,
        selection_bias: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """See `kernels.experts.experts`, with the activation by its name."""
        ...

    def short_convolution(self, call: ConvolutionCall) -> Tensor:
        """See `kernels.short_convolution.short_convolution_reference`."""
        ...

    def gate_rows(self, x: Tensor, gate_logits: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `kernels.experts.gate_rows`."""
        ...

    def recurrence(self, call: RecurrenceCall) -> Tensor:
        """See `kernels.recurrence.recurrence_reference`."""
        ...

    def gated_norm(self, call: GatedNormCall) -> Tensor:
        """See `kernels.recurrence.gated_norm_reference`."""
        ...

    def gate(self, x: Tensor, gate: Tensor, kind: str = "sigmoid") -> Tensor:
        """`x * kind(gate)`, of matrices of one shape; `kind` is `sigmoid` or `gelu_new`."""
        ...

    def project_heads(self, x: Tensor, weights: StackedWeight, passed: int) -> Tensor:
        """See `kernels.head_projection.project_heads`."""
        ...

    def write_kv(self, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, write_slots: Tensor) -> None:
        """See `kernels.paged_attention.write_kv_reference`."""
        ...

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        q_start: Tensor,
        kv_len: Tensor,
        block_table: Tensor,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `kernels.paged_attention.paged_attention_reference`."""
        ...
