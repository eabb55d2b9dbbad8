"""The interface that every backend implements.

Decides what executors, the sampler and the KV store may ask of a backend. A backend is a value: it is chosen once, when
an engine is assembled, and passed to everything that computes. Two engines with different backends can coexist in one
process, independent of each other.
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

__all__ = ["Backend", "Choose", "RuleOut"]

Choose = Callable[[Tensor, SamplingMetadata, Tensor | None], Choices]
"""Chooses a token for each row of logits; see `native_sampler.choose`."""

RuleOut = Callable[[Tensor, bytes, Tensor], None]
"""Copies a row of logits, with -inf for tokens that are not allowed; see `allowed_tokens.rule_out`."""


class Backend(Protocol):
    """Operations on the tensors of one device. Immutable; Python threads may share one."""

    @property
    def name(self) -> str:
        """`torch`, `cpu` or `cuda`."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        ...

    @property
    def exact(self) -> bool:
        """Whether a row's bits depend on that row alone, in every operation that it does not leave to torch."""
        ...

    @property
    def isa(self) -> str:
        """The instruction set of its compiled kernels; `torch` if it has none."""
        ...

    @property
    def threads(self) -> int:
        """The number of threads that compiled kernels run on; 0 if it has no compiled kernels."""
        ...

    @property
    def choose(self) -> Choose | None:
        """A function that samples tokens in one call; None if sampling is left to torch, stage by stage."""
        ...

    @property
    def rule_out(self) -> RuleOut:
        """A function that rules tokens out of a row of logits."""
        ...

    def why_not(self, dtype: torch.dtype, head_dim: int, *, latent: bool = False) -> str | None:
        """The reason, in words, why it leaves this dtype and head_dim to torch; None if it supports them.

        With `latent`, `head_dim` is the key width of a latent cache.
        """
        ...

    def packs_kv(self, dtype: torch.dtype, head_dim: int, block_size: int) -> bool:
        """Whether its attention supports, and gains from, a packed KV cache of this dtype, head_dim and block_size."""
        ...

    def why_torch(self) -> str | None:
        """The reason, in words, why torch (which has no int8 KV cache) computes; None if compiled kernels do."""
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
        """Apply one of `kernels.activation.ACTIVATIONS`, given by name."""
        ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `kernels.rope.rotate_reference`; a backend may rotate in place, and then returns `x` itself."""
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
        """See `kernels.experts.experts`; the activation is given by name."""
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
        """`x * kind(gate)`, for matrices of the same shape; `kind` is `sigmoid` or `gelu_new`."""
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
