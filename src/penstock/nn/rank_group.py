"""What a divided program asks of the ranks that compute it together: every rank's part of a result, in order of ranks.

Decides how parts become one result: sums are float32 and in order of ranks, so that every rank gets the same bits, and
a token's bits do not depend on what else is in the step. Does not know processes or how parts travel.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from penstock.nn.dividing import vocabulary_share

__all__ = ["RankGroup", "all_reduced", "joined_logits"]


class RankGroup(Protocol):
    """Ranks that compute the same steps, each with its share of the weights.

    Attributes:
        rank: index of this rank, from 0.
        size: number of ranks.
    """

    rank: int
    size: int

    def gather(self, part: Tensor) -> Tensor:
        """Every rank's part, `[size, *part.shape]`, in order of ranks; all ranks call it, with parts of the same shape.

        Args:
            part: float32, contiguous.

        Raises:
            EngineFault: another rank is gone, or silent for too long.
        """
        ...


def all_reduced(group: RankGroup, part: Tensor) -> Tensor:
    """The float32 sum of every rank's part, in order of ranks."""
    parts = group.gather(part.float().contiguous())
    total = parts[0]
    for other in parts[1:]:
        total += other
    return total


def joined_logits(group: RankGroup, part: Tensor, vocab_size: int) -> Tensor:
    """Logits of the whole vocabulary, `[S, V]` float32.

    Args:
        group: the ranks.
        part: `[S, W]` float32, this rank's share of the logits.
        vocab_size: V.
    """
    widths = [len(vocabulary_share(vocab_size, rank, group.size)) for rank in range(group.size)]
    padded = torch.zeros(len(part), max(widths))
    padded[:, : part.shape[1]] = part
    parts = group.gather(padded)
    return torch.cat([each[:, :width] for each, width in zip(parts, widths, strict=True)], dim=1)
