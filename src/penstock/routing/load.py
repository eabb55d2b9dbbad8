"""What is known of one replica: its last report, and what was sent to it since.

Estimates how long a request that comes now would wait there. Knows nothing about prefixes. Reports come over a network
from processes that may be broken, so no number is trusted: each is brought within bounds, and no number raises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Replica", "ReplicaLoad", "finite", "within"]

_HOUR = 3600.0
_MANY = 10**9
_DEFAULT_SLOTS = 16
_BESIDE = 0.2
"""The part of a stay by which a new request is delayed if sequences decode in all slots."""
_ON_THE_WAY = 0.1
"""A report may not include yet what was sent in so many seconds before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """The last report of a replica about its load.

    Attributes:
        backlog_seconds: seconds until it has read all prompts that it has accepted.
        running: number of sequences that hold a slot.
        waiting: number of sequences that wait for one.
        slots: number of sequences that can run at once; 0 if unknown.
        free_blocks: number of KV blocks that no sequence holds, whether or not they still cache something.
        total_blocks: number of all KV blocks; 0 if unknown.
        tokens_per_second: prompt tokens that it reads in a second; 0.0 if it has not measured that yet.
    """

    backlog_seconds: float
    running: int
    waiting: int
    slots: int
    free_blocks: int
    total_blocks: int
    tokens_per_second: float = 0.0


def within(value: float, lowest: float, highest: float) -> float:
    """`value` as a float, clamped to the bounds; NaN becomes the lowest."""
    return float(min(max(value, lowest), highest)) if value == value else float(lowest)


class Replica:
    """One replica as the router sees it. Owned by its `Router`.

    Attributes:
        name: the caller's name for it.
        alive: False once it was lost or has left; then it is ignored.
        reported: when it last reported; infinity if it never did.
        read_at: when it will have read all prompts that it has.
        at_once: how many sequences it has, running or waiting.
        sent: how many of this router's requests it has.
        score: for sorting: about when it could start a request.
        rate: prompt tokens that it reads in a second.
        told: whether it has reported `rate` itself.
        total_blocks: all its KV blocks; 0 if unknown.
    """

    __slots__ = (
        "_blocks_per_running",
        "_free_blocks",
        "_recent",
        "_running",
        "_slots",
        "alive",
        "at_once",
        "name",
        "rate",
        "read_at",
        "reported",
        "score",
        "sent",
        "told",
        "total_blocks",
    )

    def __init__(self, name: str, rate: float) -> None:
        self.name = name
        self.alive = True
        self.rate = rate
        self.told = False
        self.reported = math.inf
        self.read_at = 0.0
        self.at_once = 0
        self.sent = 0
        self.score = 0.0
        self._slots = _DEFAULT_SLOTS
        self._running = 0
        self._free_blocks = float(_MANY)
        self.total_blocks = 0
        self._blocks_per_running = 0.0
        self._recent: list[tuple[float, float, float]] = []  # when, seconds to read, blocks: may not be reported yet

    def report(self, load: ReplicaLoad, now: float, stay: float) -> None:
        """Take over `load`, and add what was sent so recently that it may not include it."""
        if load.tokens_per_second > 0:
            self.rate = within(load.tokens_per_second, 1e-3, _MANY)
            self.told = True
        self._forget_recent(now)
        self.reported = now
        self.read_at = now + within(load.backlog_seconds, 0.0, _HOUR) + sum(each[1] for each in self._recent)
        self._slots = int(within(load.slots, 0, _MANY)) or _DEFAULT_SLOTS
        self._running = int(within(load.running, 0, _MANY))
        self.at_once = max(self._running + int(within(load.waiting, 0, _MANY)), self.sent)
        self.total_blocks = int(within(load.total_blocks, 0, _MANY))
        free = within(load.free_blocks, 0, self.total_blocks) if self.total_blocks else float(_MANY)
        self._blocks_per_running = (self.total_blocks - free) / self._running if self._running else 0.0
        self._free_blocks = free - sum(each[2] for each in self._recent)
        self.rescore(now, stay)

    def take(self, unread: float, blocks: float, now: float, stay: float) -> None:
        """Note that a request was sent to it, with `unread` tokens to read and a need for `blocks` KV blocks."""
        seconds = unread / self.rate
        self.read_at = min(max(self.read_at, now), now + _HOUR) + seconds
        self.sent += 1
        self.at_once += 1
        self._free_blocks -= blocks
        self._forget_recent(now)
        self._recent.append((now, seconds, blocks))
        self.rescore(now, stay)

    def give(self, now: float, stay: float) -> None:
        """Note that one of this router's requests ended there; more ends than requests are no error."""
        if self.sent:
            self.sent -= 1
            self.at_once = max(0, self.at_once - 1)
            self._free_blocks += self._blocks_per_running
            self.rescore(now, stay)

    def rescore(self, now: float, stay: float) -> None:
        """Update `score` after a change."""
        self.score = max(self.read_at, now) + self.crowd(0.0, stay)

    def wait(self, blocks: float, now: float, stay: float) -> float:
        """Seconds until it would start a request that needs `blocks` blocks, if requests stay `stay` seconds."""
        return min(max(self.read_at - now, 0.0), 2 * _HOUR) + self.crowd(blocks, stay)

    def crowd(self, blocks: float, stay: float) -> float:
        """Seconds that a new request waits for others to end, and a little for each that decodes beside it."""
        stays = max(0, self.at_once + 1 - self._slots) / self._slots
        lacking = blocks - self._free_blocks
        if lacking > 0 and self._blocks_per_running > 0:
            stays = max(stays, math.ceil(lacking / self._blocks_per_running) / self._running)
        return stay * (stays + _BESIDE * min(self.at_once / self._slots, 1.0))

    @property
    def decoding(self) -> int:
        """About how many answers are being written there: as many as it has, but at most its slots."""
        return min(self.at_once, self._slots)

    def _forget_recent(self, now: float) -> None:
        if self._recent and not now - self._recent[0][0] <= _ON_THE_WAY:
            self._recent = [each for each in self._recent if 0.0 <= now - each[0] <= _ON_THE_WAY]


def finite(value: float) -> bool:
    """Whether `value` is a finite number; integers too large for a float are not."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
