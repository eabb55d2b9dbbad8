"""Says which tokens of a step continue which recurrent state, and where it is written.

This is all that a kernel knows about sequences. Invariant: the runs of a sequence come in order of position. A run may
read what an earlier one has written, so runs are computed in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["FROM_ZERO", "StateRuns"]

FROM_ZERO = -1
"""The source of a run at position 0: a state of zeros."""


class StateRuns(NamedTuple):
    """Runs of neighbouring tokens, each of one sequence.

    Attributes:
        starts: `[N + 1]` int32 on the host; run `n` has the tokens `starts[n]` to `starts[n + 1]`. An empty run copies
            its state.
        sources: `[N]` int32, the place from which each run's state is read; `FROM_ZERO` for zeros.
        targets: `[N]` int32, the place to which it is written.
    """

    starts: Tensor
    sources: Tensor
    targets: Tensor

    @classmethod
    def of(cls, runs: list[tuple[int, int, int]]) -> StateRuns:
        """Build from (token count, source, target) of each run, in order."""
        counts, sources, targets = torch.tensor(runs, dtype=torch.int32).reshape(-1, 3).T
        starts = torch.zeros(len(runs) + 1, dtype=torch.int32)
        starts[1:] = counts.cumsum(0)
        return cls(starts, sources.contiguous(), targets.contiguous())

    def each(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield first token, end, source and target of each run."""
        starts = self.starts.tolist()
        return zip(starts, starts[1:], self.sources.tolist(), self.targets.tolist(), strict=False)
