"""Ranks of a divided program as threads of one process, and a cutter for weights that are in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from penstock.kernels.dense_weight import DenseWeight
from penstock.nn.dividing import Ranges

__all__ = ["DenseCutter", "ThreadGroup", "on_ranks"]

T = TypeVar("T")


class DenseCutter:
    """Cuts plain weights; `block` is the unit in which their inputs may be cut."""

    def __init__(self, block: int = 1) -> None:
        self._block = block
        self.numbers = 0
        """Numbers in all weights that were cut so far."""

    def linear(self, weight: DenseWeight, outputs: Ranges | None = None, inputs: Ranges | None = None) -> DenseWeight:
        return DenseWeight(self._taken(weight.numbers, outputs, inputs))

    def stack(self, weight: Tensor, outputs: Ranges | None = None, inputs: Ranges | None = None) -> Tensor:
        return self._taken(weight, outputs, inputs)

    def unit(self, weight: object) -> int:
        return self._block

    def _taken(self, numbers: Tensor, outputs: Ranges | None, inputs: Ranges | None) -> Tensor:
        for dim, ranges in ((-2, outputs), (-1, inputs)):
            if ranges is not None:
                numbers = numbers.index_select(dim, torch.tensor([at for each in ranges for at in each]))
        self.numbers += numbers.numel()
        return numbers.contiguous()


class ThreadGroup:
    """One of `size` ranks, each a thread."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, parts: list[Tensor | None]) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._parts = barrier, parts

    def gather(self, part: Tensor) -> Tensor:
        assert part.dtype == torch.float32
        self._parts[self.rank] = part
        self._barrier.wait(timeout=60)
        gathered = torch.stack([each for each in self._parts if each is not None])
        self._barrier.wait(timeout=60)
        return gathered


def on_ranks(size: int, work: Callable[[ThreadGroup], T]) -> Sequence[T]:
    """What each rank's `work` returns."""
    barrier, parts = threading.Barrier(size), [None] * size
    groups = [ThreadGroup(rank, size, barrier, parts) for rank in range(size)]

    def guarded(group: ThreadGroup) -> T:
        try:
            return work(group)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(guarded, groups))
