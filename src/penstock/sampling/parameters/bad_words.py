"""`bad_words`: texts that are never generated (vLLM's parameter of this name).

At admission each text becomes the token sequences that spell it, at the start of a text and after a space; the
last token of such a sequence is ruled out if the others were generated just before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.contract.limits import DEFAULT_LIMITS
from penstock.sampling.kinds import Strings
from penstock.sampling.parameter import Home, Parameter, RowStage

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.contract.sampling import SamplingSpec
    from penstock.sampling.row_views import RowViews

__all__ = ["PARAMETER", "apply"]


def apply(logits: Tensor, rows: RowViews) -> Tensor:
    """`[R, V]` with -inf where a token would complete a word; a row that would have no token left stays unchanged."""
    spans = zip(rows.specs, rows.prompt_ends.squeeze(-1).tolist(), rows.ends.squeeze(-1).tolist(), strict=True)
    pairs = [
        (row, token)
        for row, (spec, start, end) in enumerate(spans)
        for token in _banned(spec, rows.tokens[row, max(start, end - _longest(spec)) : end].tolist())
    ]
    if not pairs:
        return logits
    at, ids = zip(*pairs, strict=True)
    where = (rows.ends.new_tensor(at).to(logits.device), rows.ends.new_tensor(ids).to(logits.device))
    banned = logits.index_put(where, logits.new_tensor(float("-inf")))
    return banned.where(banned.amax(-1, keepdim=True).isfinite(), logits)


def _banned(spec: SamplingSpec, recent: list[int]) -> set[int]:
    """The tokens that would complete a word after the generated tokens `recent`."""
    return {word[-1] for word in _words(spec) if recent[len(recent) - len(word) + 1 :] == list(word[:-1])}


def _longest(spec: SamplingSpec) -> int:
    return max((len(word) for word in _words(spec)), default=1) - 1


def _words(spec: SamplingSpec) -> tuple[tuple[int, ...], ...]:
    none: tuple[tuple[int, ...], ...] = ()
    return spec.get("bad_words", none)


PARAMETER = Parameter(
    name="bad_words",
    kind=Strings(DEFAULT_LIMITS.max_bad_words, DEFAULT_LIMITS.max_bad_word_chars),
    default=None,
    neutral=(),
    nullable=True,
    home=Home.SPEC,
    field="bad_words",
    doc="Do not generate these texts: a token that would complete one is ruled out. Each text is matched as the"
    " tokenizer spells it, at the start of a text and after a space. Where no other token is left, nothing is ruled"
    " out.",
    stages=(RowStage(2, apply),),
)
