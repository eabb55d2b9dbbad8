"""Writes blocks after the steps that computed them, in a thread that runs when nothing else needs the processor.

A step queues the blocks to keep and goes on; the thread copies their bytes out of the KV memory later. Before a step
reuses a block, it takes the block back (`take_back`): if the block is not copied by then, it is dropped and counted. So
no step waits for a copy, the queue holds no bytes of blocks, and it cannot grow beyond the pool. Recurrent states are
written in the same way, from checkpoint slots to a store of their own; a `Shelf` is one kind of block.

The thread still costs something: it holds the GIL for moments, and competes with steps for caches and memory. So while
steps follow each other, it rests after each block for many times the processor time that the block took; it catches up
when no step is being computed.

Neither thread waits for the other. `take_back` first removes the block from the pending ones, and then checks whether
it is being copied right now; the writing thread first announces which block it copies, and then removes it from the
pending ones. Whatever the order, one of the two sees the other, and a copy that `take_back` overlapped is discarded.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import NamedTuple

from penstock.contract.plan import Save, StoreCounts
from penstock.store.block_store import BlockStore
from penstock.store.budget import DiskBudget
from penstock.thread_turns import give_way

__all__ = ["BlockWriter", "Shelf"]

log = logging.getLogger(__name__)

_NOBODY = (-1, -1)
_REST_SECONDS = 30.0
"""How long nothing is written after a failed write: a full disk stays full for a while."""


_RESTS = 60.0
"""While steps run, the thread rests after each block for this many times the processor time that the block took, so
that steps lose about a hundredth. Wall time would not work: under full load, a block takes a hundred times as long by
the clock, nearly all of it waiting for a processor, and hardly any block would be written."""

_MOST_REST = 1.0
_SLICE = 0.01
_QUIET = 0.02
"""Seconds after a step during which another is expected, so that a gap between two steps does not count as idle."""


class Shelf(NamedTuple):
    """One kind of block.

    Attributes:
        store: where blocks of this kind are written.
        copy: copies all bytes of a block, by its id, from memory into a buffer.
    """

    store: BlockStore
    copy: Callable[[int, memoryview], None]


class BlockWriter:
    """The writing thread and its queue. Only the thread that runs steps may call `offer` and `take_back`.

    Args:
        shelves: the kinds of blocks; methods take an index into this sequence.
        budget: how much of the disk the blocks may take.
        rest_seconds: see `_REST_SECONDS`.
    """

    def __init__(self, shelves: Sequence[Shelf], budget: DiskBudget, rest_seconds: float = _REST_SECONDS) -> None:
        self._shelves = shelves
        self._budget = budget
        self._rest_seconds = rest_seconds
        self._content = bytearray(max(each.store.folder.form.block_bytes for each in shelves))  # room for one block
        self._pending: dict[tuple[int, int], Save] = {}  # by shelf and block
        self._order: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        self._copied = _NOBODY  # the block being copied
        self._overlapped = False
        self._dropped = 0  # counted by the thread that runs steps
        self._written = self._failed = 0  # counted by the writing thread
        self._resting_until = 0.0
        self._failing = False  # whether a write has failed since the last success
        self._stepping = False
        self._stepped = 0.0  # when the last step ended
        self._thread = threading.Thread(target=self._work, name="penstock-store", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> StoreCounts:
        """Counts of written, dropped, failed, damaged and evicted blocks, and the store's size."""
        damaged, budget = sum(each.store.damaged for each in self._shelves), self._budget
        return StoreCounts(self._written, self._dropped, self._failed, damaged, budget.evicted, budget.taken)

    def step_begins(self) -> None:
        """Note that a step is being computed from now on."""
        self._stepping = True

    def step_ends(self) -> None:
        """Note that no step is being computed until the next one begins."""
        self._stepped = time.monotonic()
        self._stepping = False

    def offer(self, saves: Iterable[Save], shelf: int = 0) -> None:
        """Queue blocks to be written when there is time; their bytes must not change before `take_back`."""
        for save in saves:
            place = shelf, save.block
            self._pending[place] = save
            self._order.put(place)

    def take_back(self, blocks: Iterable[int], shelf: int = 0) -> None:
        """Stop saving these blocks, because their bytes change from now on."""
        pending = self._pending
        for block in blocks:
            place = shelf, block
            if pending and pending.pop(place, None) is not None:
                self._dropped += 1
            if self._copied == place:
                self._overlapped = True

    def forget(self) -> None:
        """Drop all pending blocks."""
        for shelf, block in tuple(self._pending):
            self.take_back((block,), shelf)

    def hurry(self) -> None:
        """Write at normal priority from now on, because no more steps will be computed."""
        self.step_ends()
        if self._thread.native_id is not None:
            with suppress(OSError, AttributeError):
                os.sched_setscheduler(self._thread.native_id, os.SCHED_OTHER, os.sched_param(0))

    def settle(self, seconds: float) -> bool:
        """Wait until nothing is pending, for at most `seconds`; returns False if something still is."""
        until = time.monotonic() + seconds
        while self._pending or self._copied != _NOBODY:
            if time.monotonic() > until:
                return False
            time.sleep(0.002)
        return True

    def close(self) -> None:
        """Drop all pending blocks, and stop the thread."""
        self.forget()
        self._order.put(None)

    def _work(self) -> None:
        with suppress(OSError, AttributeError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread
        while (place := self._order.get()) is not None:
            give_way()
            began = time.thread_time()
            try:
                self._save(place)
            except OSError as error:
                self._failed += 1
                self._resting_until = time.monotonic() + self._rest_seconds
                log.log(logging.DEBUG if self._failing else logging.WARNING, "KV blocks are not kept: %s", error)
                self._failing = True
            except Exception:
                log.exception("a block was not kept")
            finally:
                self._copied = _NOBODY
            self._rest(time.thread_time() - began)

    def _rest(self, taken: float) -> None:
        """Rest after a block that took `taken` seconds of processor time, while steps are computed."""
        until = time.monotonic() + min(_MOST_REST, _RESTS * taken)
        while (now := time.monotonic()) < until and (self._stepping or now - self._stepped < _QUIET):
            time.sleep(_SLICE)

    def _save(self, place: tuple[int, int]) -> None:
        self._overlapped = False
        self._copied = place  # from here on `take_back` sets `_overlapped`
        save = self._pending.pop(place, None)
        if save is None:
            return
        if time.monotonic() < self._resting_until:
            self._failed += 1
            return
        store, copy = self._shelves[place[0]]
        if store.has(save.key):
            store.touch(save.key)
            return
        content = memoryview(self._content)[: store.folder.form.block_bytes]
        copy(save.block, content)
        if self._overlapped:
            self._failed += 1
            return
        # From here on an overlap no longer matters: the bytes are copied.
        self._budget.make_room(len(content))
        count = store.write(save, content)
        self._failing = False
        self._written += bool(count)
        self._budget.wrote(count)
