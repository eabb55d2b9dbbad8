"""Writes blocks behind the steps that computed them, by a thread that runs when nobody else wants the processor.

A step says which blocks are to be kept and goes on; the thread takes their bytes out of the KV memory when it gets to
it. Before a step hands a block out again it takes it back (`take_back`): what was not written by then never is, and is
counted. So nothing is copied while a step waits, the queue takes no memory, and it cannot grow beyond the pool. The
same for recurrent states, in checkpoint slots and a store of their own: what a block is one of is its `Shelf`.

Even so it is felt: it holds Python's lock for moments, and takes caches and memory from a step. So while steps follow
each other it rests after each block for many times the processor time that it took, and makes up for it when nobody
computes.

The two never wait for each other. Who hands a block out first removes it from what is pending and then looks whether it
is being copied at this moment; the thread first says what it copies, and then removes it. Whatever the order, one of
them sees the other, and a copy that was overlapped is thrown away.
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
"""For which nothing is written after a write failed: a full disk stays full for a while."""


_RESTS = 60.0
"""While steps run, how many times the processor time that a block took the thread rests after it, so that steps lose
about a hundredth. Not the time by the clock: under full load a block takes a hundred times as long by that, nearly all
of it for a processor to become free, and hardly any would be written."""

_MOST_REST = 1.0
_SLICE = 0.01
_QUIET = 0.02
"""Seconds after a step in which another one may be expected, so that nobody rests between two."""


class Shelf(NamedTuple):
    """Blocks of one kind.

    Attributes:
        store: where they go.
        copy: puts all bytes of one of them, as it is in memory, into what it is given.
    """

    store: BlockStore
    copy: Callable[[int, memoryview], None]


class BlockWriter:
    """The thread and what it has to do. `offer` and `take_back` are for the thread that runs steps.

    Args:
        shelves: the kinds of blocks; methods take the number of one.
        budget: how much of the disk they may take.
        rest_seconds: see `_REST_SECONDS`.
    """

    def __init__(self, shelves: Sequence[Shelf], budget: DiskBudget, rest_seconds: float = _REST_SECONDS) -> None:
        self._shelves = shelves
        self._budget = budget
        self._rest_seconds = rest_seconds
        self._content = bytearray(max(each.store.folder.form.block_bytes for each in shelves))  # of what is written
        self._pending: dict[tuple[int, int], Save] = {}  # by shelf and block
        self._order: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        self._copied = _NOBODY  # the block that is being copied
        self._overlapped = False
        self._dropped = 0  # counted by who runs steps
        self._written = self._failed = 0  # counted by the thread
        self._resting_until = 0.0
        self._failing = False  # since the last block that was written
        self._stepping = False
        self._stepped = 0.0  # when the last step ended
        self._thread = threading.Thread(target=self._work, name="penstock-store", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> StoreCounts:
        """What became of blocks so far."""
        damaged, budget = sum(each.store.damaged for each in self._shelves), self._budget
        return StoreCounts(self._written, self._dropped, self._failed, damaged, budget.evicted, budget.taken)

    def step_begins(self) -> None:
        """Somebody computes from now on."""
        self._stepping = True

    def step_ends(self) -> None:
        """Nobody does, until the next step begins."""
        self._stepped = time.monotonic()
        self._stepping = False

    def offer(self, saves: Iterable[Save], shelf: int = 0) -> None:
        """Write these blocks when there is time; their bytes stay as they are until `take_back`."""
        for save in saves:
            place = shelf, save.block
            self._pending[place] = save
            self._order.put(place)

    def take_back(self, blocks: Iterable[int], shelf: int = 0) -> None:
        """These blocks are written to from now on."""
        pending = self._pending
        for block in blocks:
            place = shelf, block
            if pending and pending.pop(place, None) is not None:
                self._dropped += 1
            if self._copied == place:
                self._overlapped = True

    def forget(self) -> None:
        """Write nothing of what is still pending."""
        for shelf, block in tuple(self._pending):
            self.take_back((block,), shelf)

    def hurry(self) -> None:
        """Nobody computes any more: write at the pace of everybody else."""
        self.step_ends()
        if self._thread.native_id is not None:
            with suppress(OSError, AttributeError):
                os.sched_setscheduler(self._thread.native_id, os.SCHED_OTHER, os.sched_param(0))

    def settle(self, seconds: float) -> bool:
        """Wait until nothing is pending, but no longer; whether that is so."""
        until = time.monotonic() + seconds
        while self._pending or self._copied != _NOBODY:
            if time.monotonic() > until:
                return False
            time.sleep(0.002)
        return True

    def close(self) -> None:
        """Write no more."""
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
        """Keep still after a block that took so much processor time, unless nobody computes."""
        until = time.monotonic() + min(_MOST_REST, _RESTS * taken)
        while (now := time.monotonic()) < until and (self._stepping or now - self._stepped < _QUIET):
            time.sleep(_SLICE)

    def _save(self, place: tuple[int, int]) -> None:
        self._overlapped = False
        self._copied = place  # from here on `take_back` says that it came too late
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
        # `take_back` may say so from here on, and it does not matter any more
        self._budget.make_room(len(content))
        count = store.write(save, content)
        self._failing = False
        self._written += bool(count)
        self._budget.wrote(count)
