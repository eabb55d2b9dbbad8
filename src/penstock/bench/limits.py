"""The best that a machine could do, and the share of it that a measurement reached.

A step takes at least as long as reading its weights, keys and values once, and as its arithmetic at the rate of
independent products in registers; its limit is the longer of the two (the roofline of Williams, Waterman
and Patterson, 2009). The program says what a step reads and computes (`nn.cost`). Norms and sampling are not
counted, so shares err on the low side. Does not know tensors; `kernels` measures the limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.contract.model import StepCost

__all__ = ["Limits", "limits_line", "share_text", "shares"]


MEASURED = ("read_bytes", "fp32_ops", "bf16_ops", "int8_ops")


@dataclass(frozen=True, slots=True)
class Limits:
    """A machine's limits with some number of threads: bytes read and operations in each arithmetic, per second."""

    isa: str
    threads: int
    read_bytes: float
    fp32_ops: float
    bf16_ops: float
    int8_ops: float

    def ops(self, arithmetic: str) -> float:
        """Operations per second in `fp32`, `bf16` or `int8`."""
        return {"fp32": self.fp32_ops, "bf16": self.bf16_ops, "int8": self.int8_ops}[arithmetic]

    def or_better(self, later: Limits) -> Limits:
        """The higher value of each of two measurements: a disturbance can only lower them."""
        better = {name: max(getattr(self, name), getattr(later, name)) for name in MEASURED}
        return replace(self, **better)

    def seconds(self, cost: StepCost) -> float:
        """The shortest time of a step: it reads all that it needs, or computes, whichever takes longer."""
        computing = cost.fp32_ops / self.fp32_ops + cost.bf16_ops / self.bf16_ops + cost.int8_ops / self.int8_ops
        return max((cost.weight_bytes + cost.kv_bytes) / self.read_bytes, computing)


def shares(row: Mapping[str, Any], costs: Mapping[str, StepCost], limits: Limits) -> dict[str, float]:
    """The share of the limit that the medians of a row reached, as JSON: 1 is the limit.

    Args:
        row: rates of a load, from `batch.summary`.
        costs: costs of its steps, from `batch.costs`.
        limits: the machine's limits, measured in the same run.
    """
    streams, prompt = row["streams"], row["prompt_tokens"]
    return {
        "prefill_share_of_limit": limits.seconds(costs["prefill"]) * row["prefill_tok_s"] / (streams * prompt),
        "decode_share_of_limit": limits.seconds(costs["decode"]) * row["decode_tok_s"] / streams,
    }


def limits_line(limits: Limits) -> str:
    """The limits as a line of text."""
    rates = ", ".join(f"{limits.ops(name) / 1e9:.0f} G{name}" for name in ("fp32", "bf16", "int8"))
    return (
        f"machine's limits ({limits.isa}, {limits.threads} threads): {limits.read_bytes / 1e9:.1f} GB/s read,"
        f" operations a second {rates}"
    )


def share_text(row: Mapping[str, Any]) -> str:
    """The shares of a row as text; "" if it has none."""
    if "decode_share_of_limit" not in row:
        return ""
    return f"  {row['prefill_share_of_limit']:.0%}, {row['decode_share_of_limit']:.0%} of the machine's limit"
