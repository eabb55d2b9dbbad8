"""`dry_multiplier`: "don't repeat yourself", a penalty on tokens that would prolong a verbatim repetition.

p-e-w, "DRY: a modern repetition penalty that reliably prevents looping" (2024), the proposal that llama.cpp and others
implement: if the last n tokens occurred before, followed by token t, then t's logit is lowered by
`dry_multiplier * dry_base ** (n - dry_allowed_length)`, provided that n is at least `dry_allowed_length`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.sampling.kinds import Number
from penstock.sampling.parameter import Home, Parameter, RowStage
from penstock.sampling.parameters.dry_allowed_length import ALLOWED_LENGTH
from penstock.sampling.parameters.dry_base import BASE

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.contract.sampling import SamplingSpec
    from penstock.sampling.row_views import RowViews

__all__ = ["LONGEST", "PARAMETER", "apply", "match_lengths"]

LONGEST = 128
"""Longer repetitions are penalised like this length: by then the penalty is far beyond any logit."""

_LARGEST = 1e30
"""Bounds the penalty so that logits stay finite."""


def apply(logits: Tensor, rows: RowViews) -> Tensor:
    """`[R, V]` minus each row's penalties."""
    vocabulary = logits.shape[-1]
    lengths = match_lengths(rows, vocabulary)  # [R, L]
    longest = lengths.new_zeros(len(rows.specs), vocabulary)  # [R, V], by the token that would follow
    longest.scatter_reduce_(1, rows.known(), lengths, "amax")
    penalties = logits.new_tensor([_table(spec) for spec in rows.specs])  # [R, LONGEST + 1]
    return logits - penalties.gather(1, longest.to(logits.device))


def match_lengths(rows: RowViews, vocabulary: int) -> Tensor:
    """`[R, L]`: how many of the last tokens also occur just before each position, at most `LONGEST`; 0 after the end.

    Tokens outside the row's window or before a sequence breaker do not count. At a sequence breaker the length is 0.
    """
    tokens, ends, starts = rows.tokens, rows.ends, rows.window("dry_penalty_last_n")
    breaks = _breaks(rows, vocabulary)  # [R, L]
    places = rows.places()
    alive = (places > starts) & (places < ends) & ~breaks  # [R, L]
    lengths = tokens.new_zeros(tokens.shape)
    for back in range(1, min(LONGEST, tokens.shape[1] - 1) + 1):
        last = (ends - back).clamp(min=0)  # [R, 1]
        alive[:, :back] = False
        alive[:, back:] &= tokens[:, :-back] == tokens.gather(1, last)
        alive &= (places - back >= starts) & (ends - back >= starts) & ~breaks.gather(1, last)
        if not alive.any():
            break
        lengths += alive
    return lengths


def _breaks(rows: RowViews, vocabulary: int) -> Tensor:
    """`[R, L]`: which tokens are sequence breakers of their row."""
    none: tuple[int, ...] = ()
    flags = (rows.tokens < 0)[:, :1].repeat(1, vocabulary)  # [R, V], all false
    for row, spec in enumerate(rows.specs):
        flags[row, list(spec.get("dry_sequence_breakers", none))] = True
    return flags.gather(1, rows.known())


def _table(spec: SamplingSpec) -> list[float]:
    """The penalty for each length of a repetition."""
    multiplier, base = spec.get("dry_multiplier", 0.0), spec.get("dry_base", BASE)
    allowed = spec.get("dry_allowed_length", ALLOWED_LENGTH)
    return [
        min(_LARGEST, multiplier * base ** (length - allowed)) if length >= max(1, allowed) else 0.0
        for length in range(LONGEST + 1)
    ]


PARAMETER = Parameter(
    name="dry_multiplier",
    kind=Number(0.0, 100.0),
    default=0.0,
    neutral=0.0,
    nullable=False,
    home=Home.SPEC,
    field="dry_multiplier",
    doc="Penalise tokens that would continue a word-for-word repetition (DRY), with this strength; 0 is off, 0.8 is"
    " usual.",
    stages=(RowStage(7, apply),),
)
