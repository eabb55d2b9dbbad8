"""Decides whose turn is next: a bounded queue in front of a few places, fair between keys.

First come, first served within a key; round robin between keys. A key with many requests delays other keys by
those under way, not by those in its queue.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.contract.errors import Overloaded, RefusalCause

__all__ = ["Turns"]


class Turns:
    """Gives turns to threads. The empty key is for servers without keys: only the total limits apply to it.

    Args:
        what: what waits for turns, in the plural, for the text of refusals.
        places: how many may have a turn at once.
        most_waiting: how many may wait.
        key_places: how many of one key may have a turn at once, so that places are left for others.
        key_waiting: how many of one key may wait.
        wait_seconds: how long a thread waits at most.
        retry_after: seconds after which a refused caller may try again.
    """

    def __init__(
        self,
        what: str,
        *,
        places: int,
        most_waiting: int,
        key_places: int,
        key_waiting: int,
        wait_seconds: float,
        retry_after: int,
    ) -> None:
        self._what = what
        self._places = places
        self._most_waiting = most_waiting
        self._key_places = key_places
        self._key_waiting = key_waiting
        self._wait_seconds = wait_seconds
        self._retry_after = retry_after
        self._lock = threading.Lock()  # guards all that follows
        self._under_way: Counter[str] = Counter()
        self._queues: OrderedDict[str, deque[threading.Event]] = OrderedDict()  # the key whose turn it is comes first

    @property
    def waiting(self) -> int:
        """How many threads wait."""
        with self._lock:
            return self._waiting()

    @contextmanager
    def turn(self, key: str = "") -> Iterator[None]:
        """Wait for a turn, and have it until the block ends.

        Raises:
            Overloaded: too many threads wait already, in total or of this key; or the wait took too long.
        """
        self._enter(key)
        try:
            yield
        finally:
            with self._lock:
                self._leave(key)

    def _enter(self, key: str) -> None:
        with self._lock:
            granted = self._queue(key)
        try:
            come = granted.wait(self._wait_seconds)
        except BaseException:  # Ctrl-C
            with self._lock:
                if not self._withdraw(key, granted):
                    self._leave(key)
            raise
        if not come:
            with self._lock:
                if self._withdraw(key, granted):
                    raise self._refusal("wait")

    def _queue(self, key: str) -> threading.Event:
        """Join the queue, or get a turn at once. This method and all below must be called under the lock."""
        granted = threading.Event()
        self._queues.setdefault(key, deque()).append(granted)
        self._grant()
        if not granted.is_set():
            too_many = self._waiting() > self._most_waiting
            if too_many or (key and len(self._queues[key]) > self._key_waiting):
                self._withdraw(key, granted)
                raise self._refusal("wait" if too_many else "of this API key wait")
        return granted

    def _grant(self) -> None:
        for key in list(self._queues):
            if self._under_way.total() >= self._places:
                return
            if key and self._under_way[key] >= self._key_places:
                continue
            self._under_way[key] += 1
            self._queues[key].popleft().set()
            self._queues.move_to_end(key)
            if not self._queues[key]:
                del self._queues[key]

    def _leave(self, key: str) -> None:
        self._under_way[key] -= 1
        if not self._under_way[key]:
            del self._under_way[key]
        self._grant()

    def _withdraw(self, key: str, granted: threading.Event) -> bool:
        """Leave the queue; False if the turn was granted already."""
        if granted.is_set():
            return False
        self._queues[key].remove(granted)
        if not self._queues[key]:
            del self._queues[key]
        return True

    def _waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    def _refusal(self, how: str) -> Overloaded:
        return Overloaded(
            f"Too many {self._what} {how} already.", retry_after=self._retry_after, cause=RefusalCause.WORKERS
        )
