"""A mixture of experts in torch: routing tokens to experts, and summing the experts' outputs.

Decides the formulas and the order of every sum; does not know where logits and weights come from, nor which model uses
which of them. Follows transformers' `Qwen3MoeSparseMoeBlock`, `MixtralSparseMoeBlock`, `DeepseekV2TopkRouter` and
`DeepseekV3TopkRouter`. It is the reference that the compiled kernels (`native_experts`) must match, and the fallback
without them.

Invariant: expert outputs are weighted and summed in float32, in ascending order of experts, starting from zero; the
residual is added to the finished sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from penstock.kernels.fused_weight import FusedWeight
from penstock.kernels.packed_stack import FusedStack, PackedStack
from penstock.kernels.packed_weight import PackedWeight
from penstock.kernels.row_pieces import linear_in_pieces

__all__ = [
    "ExpertStack",
    "RouterSpec",
    "Scoring",
    "StackedWeight",
    "bytes_read",
    "experts",
    "experts_read",
    "gate_rows",
    "route",
    "stack_arithmetic",
]

Scoring = Literal["softmax", "sigmoid"]

StackedWeight = Tensor | PackedStack | FusedStack
"""`[E, N, K]`: the weights of a layer's experts, a tensor in the activations' dtype, or packed."""

_LEAST_SUM = 1e-20  # as in DeepSeek-V3: sigmoids of very negative logits are all 0


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How logits become a choice of experts and their weights.

    A score is the softmax over all experts, or the sigmoid, of a logit. The `top_k` experts with the highest logits are
    chosen, or, with a selection bias, those with the highest score + bias; ties go to the lower index. The weight of a
    chosen expert is its score.

    If experts form groups (of neighbours), only experts of the `top_groups` highest-ranked groups can be chosen. A
    group ranks by its best expert, or, with a selection bias, by the sum of its two best (DeepSeek-AI 2024:
    DeepSeek-V2, section 2.1.3, and DeepSeek-V3, section 2.1.2).

    Attributes:
        experts: E.
        top_k: number of experts per token.
        scoring: how a logit becomes a score.
        normalise: whether weights are divided by the sum of the chosen ones (`norm_topk_prob`).
        scale: factor applied to the weights after that (`routed_scaling_factor`).
        groups: number of groups, a divisor of `experts`; 1 for no groups.
        top_groups: number of groups to choose from; they hold at least `top_k` experts.

    Raises:
        ValueError: `top_k`, `scoring`, `groups` or `top_groups` is out of range.
    """

    experts: int
    top_k: int
    scoring: Scoring
    normalise: bool
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        """Check the fields against each other."""
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k must be between 1 and {self.experts}, the number of experts, not {self.top_k}")
        if self.scoring not in ("softmax", "sigmoid"):
            raise ValueError(f"scoring must be softmax or sigmoid, not {self.scoring!r}")
        if self.groups < 1 or self.experts % self.groups:
            raise ValueError(f"groups must divide {self.experts} experts, not be {self.groups}")
        least = -(-self.top_k // (self.experts // self.groups))
        if not least <= self.top_groups <= self.groups:
            raise ValueError(f"top_groups must be between {least} and {self.groups}, not {self.top_groups}")


@dataclass(frozen=True, slots=True, eq=False)
class ExpertStack:
    """The weights of a layer's experts.

    Attributes:
        gate_up: `[E, 2 * F, H]`, each expert's gates first; `[E, F, H]` for experts without gates.
        down: `[E, H, F]`.
        gate_up_bias: `[E, 2 * F]` or `[E, F]` float32, added to the product with `gate_up`; or None.
        down_bias: `[E, H]` float32, added to the product with `down`; or None.
        scale: `[E]` float32, a final factor on each expert's routing weight; or None.

    Raises:
        ValueError: the shapes or dtypes do not fit together.
    """

    gate_up: StackedWeight
    down: StackedWeight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    scale: Tensor | None = None

    def __post_init__(self) -> None:
        """Check the weights and biases against each other."""
        for name, bias, weight in (
            ("gate_up_bias", self.gate_up_bias, self.gate_up),
            ("down_bias", self.down_bias, self.down),
        ):
            if bias is not None and (tuple(bias.shape) != tuple(weight.shape[:2]) or bias.dtype != torch.float32):
                raise ValueError(
                    f"{name} must be {list(weight.shape[:2])} float32, not {list(bias.shape)} {bias.dtype}"
                )
        (experts, inside, hidden), down = self.gate_up.shape, tuple(self.down.shape)
        if down[:2] != (experts, hidden) or inside not in (down[2], 2 * down[2]):
            raise ValueError(f"gate_up {[experts, inside, hidden]} and down {list(down)} do not belong together")
        if self.scale is not None and (self.scale.shape != (experts,) or self.scale.dtype != torch.float32):
            raise ValueError(f"scale must be [{experts}] float32, not {list(self.scale.shape)} {self.scale.dtype}")

    @property
    def experts(self) -> int:
        """E."""
        return self.gate_up.shape[0]

    @property
    def hidden(self) -> int:
        """H."""
        return self.gate_up.shape[2]

    @property
    def has_biases(self) -> bool:
        """Whether any projection has a bias."""
        return self.gate_up_bias is not None or self.down_bias is not None

    @property
    def is_packed(self) -> bool:
        """Whether compiled kernels multiply these weights."""
        return not isinstance(self.gate_up, Tensor) and isinstance(self.down, PackedStack)

    @property
    def weights(self) -> tuple[Tensor | PackedStack, ...]:
        """The single weights of both projections, in the order in which they are multiplied."""
        both = (self.gate_up, self.down)
        return tuple(part for each in both for part in ((each,) if isinstance(each, Tensor) else each.parts))

    @property
    def nbytes(self) -> int:
        """Memory of all weights, biases and scales."""
        vectors = self.gate_up_bias, self.down_bias, self.scale
        return self.gate_up.nbytes + self.down.nbytes + sum(each.nbytes for each in vectors if each is not None)


def stack_arithmetic(weights: StackedWeight) -> str:
    """The arithmetic of the products, named as in `Weight.arithmetic`."""
    if isinstance(weights, Tensor):
        return "fp32" if weights.dtype == torch.float32 else "bf16"
    return weights.arithmetic


def route(logits: Tensor, spec: RouterSpec, selection_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose experts for each token.

    Args:
        logits: `[T, E]`; a NaN counts as higher than all numbers.
        spec: how experts are chosen.
        selection_bias: `[E]`, added to scores for selection only; or None.

    Returns:
        The chosen experts `[T, k]` int64, ascending, and their weights `[T, k]` float32.
    """
    wide = logits.float()
    scores = wide.softmax(dim=-1) if spec.scoring == "softmax" else wide.sigmoid()
    keys = wide if selection_bias is None else scores + selection_bias.float()
    if spec.groups > 1:
        keys = _of_highest_groups(keys, spec, highest=1 if selection_bias is None else 2)
    order = keys.sort(dim=-1, descending=True, stable=True).indices  # [T, E]; ties: lower index first
    chosen = order[:, : spec.top_k].sort(dim=-1).values  # [T, k]
    weights = scores.gather(1, chosen)
    if spec.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _LEAST_SUM)
    return chosen, weights * spec.scale


def _of_highest_groups(keys: Tensor, spec: RouterSpec, highest: int) -> Tensor:
    """Keys `[T, E]`, with -inf outside the best groups; a group ranks by the sum of its `highest` highest keys."""
    grouped = keys.unflatten(1, (spec.groups, -1))  # [T, G, E/G]
    heights = grouped.topk(highest, dim=-1).values.sum(dim=-1)  # [T, G]
    left = heights.sort(dim=-1, descending=True, stable=True).indices[:, spec.top_groups :]
    return grouped.scatter(1, left[:, :, None].expand(-1, -1, grouped.shape[2]), float("-inf")).flatten(1)


def experts(
    x: Tensor,
    router_logits: Tensor,
    stack: ExpertStack,
    spec: RouterSpec,
    activation: Callable[[Tensor], Tensor],
    *,
    selection_bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`residual` plus the weighted sum of `down(activation(gate_up(x)))` of each token's chosen experts.

    Args:
        x: `[T, H]`.
        router_logits: `[T, E]`.
        stack: the experts' weights.
        spec: how experts are chosen.
        activation: a function of `kernels.activation`, `[t, 2 * F]` or `[t, F]` to `[t, F]`.
        selection_bias: as for `route`.
        residual: `[T, H]`, or None.

    Returns:
        `[T, H]` in the dtype of `residual`, or of `x` without one.
    """
    chosen, weights = route(router_logits, spec, selection_bias)
    weights = weights if stack.scale is None else weights * stack.scale[chosen]
    sums = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in chosen.unique().tolist():  # ascending
        rows, places = torch.where(chosen == expert)
        inside = activation(_product(x[rows], stack.gate_up[expert], _of(stack.gate_up_bias, expert)))  # [t, F]
        said = _product(inside, stack.down[expert], _of(stack.down_bias, expert)).float()  # [t, H]
        sums[rows] += weights[rows, places, None] * said
    return sums.to(x.dtype) if residual is None else (residual.float() + sums).to(residual.dtype)


def _of(biases: Tensor | None, expert: int) -> Tensor | None:
    return None if biases is None else biases[expert]


def _product(x: Tensor, weight: Tensor | PackedWeight | FusedWeight, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias`: float32 for a packed weight, the common dtype for a plain tensor."""
    if isinstance(weight, Tensor):
        multiply = linear_in_pieces if x.is_cuda else torch.nn.functional.linear
        return multiply(x, weight, None if bias is None else bias.to(x.dtype))
    return weight.matmul(None, x, bias, out_dtype=torch.float32)


def gate_rows(x: Tensor, gate_logits: Tensor, residual: Tensor | None = None) -> Tensor:
    """`residual + sigmoid(gate_logits) * x`: a gated shared expert, as in Qwen2-MoE.

    Args:
        x: `[T, H]`, the shared expert's output for each token.
        gate_logits: `[T, 1]`.
        residual: `[T, H]`, or None.

    Returns:
        `[T, H]` in the dtype of `residual`, or of `x` without one; computed in float32, rounded once.
    """
    gated = gate_logits.float().sigmoid() * x.float()
    return gated.to(x.dtype) if residual is None else (residual.float() + gated).to(residual.dtype)


def experts_read(spec: RouterSpec, tokens: int) -> float:
    """Expected number of experts that a step of `tokens` tokens reads, all equally likely; `top_k` for one token."""
    return spec.experts * (1 - (1 - spec.top_k / spec.experts) ** tokens)


def bytes_read(stack: ExpertStack, spec: RouterSpec, tokens: int) -> int:
    """Expected bytes of expert weights that a step of `tokens` tokens reads; see `experts_read`."""
    return round(experts_read(spec, tokens) * stack.nbytes / stack.experts)
