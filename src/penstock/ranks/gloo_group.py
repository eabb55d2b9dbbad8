"""Exchanges parts of sums between the ranks of one host, with torch.distributed over gloo.

Decides how ranks meet: through a file in a folder that only their user can enter, and over the loopback interface. So
no other host can connect to a rank. A process belongs to one group at a time.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.contract.errors import EngineFault

__all__ = ["GlooGroup"]

_SECONDS = timedelta(seconds=120)
"""How long a rank waits for the others. A rank that is gone is noticed at once; this is for a rank that hangs."""

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class GlooGroup:
    """See `nn.rank_group.RankGroup`; call `join` before anything is gathered. Used by one thread at a time.

    Args:
        rank: which rank this process is, from 0.
        size: how many ranks there are.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._joined = False

    def join(self, file: Path) -> None:
        """Meet the other ranks, which all call this too; returns when all have.

        Args:
            file: a path that does not exist yet, in a folder that the ranks can enter.

        Raises:
            EngineFault: not all ranks came in time.
        """
        os.environ["GLOO_SOCKET_IFNAME"] = _LOOPBACK
        try:
            store = dist.FileStore(str(file), self.size)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=_SECONDS)
        except (RuntimeError, ValueError) as error:
            raise EngineFault(f"the ranks did not meet: {error}") from error
        self._joined = True

    def gather(self, part: Tensor) -> Tensor:
        """See `RankGroup.gather`."""
        gathered = torch.empty((self.size, *part.shape), dtype=part.dtype)
        gathered[self.rank] = part
        others = [rank for rank in range(self.size) if rank != self.rank]
        try:  # each rank with each other one, which is faster than gloo's own gather
            works = [dist.irecv(gathered[rank], rank) for rank in others]
            works += [dist.isend(part, rank) for rank in others]
            for work in works:
                if work is not None:
                    work.wait()
        except RuntimeError as error:
            raise EngineFault(f"rank {self.rank} waited in vain for the others: {error}") from error
        return gathered

    def leave(self) -> None:
        """Leave the group, so that this process can join another."""
        if self._joined:
            self._joined = False
            dist.destroy_process_group()
