"""A mixture of experts in compiled code, behind the signatures of its reference (`kernels.experts`).

Decides how tensors are handed over as addresses; the work is in `native/experts.cpp` and `native/experts.h`. Takes
packed weights, and float32 and bfloat16 rows on the CPU.

Invariant: a token's bits depend on its own row alone: neither on the tokens beside it, nor on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.activation import gelu, gelu_new, relu, silu_and_mul
from penstock.kernels.experts import ExpertStack, RouterSpec, StackedWeight
from penstock.kernels.native_attention import vector
from penstock.kernels.native_rows import required, rows
from penstock.kernels.packed_weight import PackedStack
from penstock.kernels.scratch import Scratch

__all__ = ["NativeExperts", "expert_layer", "gate_rows", "route"]

_ACTIVATIONS: dict[Callable[..., Tensor], int] = {silu_and_mul: 0, gelu_new: 1, gelu: 2, relu: 3}
_SCORINGS = {"softmax": 0, "sigmoid": 1}
_ABSENT = (0, 0, 0)
_scratch = Scratch()


def expert_layer(stack: ExpertStack, spec: RouterSpec, activation: int, selection_bias: Tensor | None) -> Any:
    """The compiled `ExpertLayer`, which has addresses only: the caller keeps what lies there.

    Raises:
        ValueError: a shape, dtype or kernel does not fit.
    """
    if stack.experts != spec.experts:
        raise ValueError(f"the stack has {stack.experts} experts, the router {spec.experts}")
    return required().ExpertLayer(
        router=_router(spec, selection_bias),
        activation=activation,
        gate_up=_stack("gate_up", stack.gate_up),
        down=_stack("down", stack.down),
    )


class NativeExperts:
    """The experts of one layer, ready to run. Immutable; keeps the tensors alive that it reads.

    Attributes:
        layer: the compiled `ExpertLayer`, which has their addresses only.
    """

    def __init__(
        self,
        stack: ExpertStack,
        spec: RouterSpec,
        activation: Callable[[Tensor], Tensor],
        selection_bias: Tensor | None = None,
    ) -> None:
        """Check and note where everything lies.

        Args:
            stack: both weights packed.
            spec: how experts are chosen.
            activation: a function of `kernels.activation`; with `silu_and_mul`, and with no other, there are gates.
            selection_bias: `[E]` float32, or None.

        Raises:
            RuntimeError: this installation has no compiled kernels.
            ValueError: a shape, dtype or kernel does not fit.
        """
        if activation not in _ACTIVATIONS:
            names = ", ".join(each.__name__ for each in _ACTIVATIONS)
            raise ValueError(f"activation must be one of {names}, not {activation!r}")
        self._held = (stack, selection_bias)
        self._experts, self._hidden = stack.experts, stack.hidden
        self.layer = expert_layer(stack, spec, _ACTIVATIONS[activation], selection_bias)

    def __call__(self, x: Tensor, router_logits: Tensor, residual: Tensor | None = None) -> Tensor:
        """`penstock.kernels.experts.experts`.

        Args:
            x: `[T, H]`, float32 or bfloat16; here and below rows may be strided views of a wider matrix.
            router_logits: `[T, E]`, float32 or bfloat16.
            residual: `[T, H]`, float32 or bfloat16; or None.

        Returns:
            `[T, H]` in the dtype of `residual`, or of `x` without one; owned by the caller.

        Raises:
            ValueError: a shape or dtype that does not fit.
        """
        out = torch.empty(x.shape, dtype=x.dtype if residual is None else residual.dtype)
        self.run_into(out, x, router_logits, residual)
        return out

    def run_into(self, out: Tensor, x: Tensor, router_logits: Tensor, residual: Tensor | None = None) -> int:
        """The same, written to `out`, which may be `x` or `residual`.

        Returns:
            How many experts' weights were read.
        """
        count = len(x)
        _check_shapes((count, self._hidden), x=x, out=out, residual=residual)
        _check_shapes((count, self._experts), router_logits=router_logits)
        size = self.layer.scratch_bytes(count)
        return int(
            self.layer.run(
                rows=count,
                x=rows("x", x),
                logits=rows("router_logits", router_logits),
                residual=_optional_rows("residual", residual),
                out=rows("out", out),
                scratch=_scratch.address_of(size),
                scratch_bytes=size,
            )
        )


def route(logits: Tensor, spec: RouterSpec, selection_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`penstock.kernels.experts.route`; the chosen experts are int32.

    Raises:
        RuntimeError: this installation has no compiled kernels.
        ValueError: a shape or dtype that does not fit.
    """
    _check_shapes((len(logits), spec.experts), logits=logits)
    chosen = torch.empty(len(logits), spec.top_k, dtype=torch.int32)
    weights = torch.empty(len(logits), spec.top_k)
    _router(spec, selection_bias).route(
        rows=len(logits), logits=rows("logits", logits), chosen=chosen.data_ptr(), weights=weights.data_ptr()
    )
    return chosen, weights


def gate_rows(x: Tensor, gate_logits: Tensor, residual: Tensor | None = None) -> Tensor:
    """`penstock.kernels.experts.gate_rows`.

    Raises:
        RuntimeError: this installation has no compiled kernels.
        ValueError: a shape or dtype that does not fit.
    """
    _check_shapes(tuple(x.shape), x=x, residual=residual)
    _check_shapes((len(x), 1), gate_logits=gate_logits)
    out = torch.empty(x.shape, dtype=x.dtype if residual is None else residual.dtype)
    required().gate_rows(
        rows=len(x),
        width=x.shape[1],
        x=rows("x", x),
        logits=rows("gate_logits", gate_logits),
        residual=_optional_rows("residual", residual),
        out=rows("out", out),
    )
    return out


def _router(spec: RouterSpec, selection_bias: Tensor | None) -> Any:
    bias = 0 if selection_bias is None else vector("selection_bias", selection_bias, torch.float32, spec.experts)
    return required().Router(
        experts=spec.experts,
        top_k=spec.top_k,
        scoring=_SCORINGS[spec.scoring],
        normalise=spec.normalise,
        scale=spec.scale,
        bias=bias,
    )


def _stack(name: str, weight: StackedWeight) -> Any:
    if not isinstance(weight, PackedStack):
        raise ValueError(f"{name} must be packed, not a plain tensor")
    return required().WeightStack(
        kind=int(weight.kind),
        outputs=weight.outputs,
        inputs=weight.inputs,
        weight=weight.data.data_ptr(),
        stride=weight.stride,
    )


def _optional_rows(name: str, x: Tensor | None) -> tuple[int, int, int]:
    return _ABSENT if x is None else rows(name, x)


def _check_shapes(shape: tuple[int, ...], **tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None and (x.dim() != 2 or tuple(x.shape) != shape):
            raise ValueError(f"{name} must be {list(shape)}, not {list(x.shape)}")
