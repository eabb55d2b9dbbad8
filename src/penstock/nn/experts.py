"""Finds a layer's experts in a checkpoint.

Decides the tensor names: files store one tensor per expert and projection, or one tensor for all experts, in which
gates and ups may be joined. Does not know how experts are chosen or computed.
"""

from __future__ import annotations

from penstock.kernels.experts import ExpertStack
from penstock.nn.weight_loader import WeightLoader

__all__ = ["bind_experts"]


def bind_experts(weights: WeightLoader, name: str, *, experts: int, hidden: int, intermediate: int) -> ExpertStack:
    """Take the gated experts under `name`, such as `model.layers.0.mlp.experts`.

    The first naming scheme that the checkpoint has is used: `gate_up_proj` `[E, 2 * F, H]` and `down_proj`
    (transformers in memory, and newer models in files); `gate_proj.weight`, `up_proj.weight` and `down_proj.weight`,
    each holding all experts (GGUF); `w1`, `w3` and `w2` per expert (Mixtral); else `gate_proj`, `up_proj` and
    `down_proj` per expert. `gate_up_proj` and `down_proj` may both be stored inputs first, `[E, H, 2 * F]` and
    `[E, F, H]` (Qwen3-VL); the two orders never fit the same pair of shapes.

    Args:
        weights: where the tensors come from.
        name: prefix of the experts, without an index.
        experts: E.
        hidden: H.
        intermediate: F, the inner width of one expert.
    """
    if weights.has(f"{name}.gate_up_proj"):
        joined = {f"{name}.gate_up_proj": (2 * intermediate, hidden), f"{name}.down_proj": (hidden, intermediate)}
        turned = all(weights.shape(part) == (experts, *shape[::-1]) for part, shape in joined.items())
        gate_up, down = (weights.take_stack(experts, [part], transposed=turned) for part in joined.items())
        return ExpertStack(gate_up, down)
    each = "" if weights.has(f"{name}.gate_proj.weight") else ".{expert}"
    gate, up, down = ("w1", "w3", "w2") if weights.has(f"{name}.0.w1.weight") else ("gate_proj", "up_proj", "down_proj")
    parts = [(f"{name}{each}.{part}.weight", (intermediate, hidden)) for part in (gate, up)]
    gate_up = weights.take_stack(experts, parts)
    return ExpertStack(gate_up, weights.take_stack(experts, [(f"{name}{each}.{down}.weight", (hidden, intermediate))]))
