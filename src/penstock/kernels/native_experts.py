"""A mixture of experts in compiled code, behind the signatures of its reference (`kernels.experts`).

Decides how tensors are handed over as addresses; the work is in `native/experts.cpp` and `native/experts.h`. Takes
packed weights, and float32 and bfloat16 rows on the CPU.

Invariant: a token's bits depend on its own row alone, neither on other tokens nor on the number of threads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.kernels.experts import ExpertStack, RouterSpec, StackedWeight
from penstock.kernels.native import Cpu, required
from penstock.kernels.native_attention import vector
from penstock.kernels.native_rows import ACTIVATION_CODES, optional_rows, rows
from penstock.kernels.packed_stack import FusedStack, PackedStack
from penstock.kernels.scratch import Scratch

__all__ = ["NativeExperts", "expert_layer", "gate_rows", "route", "stack_of"]

_SCORINGS = {"softmax": 0, "sigmoid": 1}
_scratch = Scratch()


def expert_layer(stack: ExpertStack, spec: RouterSpec, activation: int, selection_bias: Tensor | None) -> Any:
    """Build the compiled `ExpertLayer`. It holds addresses only: the caller keeps the tensors alive.

    Raises:
        ValueError: a shape, dtype or kernel does not fit.
    """
    if stack.experts != spec.experts:
        raise ValueError(f"the stack has {stack.experts} experts, the router {spec.experts}")
    gate_up, ups = stack.gate_up, None
    if isinstance(gate_up, FusedStack):
        gate_up, apart = gate_up.parts
        ups = stack_of("ups", apart, stack.gate_up_bias, first=gate_up.outputs)
    return required().ExpertLayer(
        router=_router(spec, selection_bias, stack.scale),
        activation=activation,
        gate_up=stack_of("gate_up", gate_up, stack.gate_up_bias),
        down=stack_of("down", stack.down, stack.down_bias),
        ups=ups,
    )


class NativeExperts:
    """The experts of one layer, ready to run. Immutable; keeps alive the tensors that it reads.

    Attributes:
        layer: the compiled `ExpertLayer`, which holds only their addresses.
    """

    def __init__(
        self,
        cpu: Cpu,
        stack: ExpertStack,
        spec: RouterSpec,
        activation: str,
        selection_bias: Tensor | None = None,
    ) -> None:
        """Check the operands and record their addresses.

        Args:
            cpu: runs the kernels.
            stack: the weights, both packed.
            spec: how experts are chosen.
            activation: a name in `kernels.activation`; those that end in `_and_mul` need experts with gates.
            selection_bias: `[E]` float32, or None.

        Raises:
            ValueError: a shape, dtype or kernel does not fit.
        """
        if activation not in ACTIVATION_CODES:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATION_CODES)}, not {activation!r}")
        self._cpu = cpu
        self._held = (stack, selection_bias)
        self._experts, self._hidden = stack.experts, stack.hidden
        self.layer = expert_layer(stack, spec, ACTIVATION_CODES[activation], selection_bias)

    def __call__(self, x: Tensor, router_logits: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `kernels.experts.experts`.

        Args:
            x: `[T, H]`, float32 or bfloat16; here and below, rows may be strided views of a wider matrix.
            router_logits: `[T, E]`, float32 or bfloat16.
            residual: `[T, H]`, float32 or bfloat16; or None.

        Returns:
            `[T, H]` in the dtype of `residual`, or of `x` without one; owned by the caller.

        Raises:
            ValueError: a shape or dtype does not fit.
        """
        out = torch.empty(x.shape, dtype=x.dtype if residual is None else residual.dtype)
        self.run_into(out, x, router_logits, residual)
        return out

    def run_into(self, out: Tensor, x: Tensor, router_logits: Tensor, residual: Tensor | None = None) -> int:
        """Like `__call__`, but written to `out`, which may be `x` or `residual`.

        Returns:
            The number of experts whose weights were read.
        """
        count = len(x)
        _check_shapes((count, self._hidden), x=x, out=out, residual=residual)
        _check_shapes((count, self._experts), router_logits=router_logits)
        size = self._cpu.expert_scratch_bytes(self.layer, count)
        return int(
            self._cpu.run_experts(
                layer=self.layer,
                rows=count,
                x=rows("x", x),
                logits=rows("router_logits", router_logits),
                residual=optional_rows("residual", residual),
                out=rows("out", out),
                scratch=required().Memory(_scratch.address_of(size), size),
            )
        )


def route(cpu: Cpu, logits: Tensor, spec: RouterSpec, selection_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `kernels.experts.route`; here the chosen experts are int32.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    _check_shapes((len(logits), spec.experts), logits=logits)
    chosen = torch.empty(len(logits), spec.top_k, dtype=torch.int32)
    weights = torch.empty(len(logits), spec.top_k)
    cpu.route(
        router=_router(spec, selection_bias),
        rows=len(logits),
        logits=rows("logits", logits),
        chosen=chosen.data_ptr(),
        weights=weights.data_ptr(),
    )
    return chosen, weights


def gate_rows(cpu: Cpu, x: Tensor, gate_logits: Tensor, residual: Tensor | None = None) -> Tensor:
    """See `kernels.experts.gate_rows`.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    _check_shapes(tuple(x.shape), x=x, residual=residual)
    _check_shapes((len(x), 1), gate_logits=gate_logits)
    out = torch.empty(x.shape, dtype=x.dtype if residual is None else residual.dtype)
    cpu.gate_rows(
        rows=len(x),
        width=x.shape[1],
        x=rows("x", x),
        logits=rows("gate_logits", gate_logits),
        residual=optional_rows("residual", residual),
        out=rows("out", out),
    )
    return out


def _router(spec: RouterSpec, selection_bias: Tensor | None, scale: Tensor | None = None) -> Any:
    bias = 0 if selection_bias is None else vector("selection_bias", selection_bias, torch.float32, spec.experts)
    return required().Router(
        experts=spec.experts,
        top_k=spec.top_k,
        scoring=_SCORINGS[spec.scoring],
        normalise=spec.normalise,
        scale=spec.scale,
        bias=bias,
        expert_scale=0 if scale is None else vector("scale", scale, torch.float32, spec.experts),
        groups=spec.groups,
        top_groups=spec.top_groups,
    )


def stack_of(name: str, weight: StackedWeight, bias: Tensor | None = None, first: int = 0) -> Any:
    """The compiled `WeightStack` of packed weights and their biases; it holds addresses only.

    Args:
        name: name of the weights, for error messages.
        weight: `[E, N, K]`.
        bias: `[E, M]` float32, whose columns `[first, first + N)` belong to these weights; or None.
        first: see `bias`.

    Raises:
        ValueError: the weights are not packed, or the bias does not fit; the message has `name`.
    """
    if not isinstance(weight, PackedStack):
        raise ValueError(f"{name} must be packed, not a plain tensor")
    return required().WeightStack(
        kind=int(weight.kind),
        outputs=weight.outputs,
        inputs=weight.inputs,
        weight=weight.data.data_ptr(),
        stride=weight.stride,
        bias=0 if bias is None else vector(f"{name}_bias", bias.view(-1), torch.float32, bias.numel()) + 4 * first,
        bias_stride=0 if bias is None else bias.shape[1],
    )


def _check_shapes(shape: tuple[int, ...], **tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None and (x.dim() != 2 or tuple(x.shape) != shape):
            raise ValueError(f"{name} must be {list(shape)}, not {list(x.shape)}")
