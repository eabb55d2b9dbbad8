"""Random histories of a router: whatever is reported, sent, lost and asked, each answer holds every name once.

`PENSTOCK_EPISODES` says how many (100 by default; 10,000 in deep runs).
"""

from __future__ import annotations

import os
import random
from collections import Counter

from penstock.routing import ReplicaLoad, Router

EPISODES = int(os.environ.get("PENSTOCK_EPISODES", "100"))
HOSTILE = (0, -1, 1, 10**400, -(10**400), float("nan"), float("inf"), float("-inf"), 1e300, -1e300, 5e-324)
NAMES = ("", "a", "b", "c" * 300, "\ud800", "replica#1", "replica#2", "\0", "ß", *(f"r{each}" for each in range(20)))
MOST_KEYS = 200


class Episode:
    """One router that is fed sense and nonsense in turn."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.router = Router(most_keys=MOST_KEYS, seed=seed)
        self.now = 0.0
        self.names: tuple[str, ...] = ()
        self.prompts: list[list[bytes]] = [[]]
        self.seen: Counter[str] = Counter()

    def run(self) -> None:
        calls = (self.set_replicas, self.report, self.rank, self.rank, self.serve, self.serve, self.ended, self.lost)
        for _ in range(self.rng.randint(1, 60)):
            self.now += self.rng.expovariate(10)
            call = self.rng.choice(calls)
            call()
            self.seen[call.__name__] += 1
            assert self.router.known_keys <= MOST_KEYS

    def set_replicas(self) -> None:
        self.names = tuple(self.rng.choices(NAMES, k=self.rng.choice((0, 1, 2, 3, 40))))
        self.router.set_replicas(self.names)

    def report(self) -> None:
        number = self.number
        load = ReplicaLoad(
            backlog_seconds=number(9.0),
            running=number(16),
            waiting=number(9),
            slots=number(16),
            free_blocks=number(1000),
            total_blocks=number(1000),
            tokens_per_second=number(5000.0),
        )
        self.router.report(self.name(), load, self.time())

    def rank(self) -> None:
        among = self.rng.choice((None, (), self.names, self.rng.choices(NAMES, k=5)))
        expected = set(self.names if among is None else among)
        ranked = self.router.rank(self.prompt(), self.number(3000), self.time(), among)
        assert set(ranked) == expected
        assert len(ranked) == len(expected), "each name once"

    def serve(self) -> None:
        prompt = self.prompt()
        for name in self.router.rank(prompt, len(prompt) * 16 + 5, self.now)[:1] or (self.name(),):
            self.router.sent(name, prompt, self.number(3000), self.time())

    def ended(self) -> None:
        self.router.ended(self.name(), self.number(3000), self.time())

    def lost(self) -> None:
        name = self.name()
        self.router.lost(name)
        self.names = tuple(each for each in self.names if each != name)

    def name(self) -> str:
        return self.rng.choice(self.names if self.names and self.rng.random() < 0.8 else NAMES)

    def number(self, usual: float) -> float:
        """A number: sometimes nonsense, otherwise of the type of `usual`."""
        if self.rng.random() < 0.2:
            return self.rng.choice(HOSTILE)
        return type(usual)(usual * self.rng.random())

    def time(self) -> float:
        return self.rng.choice(HOSTILE) if self.rng.random() < 0.05 else self.now

    def prompt(self) -> list[bytes]:
        """A prompt of a conversation that goes on, or of a new one, which may share a prefix with another."""
        if self.rng.random() < 0.5:
            known = self.rng.choice(self.prompts)
            length = self.rng.choice((0, len(known) // 2, len(known)))
            new = [self.rng.randbytes(self.rng.choice((0, 8, 32))) for _ in range(self.rng.choice((0, 1, 5, 90)))]
            self.prompts.append(known[:length] + new)
        return self.rng.choice(self.prompts)


def test_no_call_of_random_episodes_raises():
    calls: Counter[str] = Counter()
    for seed in range(EPISODES):
        episode = Episode(seed)
        try:
            episode.run()
        except Exception as error:
            error.add_note(f"Episode({seed})")
            raise
        calls += episode.seen
    assert min(calls[each] for each in ("set_replicas", "report", "rank", "serve", "ended", "lost")) >= EPISODES


def test_nothing_grows_with_requests():
    router = Router(most_keys=1000)
    router.set_replicas(["a", "b", "c"])
    rng = random.Random(0)
    sizes = []
    for number in range(6000):
        keys = [rng.randbytes(32) for _ in range(8)]
        now = number / 100
        name = router.rank(keys, 130, now)[0]
        router.sent(name, keys, 130, now)
        if number % 2:
            router.ended(name, 130, now)
        if number % 2000 == 1999:
            sizes.append(total_size(router))
    assert router.known_keys == 1000
    assert sizes[2] <= sizes[1] * 1.05, "48,000 keys take what 32,000 took, and requests that never end nothing"


def total_size(value: object) -> int:
    """The number of objects that can be reached from `value`, without classes and modules."""
    found: dict[int, object] = {}
    left = [value]
    while left:
        each = left.pop()
        if id(each) in found or isinstance(each, type):
            continue
        found[id(each)] = each
        if isinstance(each, dict):
            left += [*each, *each.values()]
        elif isinstance(each, (list, tuple, set, frozenset)):
            left += each
        else:
            left += [getattr(each, name) for name in getattr(each, "__slots__", ()) if hasattr(each, name)]
            left += list(getattr(each, "__dict__", {}).values())
    return len(found)
