"""What a machine could do at best, and what share of it a measurement reached.

Decides the yardstick: a step can be no quicker than reading every weight once, nor than its arithmetic at the rate of
independent products in registers; its limit is the longer of the two (the roofline of Williams, Waterman and Patterson,
2009). Keys and values, norms and sampling are not counted, so shares err on the low side. Knows no tensors; who
measures the limits is `kernels`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.contract.model import ModelWork

__all__ = ["Limits", "limits_line", "share_text", "shares"]


MEASURED = ("read_bytes", "fp32_ops", "bf16_ops", "int8_ops")


@dataclass(frozen=True, slots=True)
class Limits:
    """A machine's limits with some number of threads, a second: bytes read, operations in each arithmetic."""

    isa: str
    threads: int
    read_bytes: float
    fp32_ops: float
    bf16_ops: float
    int8_ops: float

    def ops(self, arithmetic: str) -> float:
        """Operations a second in `fp32`, `bf16` or `int8`."""
        return {"fp32": self.fp32_ops, "bf16": self.bf16_ops, "int8": self.int8_ops}[arithmetic]

    def or_better(self, later: Limits) -> Limits:
        """The higher of each of two measurements: whatever disturbed one only lowered it."""
        better = {name: max(getattr(self, name), getattr(later, name)) for name in MEASURED}
        return replace(self, **better)

    def seconds(self, work: ModelWork, ops: float) -> float:
        """The shortest time of a step of `ops` operations that reads every weight once."""
        return max(work.weight_bytes / self.read_bytes, ops / self.ops(work.arithmetic))


def shares(row: Mapping[str, Any], work: ModelWork, limits: Limits) -> dict[str, float]:
    """What part of the limit the medians of a row reached, as JSON: 1 is the limit.

    Prefill is taken as one step of all prompts, decode as steps of one token a stream at the middle of their length.
    """
    streams, prompt, new = row["streams"], row["prompt_tokens"], row["new_tokens"]
    pairs = prompt * (prompt + 1) / 2
    prefill = streams * (prompt * work.ops_a_token + pairs * work.ops_a_pair + work.ops_a_sample)
    decode = streams * (work.ops_a_token + work.ops_a_sample + (prompt + new / 2) * work.ops_a_pair)
    return {
        "prefill_share_of_limit": limits.seconds(work, prefill) * row["prefill_tok_s"] / (streams * prompt),
        "decode_share_of_limit": limits.seconds(work, decode) * row["decode_tok_s"] / streams,
    }


def limits_line(limits: Limits) -> str:
    """The limits for people."""
    rates = ", ".join(f"{limits.ops(name) / 1e9:.0f} G{name}" for name in ("fp32", "bf16", "int8"))
    return (
        f"machine's limits ({limits.isa}, {limits.threads} threads): {limits.read_bytes / 1e9:.1f} GB/s read,"
        f" operations a second {rates}"
    )


def share_text(row: Mapping[str, Any]) -> str:
    """The shares of a row for people; "" where it has none."""
    if "decode_share_of_limit" not in row:
        return ""
    return f"  {row['prefill_share_of_limit']:.0%}, {row['decode_share_of_limit']:.0%} of the machine's limit"
