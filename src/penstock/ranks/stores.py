"""Recurrent state of which every rank has a share: when rank 0 copies places, the other ranks do too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from penstock.contract.model import StateSpec
from penstock.exec.state_store import StateStore

__all__ = ["MirroredStates"]


class MirroredStates(StateStore):
    """A `StateStore` of rank 0; arguments as there.

    Attributes:
        copied: called when a place was copied outside the model, with the place and the places that it was copied to.
    """

    def __init__(
        self,
        specs: Sequence[StateSpec],
        num_slots: int,
        num_checkpoints: int,
        device: torch.device,
        num_spares: int = 0,
    ) -> None:
        super().__init__(specs, num_slots, num_checkpoints, device, num_spares)
        self.copied: Callable[[int, tuple[int, ...]], None] = lambda source, targets: None  # noqa: ARG005

    def copy_place(self, source: int, targets: Sequence[int]) -> None:
        """See `StateStore.copy_place`."""
        super().copy_place(source, targets)
        self.copied(source, tuple(targets))
