"""The backend `cpu`: compiled kernels in float32 and bfloat16, with its own instruction set and threads.

Exact: a row's bits depend neither on its neighbours nor on the number of threads. Torch computes what has no kernel:
heads wider than `MAX_HEAD_DIM` (or `MAX_LATENT_DIM`), which `why_not` reports, and experts that are not packed.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from penstock.kernels import native, native_attention, native_experts, native_recurrent, native_rows, native_sampler
from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.backend import Choose, RuleOut
from penstock.kernels.experts import ExpertStack, RouterSpec, StackedWeight
from penstock.kernels.head_projection import project_heads
from penstock.kernels.linear import Weight
from penstock.kernels.native import MAX_HEAD_DIM, MAX_LATENT_DIM, Cpu
from penstock.kernels.native_experts import NativeExperts
from penstock.kernels.recurrence import GatedNormCall, RecurrenceCall
from penstock.kernels.short_convolution import ConvolutionCall
from penstock.kernels.torch_backend import TorchBackend

__all__ = ["DTYPES", "CpuBackend"]

DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of activations, and of KV caches that are not int8."""

_CPU = torch.device("cpu")


class CpuBackend:
    """A `Backend` of compiled kernels. Immutable; its threads end with it.

    Args:
        isa: one of `native.isas()`, or "" for the best of them.
        threads: number of threads for kernels, the caller's included.

    Attributes:
        cpu: the kernels and threads, for code that calls compiled functions directly.

    Raises:
        RuntimeError: this installation has no compiled kernels.
        ValueError: this machine cannot run `isa`, or `threads` is out of range.
    """

    name = "cpu"
    device = _CPU
    exact = True

    def __init__(self, isa: str = "", threads: int = 1) -> None:
        self.cpu: Cpu = native.open_cpu(isa, threads)
        self._choose: Choose = partial(native_sampler.choose, self.cpu)
        self._rule_out: RuleOut = partial(native_sampler.rule_out, self.cpu)
        self._torch = TorchBackend(_CPU)

    def __repr__(self) -> str:
        return f"CpuBackend({self.isa!r}, threads={self.threads})"

    @property
    def isa(self) -> str:
        """See `Backend.isa`."""
        return str(self.cpu.isa)

    @property
    def threads(self) -> int:
        """See `Backend.threads`."""
        return int(self.cpu.threads)

    @property
    def choose(self) -> Choose:
        """See `Backend.choose`."""
        return self._choose

    @property
    def rule_out(self) -> RuleOut:
        """See `Backend.rule_out`."""
        return self._rule_out

    def why_not(self, dtype: torch.dtype, head_dim: int, *, latent: bool = False) -> str | None:
        """See `Backend.why_not`."""
        if dtype not in DTYPES:
            return f"compiled kernels compute in float32 and bfloat16, not in {dtype}"
        widest = MAX_LATENT_DIM if latent else MAX_HEAD_DIM
        if head_dim > widest:
            return f"heads of {head_dim} are wider than {widest}"
        return None

    def packs_kv(self, dtype: torch.dtype, head_dim: int, block_size: int) -> bool:
        """See `Backend.packs_kv`."""
        # An odd head_dim would be padded, and take more memory than in the natural layout.
        return dtype in DTYPES and head_dim <= MAX_HEAD_DIM and head_dim % 2 == 0 and block_size % 16 == 0

    def why_torch(self) -> None:
        """See `Backend.why_torch`."""
        return

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """See `Backend.linear`."""
        return weight.matmul(self.cpu, x, bias, residual, out_dtype)

    def embedding(self, ids: Tensor, table: Weight, dtype: torch.dtype) -> Tensor:
        """See `Backend.embedding`."""
        return table.rows(self.cpu, ids, dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Backend.rms_norm`."""
        return native_rows.rms_norm(self.cpu, x, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """See `Backend.layer_norm`."""
        return native_rows.layer_norm(self.cpu, x, weight, bias, eps)

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """See `Backend.activate`."""
        return native_rows.ACTIVATIONS[activation](self.cpu, x)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `Backend.rotate`."""
        if x.shape[-1] > MAX_HEAD_DIM:
            return self._torch.rotate(x, cos, sin)
        return native_rows.rotate(self.cpu, x, cos, sin)

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
        if not stack.is_packed:
            return self._torch.experts(
                x, router_logits, stack, spec, activation, selection_bias=selection_bias, residual=residual
            )
        return NativeExperts(self.cpu, stack, spec, activation, selection_bias)(x, router_logits, residual)

    def short_convolution(self, call: ConvolutionCall) -> Tensor:
        """See `Backend.short_convolution`."""
        return native_recurrent.short_convolution(self.cpu, call)

    def recurrence(self, call: RecurrenceCall) -> Tensor:
        """See `Backend.recurrence`."""
        return native_recurrent.recurrence(self.cpu, call)

    def gated_norm(self, call: GatedNormCall) -> Tensor:
        """See `Backend.gated_norm`."""
        return native_recurrent.gated_norm(self.cpu, call)

    def gate(self, x: Tensor, gate: Tensor, kind: str = "sigmoid") -> Tensor:
        """See `Backend.gate`."""
        return native_recurrent.gate(self.cpu, x, gate, kind)

    def gate_rows(self, x: Tensor, gate_logits: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `Backend.gate_rows`."""
        return native_experts.gate_rows(self.cpu, x, gate_logits, residual)

    def project_heads(self, x: Tensor, weights: StackedWeight, passed: int) -> Tensor:
        """See `Backend.project_heads`."""
        return project_heads(self.cpu, x, weights, passed)

    def write_kv(self, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, write_slots: Tensor) -> None:
        """See `Backend.write_kv`; supports every cache layout of `native_attention`."""
        if k.shape[-1] > _widest(k_cache, v_cache):
            self._torch.write_kv(k_cache, v_cache, k, v, write_slots)
        else:
            native_attention.write_kv(self.cpu, k_cache, v_cache, k, v, write_slots)

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
        """See `Backend.paged_attention`; supports every cache layout of `native_attention`."""
        if q.shape[-1] > _widest(k_cache, v_cache):
            return self._torch.paged_attention(q, k_cache, v_cache, q_start, kv_len, block_table, spec, sinks)
        return native_attention.paged_attention(
            self.cpu, q, k_cache, v_cache, q_start, kv_len, block_table, spec, sinks
        )


def _widest(k_cache: Tensor, v_cache: Tensor) -> int:
    """The widest head for which compiled attention supports this cache."""
    return MAX_LATENT_DIM if native_attention.is_latent(k_cache, v_cache) else MAX_HEAD_DIM
