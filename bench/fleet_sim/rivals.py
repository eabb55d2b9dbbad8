"""Routers that ours is compared with.

All of them know how many requests each replica has at this moment, as if asking took no time: more than ours knows.
"""

# ruff: noqa: ARG002 (all are told everything; some need little of it)

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from fleet_sim.trace import BLOCK
from penstock.routing import ReplicaLoad, Router

__all__ = ["RIVALS", "Asked", "Contender", "Ours"]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as routers see it.

    Attributes:
        conversation: the number of its conversation, as a header may say it.
        keys: the keys of the prompt's full blocks.
        tokens: the prompt's length.
        now: the time, in seconds.
    """

    conversation: int
    keys: Sequence[bytes]
    tokens: int
    now: float


class Contender(Protocol):
    """A router in the comparison. Replicas are named by their numbers, in decimal.

    Attributes:
        reads_reports: whether it reads the reports of replicas.
    """

    reads_reports: bool

    def set_replicas(self, names: Sequence[str]) -> None:
        """Take the names of the replicas that exist now."""

    def report(self, name: str, load: ReplicaLoad, now: float) -> None:
        """Take a replica's report of its load."""

    def rank(self, asked: Asked) -> Sequence[str]:
        """Return the replicas to offer the request to, in order; as many as the router would try."""

    def sent(self, name: str, asked: Asked) -> None:
        """Note that the request went to a replica."""

    def ended(self, name: str, tokens: int, now: float) -> None:
        """Note that a request of a replica has ended."""

    def size(self) -> int:
        """Return how many prefixes it remembers."""


class Ours:
    """`penstock.routing.Router`, which reads reports that are up to half a second old.

    A replica reports only when it has decided something (`FleetConfig`), so its silence means nothing.
    """

    reads_reports = True

    def __init__(self, seed: int, **options: float) -> None:
        self.router = Router(seed=seed, silence=math.inf, **options)  # type: ignore[arg-type]

    def set_replicas(self, names: Sequence[str]) -> None:
        """See `Contender.set_replicas`."""
        self.router.set_replicas(names)

    def report(self, name: str, load: ReplicaLoad, now: float) -> None:
        """See `Contender.report`."""
        self.router.report(name, load, now)

    def rank(self, asked: Asked) -> Sequence[str]:
        """See `Contender.rank`."""
        return self.router.rank(asked.keys, asked.tokens, asked.now)

    def sent(self, name: str, asked: Asked) -> None:
        """See `Contender.sent`."""
        self.router.sent(name, asked.keys, asked.tokens, asked.now)

    def ended(self, name: str, tokens: int, now: float) -> None:
        """See `Contender.ended`."""
        self.router.ended(name, tokens, now)

    def size(self) -> int:
        """See `Contender.size`."""
        return self.router.known_keys


class Rival:
    """Base class of the other routers.

    Args:
        at_once: returns how many requests a replica has now.
    """

    tries = 3
    reads_reports = False

    def __init__(self, seed: int, at_once: Callable[[str], int]) -> None:
        self.random = random.Random(seed)
        self.at_once = at_once
        self.names: list[str] = []

    def set_replicas(self, names: Sequence[str]) -> None:
        self.names = list(names)

    def report(self, name: str, load: ReplicaLoad, now: float) -> None:
        """Not read."""

    def sent(self, name: str, asked: Asked) -> None:
        """Not needed."""

    def ended(self, name: str, tokens: int, now: float) -> None:
        """Not needed."""

    def size(self) -> int:
        return 0

    def two_choices(self, names: Sequence[str]) -> list[str]:
        """Draw two at random and pick the one with fewer requests, once for each try (Mitzenmacher 2001)."""
        picked = []
        for _ in range(self.tries):
            two = self.random.sample(names, min(2, len(names)))
            picked.append(min(two, key=self.at_once))
        return picked


class RoundRobin(Rival):
    """Takes the replicas in turn."""

    turn = -1

    def rank(self, asked: Asked) -> Sequence[str]:
        self.turn += 1
        return [self.names[(self.turn + each) % len(self.names)] for each in range(self.tries)]


class TwoChoices(Rival):
    """The power of two choices, Ray Serve's default."""

    def rank(self, asked: Asked) -> Sequence[str]:
        return self.two_choices(self.names)


class LeastRequests(Rival):
    """Takes the replica with the fewest requests."""

    def rank(self, asked: Asked) -> Sequence[str]:
        order = sorted(self.names, key=lambda name: (self.at_once(name), self.random.random()))
        return order[: self.tries]


class Hashing(Rival):
    """Consistent hashing (Karger et al. 1997), by a conversation's number or by its first block.

    Args:
        by: `conversation` or `prefix`.
        bound: passes over a replica that would get more than this many times the mean number of requests (Mirrokni et
            al. 2018).
    """

    points = 100

    def __init__(self, seed: int, at_once: Callable[[str], int], by: str, bound: float = math.inf) -> None:
        super().__init__(seed, at_once)
        self.by, self.bound = by, bound
        self.sent_now = 0

    def set_replicas(self, names: Sequence[str]) -> None:
        super().set_replicas(names)
        circle = sorted((_place(f"{name}/{each}".encode()), name) for name in names for each in range(self.points))
        self.places, self.owners = [each[0] for each in circle], [each[1] for each in circle]

    def rank(self, asked: Asked) -> Sequence[str]:
        key = asked.keys[0] if self.by == "prefix" and asked.keys else b"%d" % asked.conversation
        most = math.inf
        if self.bound < math.inf:
            most = math.ceil(self.bound * (self.sent_now + 1) / len(self.names))
        start = bisect_left(self.places, _place(key))
        found: dict[str, None] = {}
        passed: dict[str, None] = {}
        for step in range(len(self.owners)):
            name = self.owners[(start + step) % len(self.owners)]
            if name not in found and name not in passed:
                (found if self.at_once(name) < most else passed)[name] = None
                if len(found) >= self.tries:
                    break
        return [*found, *passed][: self.tries]

    def sent(self, name: str, asked: Asked) -> None:
        self.sent_now += 1

    def ended(self, name: str, tokens: int, now: float) -> None:
        self.sent_now -= 1


class RayPrefix(Rival):
    """Decides as Ray Serve's `PrefixCacheAffinityRouter` does, following its documentation.

    While the longest and the shortest queue differ by no more than the threshold: if at least a tenth of the prompt is
    a prefix that was sent before, take one of the replicas that got the longest such prefix; otherwise take one of the
    replicas with the smallest trees. Beyond the threshold, and among several replicas, the power of two choices
    decides. Prompts count as text here, because Ray's router divides by zero on prompts of token ids.

    Args:
        threshold: `imbalanced_threshold`.
        most: most tokens in a replica's tree (`eviction_threshold_chars`, in tokens); infinity evicts nothing.
    """

    def __init__(
        self, seed: int, at_once: Callable[[str], int], threshold: float = math.inf, most: float = math.inf
    ) -> None:
        super().__init__(seed, at_once)
        self.threshold, self.most = threshold, most
        self.holders: dict[bytes, set[str]] = {}
        self.trees: dict[str, OrderedDict[bytes, None]] = {}

    def set_replicas(self, names: Sequence[str]) -> None:
        super().set_replicas(names)
        for name in [each for each in self.trees if each not in names]:
            for key in self.trees.pop(name):
                self._forget(name, key)
        for name in names:
            self.trees.setdefault(name, OrderedDict())

    def rank(self, asked: Asked) -> Sequence[str]:
        if self.threshold < math.inf:
            queues = [self.at_once(name) for name in self.names]
            if max(queues) - min(queues) > self.threshold:
                return self.two_choices(self.names)
        for length in range(len(asked.keys), 0, -1):
            holders = self.holders.get(asked.keys[length - 1])
            if holders:
                if length * BLOCK >= 0.1 * asked.tokens:
                    return self.two_choices(sorted(holders))
                break
        smallest = min(map(len, self.trees.values()))
        return self.two_choices([name for name in self.names if len(self.trees[name]) == smallest])

    def sent(self, name: str, asked: Asked) -> None:
        tree = self.trees[name]
        for key in reversed(asked.keys):
            self.holders.setdefault(key, set()).add(name)
            tree[key] = None
            tree.move_to_end(key)
        while len(tree) * BLOCK > self.most:
            self._forget(name, tree.popitem(last=False)[0])

    def size(self) -> int:
        return sum(map(len, self.trees.values()))

    def _forget(self, name: str, key: bytes) -> None:
        self.holders[key].discard(name)
        if not self.holders[key]:
            del self.holders[key]


def _place(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest())


CHARS = 4
"""Characters per token, to convert Ray's limits, which are in characters."""

RIVALS: dict[str, Callable[[int, Callable[[str], int]], Contender]] = {
    "ours": lambda seed, _: Ours(seed),
    "ours, told that replicas read 100 tokens/s": lambda seed, _: Ours(seed, tokens_per_second=100.0),
    "round robin": RoundRobin,
    "two choices": TwoChoices,
    "least requests": LeastRequests,
    "hash of conversation": lambda seed, at_once: Hashing(seed, at_once, "conversation"),
    "hash of conversation, bounded": lambda seed, at_once: Hashing(seed, at_once, "conversation", 1.25),
    "hash of prefix": lambda seed, at_once: Hashing(seed, at_once, "prefix"),
    "hash of prefix, bounded": lambda seed, at_once: Hashing(seed, at_once, "prefix", 1.25),
    "Ray's prefix router": RayPrefix,
    "Ray's prefix router, threshold 8": lambda seed, at_once: RayPrefix(seed, at_once, 8, 400_000 / CHARS),
    "Ray's prefix router, threshold 16": lambda seed, at_once: RayPrefix(seed, at_once, 16, 400_000 / CHARS),
    "Ray's prefix router, threshold 32": lambda seed, at_once: RayPrefix(seed, at_once, 32, 400_000 / CHARS),
}
"""Name -> a function that makes the router, from a seed and a function that counts a replica's requests."""
