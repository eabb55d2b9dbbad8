"""What a stage sees of the rows that it reshapes: their tokens so far, their parameters, and their random numbers.

Decides what "before" means: which tokens a penalty counts. Knows no parameter's maths and no tensor library: it uses
tensor methods only. Everything here is a function of the row alone, so it is the same after a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.contract.sampling import SamplingSpec
from penstock.sampling.uniform import uniform

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["RowViews"]


@dataclass(frozen=True, slots=True, eq=False)
class RowViews:
    """`R` rows, in order.

    Attributes:
        tokens: `[R, L]` int64 on the host: the tokens of each sequence; values after a row's end are arbitrary.
        prompt_ends: `[R, 1]` int64 on the host: where generated tokens begin.
        ends: `[R, 1]` int64 on the host: how many tokens there are, and so the position of the token chosen now.
        specs: the rows' parameters, with lists of texts already resolved to token ids.
        choices: the index of each row's choice in its request.
    """

    tokens: Tensor
    prompt_ends: Tensor
    ends: Tensor
    specs: Sequence[SamplingSpec]
    choices: Sequence[int]

    def select(self, rows: Sequence[int]) -> RowViews:
        """Some of the rows."""
        at = self.ends.new_tensor(list(rows))
        specs, choices = [self.specs[row] for row in rows], [self.choices[row] for row in rows]
        return RowViews(self.tokens[at], self.prompt_ends[at], self.ends[at], specs, choices)

    def column(self, name: str, neutral: float) -> Tensor:
        """The rows' values of `name`, `neutral` where unset: `[R, 1]` float64 on the host."""
        return self.ends.double().new_tensor([[float(spec.get(name, neutral))] for spec in self.specs])

    def window(self, length_name: str) -> Tensor:
        """`[R, 1]`: where a penalty's window begins; parameter `length_name` is its length in tokens, -1 for all."""
        lengths = self.column(length_name, -1).long()  # [R, 1]
        return (self.ends - lengths).clamp(min=0).masked_fill(lengths < 0, 0)

    def counts(self, vocabulary: int, starts: Tensor) -> Tensor:
        """How often each token occurs at or after position `starts` `[R, 1]`: `[R, V]` float32 on the host."""
        places = self.places()
        outside = (places < starts) | (places >= self.ends)
        bins = self.tokens.new_zeros(len(self.specs), vocabulary + 1)  # [R, V + 1], the last for tokens not counted
        bins.scatter_add_(1, self.tokens.masked_fill(outside, vocabulary), self.tokens.new_ones(self.tokens.shape))
        return bins[:, :vocabulary].float()

    def known(self) -> Tensor:
        """`[R, L]`: the tokens, with id 0 after each row's end."""
        return self.tokens.masked_fill(self.places() >= self.ends, 0)

    def places(self) -> Tensor:
        """`[L]`: 0, 1, 2, ..."""
        return self.tokens.new_ones(self.tokens.shape[1]).cumsum(0) - 1

    def uniform(self, purpose: int) -> Tensor:
        """A number in [0, 1) for each row, `[R, 1]` float64 on the host: see `penstock.sampling.uniform`."""
        places = self.ends.squeeze(-1).tolist()
        numbers = [
            [uniform(spec.get("seed", 0), choice, place, purpose)]
            for spec, choice, place in zip(self.specs, self.choices, places, strict=True)
        ]
        return self.ends.double().new_tensor(numbers)
