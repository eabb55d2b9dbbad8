"""The backend `torch`: computes every operation by its reference, on any device.

It is the fallback without compiled kernels, and the reference for them. Library matrix products choose their order of
summation by shape, so on a CPU it is exact only up to rounding. On CUDA products are cut into pieces of rows with the
same bits (`row_pieces`), and norms and attention sum in an order that does not depend on the batch (`norm.unit_rows`,
`cuda_attention`); it still does not report itself as `exact` there, because this has not been measured on more than one
device. It runs on torch's threads, whose number is one setting for the whole process.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.kernels import allowed_tokens, experts, norm, paged_attention, rope
from penstock.kernels.activation import ACTIVATIONS, gelu_new_reference
from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.backend import RuleOut
from penstock.kernels.cuda_attention import CudaAttention
from penstock.kernels.experts import ExpertStack, RouterSpec, StackedWeight
from penstock.kernels.head_projection import project_heads
from penstock.kernels.linear import Weight
from penstock.kernels.recurrence import (
    GatedNormCall,
    RecurrenceCall,
    gated_norm_reference,
    recurrence_reference,
)
from penstock.kernels.short_convolution import ConvolutionCall, short_convolution_reference

__all__ = ["TorchBackend"]

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class TorchBackend:
    """A `Backend` made of the references.

    Attributes:
        reason: why it was chosen over compiled kernels, in words.
    """

    device: torch.device = _HOST
    reason: str = "torch was asked for"
    name: str = "torch"
    exact: bool = False
    isa: str = "torch"
    threads: int = 0
    _cuda_attention: CudaAttention = field(default_factory=CudaAttention, repr=False, compare=False)

    @property
    def choose(self) -> None:
        """See `Backend.choose`."""
        return

    @property
    def rule_out(self) -> RuleOut:
        """See `Backend.rule_out`."""
        return allowed_tokens.rule_out

    def why_not(self, dtype: torch.dtype, head_dim: int, *, latent: bool = False) -> None:  # noqa: ARG002 - any
        """See `Backend.why_not`: it supports everything."""
        return

    def packs_kv(self, dtype: torch.dtype, head_dim: int, block_size: int) -> bool:  # noqa: ARG002 - none is
        """See `Backend.packs_kv`."""
        return False

    def why_torch(self) -> str:
        """See `Backend.why_torch`."""
        return self.reason

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """See `Backend.linear`."""
        return weight.matmul(None, x, bias, residual, out_dtype)

    def embedding(self, ids: Tensor, table: Weight, dtype: torch.dtype) -> Tensor:
        """See `Backend.embedding`."""
        return table.rows(None, ids, dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Backend.rms_norm`."""
        return norm.rms_norm_reference(x, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """See `Backend.layer_norm`."""
        return norm.layer_norm_reference(x, weight, bias, eps)

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """See `Backend.activate`."""
        return ACTIVATIONS[activation](x)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `Backend.rotate`."""
        return rope.rotate_reference(x, cos, sin)

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
        """See `Backend.experts`."""
        function = ACTIVATIONS[activation]
        return experts.experts(
            x, router_logits, stack, spec, function, selection_bias=selection_bias, residual=residual
        )

    def short_convolution(self, call: ConvolutionCall) -> Tensor:
        """See `Backend.short_convolution`."""
        return short_convolution_reference(call)

    def gate_rows(self, x: Tensor, gate_logits: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `Backend.gate_rows`."""
        return experts.gate_rows(x, gate_logits, residual)

    def recurrence(self, call: RecurrenceCall) -> Tensor:
        """See `Backend.recurrence`."""
        return recurrence_reference(call)

    def gated_norm(self, call: GatedNormCall) -> Tensor:
        """See `Backend.gated_norm`."""
        return gated_norm_reference(call)

    def gate(self, x: Tensor, gate: Tensor, kind: str = "sigmoid") -> Tensor:
        """See `Backend.gate`."""
        wide = gate.float()
        return (x.float() * (wide.sigmoid() if kind == "sigmoid" else gelu_new_reference(wide))).to(x.dtype)

    def project_heads(self, x: Tensor, weights: StackedWeight, passed: int) -> Tensor:
        """See `Backend.project_heads`."""
        return project_heads(None, x, weights, passed)

    def write_kv(self, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, write_slots: Tensor) -> None:
        """See `Backend.write_kv`."""
        paged_attention.write_kv_reference(k_cache, v_cache, k, v, write_slots)

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
        """See `Backend.paged_attention`."""
        attend = self._cuda_attention if q.is_cuda else paged_attention.paged_attention_reference
        return attend(q, k_cache, v_cache, q_start, kv_len, block_table, spec, sinks)
