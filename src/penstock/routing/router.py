"""The router of a fleet: ranks replicas for a prompt by how much they would have to read, and how long it would wait.

A candidate's cost is the seconds until it would start, plus the seconds in which it would read what it does not hold,
times a weight. The weight is there because reading delays the requests behind it and the answers that are being written
there, and because reading what another replica holds evicts prefixes that are still needed. Waits below that of the
freest eighth of the fleet count as equal to it: among hundreds of replicas one is always idle by chance, and a
conversation that moved there would leave its prefix behind for little gain.

Candidates are replicas that were sent a prefix of the prompt, a few that a stable hash names, and two of the freest
eighth. So apart from sorting, a decision among a thousand replicas costs the same as among twenty.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from operator import attrgetter

from penstock.routing.holders import Holders
from penstock.routing.load import Replica, ReplicaLoad, finite, within
from penstock.routing.ring import Ring
from penstock.routing.stay import Stay

__all__ = ["Router"]

_SCORE, _NAME = attrgetter("score"), attrgetter("name")
_MOST_HOLDERS = 128
"""The most replicas that are remembered for one prefix."""
_ENOUGH_HOLDERS = 12
"""How many holders a decision looks for."""
_HELD = 2
"""At most so many prefixes are remembered for each block of the fleet: no replica holds the older ones any more."""
_LEAST_KEYS = 10_000
_FAVOURITES = 4
_DRAWN = 2
_PART = 8
"""Others are compared with the replica that one in so many is freer than; in a smaller fleet, with the freest."""
_BEHIND = 1.0
"""How much more reading costs for each prompt that waits, at the freest eighth, behind what is read now."""
_WRITING = 0.5
"""How much more reading costs for each answer that is being written there: it delays the next token of each answer, and
on average an answer is half written."""
_ALIKE = 0.1
"""Waits that differ by less than this share of the time to read the whole prompt count as equal."""
_LATER = float("inf")
_MOST_TOKENS = 10**9


class Router:
    """Says which replica a prompt is best sent to. Used by one thread; no call waits, and none raises.

    Memory is bounded by `most_keys` and the number of replicas: nothing grows with requests.

    Args:
        most_keys: the most prefixes that are remembered, and never more than twice the blocks of the fleet; about 300
            bytes each, up to a kilobyte if a hundred replicas hold it.
        seed: seed of the random draws; give each router of a fleet its own.
        affinity: seconds of waiting that are worth one second of reading what another replica holds.
        tokens_per_second: how fast replicas are assumed to read until one reports its rate. From then on, a replica
            that has not reported one is assumed to have the median of the reported rates.
        silence: seconds without a report after which a replica that has reported before comes last.
    """

    def __init__(
        self,
        *,
        most_keys: int = 1_000_000,
        seed: int = 0,
        affinity: float = 1.0,
        tokens_per_second: float = 2000.0,
        silence: float = 5.0,
    ) -> None:
        self._holders = Holders(_MOST_HOLDERS)
        self._most_keys = most_keys
        self._blocks = 0
        self._random = random.Random(seed)  # noqa: S311 (no secret)
        self._affinity = affinity
        self._rate = tokens_per_second
        self._silence = silence
        self._stay = Stay(1.0)
        self._reading = 0.1
        self._replicas: dict[str, Replica] = {}
        self._order: list[Replica] = []  # roughly by score; sorted when needed
        self._ring = Ring()
        self._now = 0.0
        self._watched = 0.0
        self._silent: set[Replica] = set()
        self._news = False  # whether a replica has reported its reading rate for the first time

    @property
    def known_keys(self) -> int:
        """Number of prefixes that are remembered."""
        return len(self._holders)

    def set_replicas(self, names: Sequence[str]) -> None:
        """Say which replicas exist now. The others are forgotten; new ones are taken to be empty and idle."""
        wanted = dict.fromkeys(names)
        if wanted.keys() == self._replicas.keys():
            return
        for name in [each for each in self._replicas if each not in wanted]:
            self._drop(name)
        self._replicas = {name: self._replicas.get(name) or Replica(name, self._rate) for name in wanted}
        self._order = list(self._replicas.values())
        self._ring = Ring(self._order)

    def report(self, name: str, load: ReplicaLoad, now: float) -> None:
        """Take the report of `name` about itself at `now`, by a clock that all calls share; ignore unknown names."""
        now = self._time(now)
        replica = self._replicas.get(name)
        if replica is not None:
            before, told = replica.total_blocks, replica.told
            replica.report(load, now, self._stay.seconds)
            self._news = self._news or replica.told > told
            self._blocks += replica.total_blocks - before
            self._silent.discard(replica)

    def rank(
        self, keys: Sequence[bytes], tokens: int, now: float, among: Sequence[str] | None = None
    ) -> tuple[str, ...]:
        """Replicas in the order in which the prompt should be offered to them, the best first.

        Args:
            keys: keys of the prompt's full blocks, each of which covers all before it (`core.block_keys`); may be ().
            tokens: number of tokens of the prompt.
            now: seconds, by the clock of all calls.
            among: the names to rank; all replicas if None. Unknown names come last.

        Returns:
            Each name once.
        """
        now = self._time(now)
        fit, rest, unknown = self._fleet(now, among)
        if not fit:
            return unknown
        first = self._candidates(fit, keys, within(tokens, 1, _MOST_TOKENS), now)
        names = dict.fromkeys(each.name for each in first)
        names.update(dict.fromkeys(map(_NAME, fit)))
        return (*names, *map(_NAME, rest), *unknown)

    def sent(self, name: str, keys: Sequence[bytes], tokens: int, now: float) -> None:
        """Note that a prompt was sent to `name`; ignore unknown names."""
        now = self._time(now)
        replica = self._replicas.get(name)
        if replica is None:
            return
        tokens_of_block = within(tokens, 1, _MOST_TOKENS) / max(1, len(keys))
        missing = max(0, len(keys) - self._holders.held(replica, keys))
        unread = missing * tokens_of_block if keys else within(tokens, 1, _MOST_TOKENS)
        self._stay.began(now)
        self._reading += (unread / replica.rate - self._reading) / 64
        replica.take(unread, missing + 1, now, self._stay.seconds)
        self._holders.add(replica, keys)
        self._holders.keep(min(self._most_keys, max(_LEAST_KEYS, _HELD * self._blocks)))

    def ended(self, name: str, tokens: int, now: float) -> None:  # noqa: ARG002 (what `sent` was told)
        """Note that a request that was sent to `name` is over, in whatever way; ignore unknown names."""
        now = self._time(now)
        replica = self._replicas.get(name)
        if replica is not None and replica.sent:
            self._stay.ended(now)
            replica.give(now, self._stay.seconds)

    def lost(self, name: str) -> None:
        """Note that `name` is gone, with all that it held. If the next `set_replicas` names it again, it is new."""
        if name in self._replicas:
            self._drop(name)
            self._order = list(self._replicas.values())
            self._ring = Ring(self._order)

    def _drop(self, name: str) -> None:
        replica = self._replicas.pop(name)
        replica.alive = False
        self._blocks -= replica.total_blocks
        self._silent.discard(replica)
        self._stay.ended(self._now, replica.sent)

    def _time(self, now: float) -> float:
        if finite(now):
            self._now = float(now)
        return self._now

    def _fleet(self, now: float, among: Sequence[str] | None) -> tuple[list[Replica], list[Replica], tuple[str, ...]]:
        """The replicas to rank, the freest first; those that fell silent, unless all did; and unknown names."""
        self._order.sort(key=_SCORE)
        self._watch(now)
        if self._news:
            self._expect()
        order = self._order
        unknown: tuple[str, ...] = ()
        if among is not None:
            names = dict.fromkeys(among)
            unknown = tuple(name for name in names if name not in self._replicas)
            if len(names) - len(unknown) < len(order):
                order = [each for each in order if each.name in names]
        rest = [each for each in order if each in self._silent] if self._silent else []
        if 0 < len(rest) < len(order):
            return [each for each in order if each not in self._silent], rest, unknown
        return order, [], unknown

    def _watch(self, now: float) -> None:
        """Now and then, find replicas that have fallen silent: one that hangs would look freer and freer."""
        if not 0.0 <= now - self._watched <= self._silence / 8:
            self._watched = now
            self._silent = {each for each in self._order if now - each.reported > self._silence}

    def _expect(self) -> None:
        """Give replicas that have not reported a rate the median rate of those that have.

        A replica that was taken for faster than it is would draw conversations away from the replicas that hold them.
        """
        self._news = False
        self._rate = statistics.median([each.rate for each in self._order if each.told] or [self._rate])
        for each in self._order:
            each.rate = each.rate if each.told else self._rate

    def _candidates(self, fit: list[Replica], keys: Sequence[bytes], tokens: float, now: float) -> list[Replica]:
        """The best first, and after it only those that cost no more than the freest eighth would without a prefix."""
        able = None if len(fit) == len(self._replicas) else frozenset(fit)
        held = self._holders.lengths(keys, _ENOUGH_HOLDERS, self._random)
        part = len(fit) // _PART
        drawn = self._random.sample(fit[: part + 1], min(_DRAWN, part + 1))
        favourites: list[Replica] = []
        if keys:  # by the first block that no replica holds, so that prompts with a shared prefix do not crowd
            new = min(max(held.values(), default=0), len(keys) - 1)
            favourites = self._ring.after(keys[new], _FAVOURITES, able)
        freest = fit[part]  # the last of the freest eighth
        least = freest.wait(0, now, self._stay.seconds)
        behind = least / self._reading
        floor = least + _ALIKE * tokens / freest.rate
        affinity = self._affinity + _BEHIND * behind
        weighed = []
        for place, each in enumerate(dict.fromkeys((*held, *favourites, *drawn))):
            if able is None or each in able:
                length = held.get(each, 0)
                wait = each.wait(len(keys) - length + 1, now, self._stay.seconds)
                unread = tokens * (1.0 - length / max(1, len(keys)))
                cost = max(wait, floor) + (affinity + _WRITING * each.decoding) * unread / each.rate
                weighed.append((cost, wait if length else _LATER, place, each))
        weighed.sort()
        anywhere = floor + (affinity + _WRITING * freest.decoding) * tokens / freest.rate
        return [each for place, (cost, _, _, each) in enumerate(weighed) if not place or cost <= anywhere]
