"""Runs a trace through a fleet and a router, event by event, and says what came of it."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from fleet_sim.replica import Job, ReplicaConfig, SimReplica
from fleet_sim.rivals import Asked, Contender
from fleet_sim.trace import Conversation
from penstock.bench.arithmetic import percentile

__all__ = ["FleetConfig", "Outcome", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """The fleet.

    Attributes:
        replicas: how many.
        fronts: routers that do not speak to each other; each request comes to one of them by chance.
        slow: share of replicas with half the speed.
        report_every: seconds between a replica's reports.
        report_delay: seconds that a report travels.
        warm: second from which figures count.
        ends: second after which they do not.
        losses: seconds at which one replica is lost; a new one takes its place 20 s later.
    """

    replicas: int
    fronts: int = 1
    slow: float = 0.0
    report_every: float = 0.5
    report_delay: float = 0.05
    warm: float
    ends: float
    losses: tuple[float, ...] = ()
    replica: ReplicaConfig = field(default_factory=ReplicaConfig)


@dataclass(slots=True)
class Outcome:
    """What came of a run, of what was asked from `FleetConfig.warm` until `FleetConfig.ends`.

    Attributes:
        first_token: seconds from a message to the first token of its answer, of each that was answered.
        prompt_tokens: of these.
        cached_tokens: of these, found in the prefix caches.
        refused: requests that nobody took.
        left: requests whose sender left before the first token.
        served: requests of each replica.
        busy: seconds of reading of each replica.
        stayed: turns that went to the replica of the turn before, of `followed`.
        remembered: beginnings of prompts that the routers remember at the end.
    """

    first_token: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    refused: int = 0
    left: int = 0
    served: list[int] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    stayed: int = 0
    followed: int = 0
    remembered: int = 0

    def figures(self, seconds: float) -> dict[str, Any]:
        """For a record. `seconds` is how long it took, in the simulation."""
        asked = len(self.first_token) + self.refused + self.left
        return {
            "requests": asked,
            "cached_share": self.cached_tokens / max(1, self.prompt_tokens),
            "first_token_p50": percentile(self.first_token, 50),
            "first_token_p99": percentile(self.first_token, 99),
            "first_token_mean": fmean(self.first_token),
            "failed": self.refused + self.left,
            "stayed_share": self.stayed / max(1, self.followed),
            "served_max_over_mean": max(self.served) / max(1e-9, fmean(self.served)),
            "busy_max_over_mean": max(self.busy) / max(1e-9, fmean(self.busy)),
            "busy_share": fmean(self.busy) / seconds,
            "remembered": self.remembered,
        }


class _Run:
    def __init__(
        self,
        config: FleetConfig,
        talks: Sequence[Conversation],
        make: Callable[[int, Callable[[str], int]], Contender],
        seed: int,
        tick: Callable[[float], object],
    ) -> None:
        self.config, self.talks, self.tick = config, talks, tick
        self.random = random.Random(seed)
        slow = (
            {round(each / config.slow) for each in range(int(config.replicas * config.slow))} if config.slow else set()
        )
        self.speed = [0.5 if each in slow else 1.0 for each in range(config.replicas)]
        self.fleet = {
            str(each): SimReplica(str(each), config.replica, self.speed[each]) for each in range(config.replicas)
        }
        self.fronts = [make(seed + each, self.at_once) for each in range(config.fronts)]
        for front in self.fronts:
            front.set_replicas(list(self.fleet))
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.number = 0
        self.now = 0.0
        self.outcome = Outcome()
        self.where: dict[int, str] = {}
        self.jobs: dict[Job, tuple[int, int, int, SimReplica, bool]] = {}

    def at_once(self, name: str) -> int:
        return self.fleet[name].at_once

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        self.number += 1
        heapq.heappush(self.heap, (when, self.number, call, args))

    def run(self) -> Outcome:
        for talk in self.talks:
            self.at(talk.begins, self.ask, talk.number, 0)
        for name in self.fleet:
            self.at(self.random.random() * self.config.report_every, self.report, name)
        for when in self.config.losses:
            self.at(when, self.lose)
        self.at(self.config.warm, self.reset)
        while self.heap[0][0] <= self.config.ends:
            self.now, _, call, args = heapq.heappop(self.heap)
            call(*args)
        self.outcome.remembered = sum(front.size() for front in self.fronts)
        for replica in self.fleet.values():
            self.outcome.served.append(replica.served)
            self.outcome.busy.append(replica.busy_seconds)
        return self.outcome

    def reset(self) -> None:
        """From here on, what replicas did counts."""
        for replica in self.fleet.values():
            replica.served, replica.busy_seconds = 0, 0.0

    def ask(self, number: int, turn: int, came: float | None = None) -> None:
        """A message arrives at a front, or comes back to it because its replica was lost."""
        talk = self.talks[number]
        counts = self.now >= self.config.warm
        tokens, answer = talk.tokens(turn), talk.turns[turn].answer
        asked = Asked(number, talk.keys(tokens), tokens, self.now)
        front = self.random.randrange(len(self.fronts))
        came = self.now if came is None else came
        for name in list(self.fronts[front].rank(asked))[:3]:
            replica = self.fleet[name]
            job = Job(tokens, answer, asked.keys, talk.keys(tokens + answer), came)
            if replica.offer(job):
                self.fronts[front].sent(name, asked)
                self.jobs[job] = (number, turn, front, replica, counts)
                if turn and counts:
                    self.outcome.followed += 1
                    self.outcome.stayed += self.where.get(number) == name
                self.where[number] = name
                self.go_on(replica)
                return
        self.outcome.refused += counts
        self.finish(number)

    def go_on(self, replica: SimReplica) -> None:
        job, left = replica.next(self.now)
        if job is not None:
            self.at(replica.read_at, self.read, replica, job)
        for each in left:
            number, _, front, _, counts = self.jobs.pop(each)
            self.fronts[front].ended(replica.name, each.tokens, self.now)
            self.outcome.left += counts
            self.finish(number)

    def read(self, replica: SimReplica, job: Job) -> None:
        if job not in self.jobs:
            return  # its replica was lost
        _, rest = replica.read()
        if self.jobs[job][4]:
            self.outcome.first_token.append(self.now - job.came)
            self.outcome.prompt_tokens += job.tokens
            self.outcome.cached_tokens += job.cached
        self.at(self.now + rest, self.end, replica, job)
        self.go_on(replica)

    def end(self, replica: SimReplica, job: Job) -> None:
        if job not in self.jobs:
            return
        number, turn, front, _, _ = self.jobs.pop(job)
        replica.end(job)
        self.fronts[front].ended(replica.name, job.tokens, self.now)
        turns = self.talks[number].turns
        if turn + 1 < len(turns):
            self.at(self.now + turns[turn + 1].think, self.ask, number, turn + 1)
        else:
            self.finish(number)
        self.go_on(replica)

    def finish(self, number: int) -> None:
        self.where.pop(number, None)

    def report(self, name: str) -> None:
        self.at(self.now + self.config.report_every, self.report, name)
        self.tick(self.now)
        if name in self.fleet:
            self.at(self.now + self.config.report_delay, self.reported, name, self.fleet[name].load(self.now))

    def reported(self, name: str, load: Any) -> None:
        for front in self.fronts:
            front.report(name, load, self.now)

    def lose(self) -> None:
        """A replica is gone: what it had goes through a router again, and another takes its place after a while."""
        name = self.random.choice(list(self.fleet))
        gone = self.fleet.pop(name)
        for front in self.fronts:
            front.set_replicas(list(self.fleet))
        back = [(job, self.jobs.pop(job)) for job in list(self.jobs) if self.jobs[job][3] is gone]
        for job, (number, turn, _, _, _) in back:
            self.ask(number, turn, job.came)
        self.at(self.now + 20.0, self.replace, name)

    def replace(self, name: str) -> None:
        self.fleet[name] = SimReplica(name, self.config.replica, self.speed[int(name)])
        for front in self.fronts:
            front.set_replicas(list(self.fleet))


def simulate(
    config: FleetConfig,
    talks: Sequence[Conversation],
    make: Callable[[int, Callable[[str], int]], Contender],
    *,
    seed: int = 0,
    tick: Callable[[float], object] = lambda _: None,
) -> Outcome:
    """Have all conversations held.

    Args:
        config: the fleet.
        talks: who says what when.
        make: makes a front's router, from a seed and what says how many requests a replica has.
        seed: of what is left to chance beside the conversations.
        tick: called now and then with the time.
    """
    return _Run(config, talks, make, seed, tick).run()
