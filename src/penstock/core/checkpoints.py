"""Checkpoints of recurrent state beside the prefix cache, and which of them is forgotten first.

Decides which checkpoint slot is handed out next. Does not know sequences or what a state is; a checkpoint's key is that
of the block that it ends (`block_keys`). Invariants, verified by `Checkpoints.check`: every slot is free, pending or
findable under one key; a pending one is being written by a plan that is not committed, and cannot be found.
"""

from __future__ import annotations

from collections import OrderedDict

from penstock.contract.errors import EngineFault

__all__ = ["NO_CHECKPOINT", "Checkpoints"]

NO_CHECKPOINT = -1


class Checkpoints:
    """All checkpoint slots of an engine. Owned by the scheduler's `BlockPool`.

    Args:
        num_slots: number of slots.

    Attributes:
        restored: how often a sequence began with one, since the start.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.restored = 0
        self._free = list(reversed(range(num_slots)))
        self._pending: set[int] = set()
        self._index: OrderedDict[bytes, int] = OrderedDict()  # the first to be forgotten first
        self._pinned: set[bytes] = set()

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def __len__(self) -> int:
        """How many can be found."""
        return len(self._index)

    @property
    def pending(self) -> frozenset[int]:
        """Slots that plans in flight write."""
        return frozenset(self._pending)

    def restore(self, key: bytes) -> int:
        """The slot of the state under `key`, which must exist; it is not reused before `unpin`."""
        self._index.move_to_end(key)
        self._pinned.add(key)
        self.restored += 1
        return self._index[key]

    def unpin(self) -> None:
        """The plan that restores the pinned states has been made; later plans may write to their slots."""
        self._pinned.clear()

    def slot_of(self, key: bytes) -> int:
        """The slot of the state under `key`; -1 if there is none."""
        return self._index.get(key, NO_CHECKPOINT)

    def touch(self, key: bytes) -> None:
        """Mark the state under `key`, which must exist, as just used."""
        self._index.move_to_end(key)

    def demote(self, key: bytes) -> None:
        """Let the state under `key`, if it is there, be forgotten before all others."""
        if key in self._index:
            self._index.move_to_end(key, last=False)

    def take(self) -> int:
        """A slot to write to, pending from now on; forgets a state for it if necessary. -1 if no slot can be had."""
        if self._free:
            slot = self._free.pop()
        else:
            key = next((key for key in self._index if key not in self._pinned), None)
            if key is None:
                return NO_CHECKPOINT
            slot = self._index.pop(key)
        self._pending.add(slot)
        return slot

    def keep(self, key: bytes, slot: int) -> None:
        """Let a pending slot that was written be found. If another has the key, that one stays: states are the same."""
        self._end_pending(slot)
        if key in self._index:
            self._index.move_to_end(key)
            self._free.append(slot)
        else:
            self._index[key] = slot

    def give_back(self, slot: int) -> None:
        """Free a pending slot that is no longer needed."""
        self._end_pending(slot)
        self._free.append(slot)

    def drop_pending(self) -> None:
        """Free all pending slots: no plan in flight will ever be committed."""
        self._free += sorted(self._pending)
        self._pending.clear()

    def reset(self) -> None:
        """Forget all states that can be found."""
        self._free += self._index.values()
        self._index.clear()
        self._pinned.clear()

    def check(self) -> None:
        """Verify the invariants.

        Raises:
            EngineFault: one does not hold.
        """
        slots = sorted([*self._free, *self._pending, *self._index.values()])
        if slots != list(range(self.num_slots)):
            raise EngineFault("checkpoints: not so: every slot is free, pending or findable under one key")

    def _end_pending(self, slot: int) -> None:
        if slot not in self._pending:
            raise EngineFault(f"checkpoint {slot} is not pending")
        self._pending.remove(slot)
