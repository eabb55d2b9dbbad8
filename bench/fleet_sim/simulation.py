"""Runs a trace through a fleet and a router, event by event, and returns the outcome.

Replicas are simulated engines (`penstock.foresight`): the scheduler that serves, on a simulated clock. A simulation's
own run time grows with their decisions and the messages, not with the number of replicas or simulated seconds.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple, Protocol

from fleet_sim.replica import ReplicaConfig, replica_engine
from fleet_sim.rivals import Asked, Contender
from fleet_sim.trace import Turn
from penstock.bench.arithmetic import percentile
from penstock.contract.request import SequenceRequest, StopRules
from penstock.foresight.arrivals import Arrival, Served
from penstock.foresight.fleet import Fleet

__all__ = ["FleetConfig", "Outcome", "Talk", "simulate"]


class Talk(Protocol):
    """A conversation: each message comes some time after the answer to the message before."""

    number: int
    begins: float
    turns: Sequence[Turn]

    def tokens(self, turn: int) -> int:
        """Return the length in tokens of the prompt of a turn."""

    def prompt(self, turn: int) -> tuple[int, ...]:
        """Return the tokens of the prompt of a turn."""

    def answer(self, turn: int) -> tuple[int, ...]:
        """Return the tokens of a turn's answer, as far as they are known."""

    def keys(self, tokens: int) -> Sequence[bytes]:
        """Return the keys of the full blocks of the conversation's first `tokens` tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Describes the fleet.

    Attributes:
        replicas: number of replicas.
        fronts: number of routers, which do not talk to each other; each request arrives at a random one.
        slow: share of replicas with half the speed.
        report_every: seconds between a replica's reports. A replica that has decided nothing since its last report
            would repeat it, and does not report.
        report_delay: seconds that a report takes to arrive.
        warm: second from which figures count.
        ends: second after which no message is sent; messages sent before are still answered.
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
    """Holds the outcome of a run, for messages sent from `FleetConfig.warm` until `FleetConfig.ends`.

    Attributes:
        first_token: seconds from each answered message to the first token of its answer.
        whole: seconds from each answered message to the end of its answer.
        prompt_tokens: prompt tokens of answered messages.
        cached_tokens: how many of these were found in the prefix caches.
        refused: requests that no replica took.
        left: requests whose client left before the first token.
        served: requests that each replica served.
        busy: seconds in which each replica computed.
        stayed: how many of the `followed` turns went to the replica of the turn before.
        followed: turns after the first of a conversation.
        remembered: prefixes that the routers remember at the end.
        asked: messages in the whole run.
        steps: steps of all replicas in the whole run.
        planned: how many of these steps a scheduler planned one by one.
        events: other events of the simulation, for example messages and reports.
    """

    first_token: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    refused: int = 0
    left: int = 0
    served: list[int] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    stayed: int = 0
    followed: int = 0
    remembered: int = 0
    asked: int = 0
    steps: int = 0
    planned: int = 0
    events: int = 0

    def figures(self, seconds: float) -> dict[str, Any]:
        """Return the figures for a record. `seconds` is how long the run took, in simulated time."""
        return {
            "requests": len(self.first_token) + self.refused + self.left,
            "cached_share": self.cached_tokens / max(1, self.prompt_tokens),
            "first_token_p50": percentile(self.first_token, 50),
            "first_token_p99": percentile(self.first_token, 99),
            "first_token_mean": fmean(self.first_token),
            "whole_p50": percentile(self.whole, 50),
            "whole_p99": percentile(self.whole, 99),
            "failed": self.refused + self.left,
            "stayed_share": self.stayed / max(1, self.followed),
            "served_max_over_mean": max(self.served) / max(1e-9, fmean(self.served)),
            "busy_max_over_mean": max(self.busy) / max(1e-9, fmean(self.busy)),
            "busy_share": fmean(self.busy) / seconds,
            "remembered": self.remembered,
            "asked": self.asked,
            "steps": self.steps,
            "planned": self.planned,
            "events": self.events,
        }


class _Job(NamedTuple):
    """A message that a replica has.

    Attributes:
        talk, turn: the conversation, and the message's turn in it.
        front: the router that sent it to the replica.
        came: when the client sent it.
        counts: whether figures count it.
    """

    talk: Talk
    turn: int
    front: Contender
    came: float
    counts: bool


class _Run:
    def __init__(
        self,
        config: FleetConfig,
        talks: Iterable[Talk],
        make: Callable[[int, Callable[[str], int]], Contender],
        seed: int,
        tick: Callable[[float], object],
    ) -> None:
        self.config, self.talks, self.tick = config, iter(talks), tick
        self.random = random.Random(seed)
        slow = (
            {round(each / config.slow) for each in range(int(config.replicas * config.slow))} if config.slow else set()
        )
        self.speed = [0.5 if each in slow else 1.0 for each in range(config.replicas)]
        self.fleet = Fleet([replica_engine(config.replica, speed) for speed in self.speed])
        self.there = dict.fromkeys(range(config.replicas))
        self.jobs: list[dict[str, _Job]] = [{} for _ in self.speed]
        self.at_once = {str(index): 0 for index in range(config.replicas)}
        self.fronts = [make(seed + each, self.at_once.__getitem__) for each in range(config.fronts)]
        self.reports = any(front.reads_reports for front in self.fronts)
        self.phase = [self.random.random() * config.report_every for _ in self.speed]
        self.reporting = [False] * config.replicas
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.number = 0
        self.now = 0.0
        self.outcome = Outcome(served=[0] * config.replicas, busy=[0.0] * config.replicas)
        self.where: dict[int, int] = {}

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        self.number += 1
        heapq.heappush(self.heap, (when, self.number, call, args))

    def run(self) -> Outcome:
        self.set_replicas()
        self.expect()
        for when in self.config.losses:
            self.at(when, self.lose)
        self.at(self.config.warm, self.reset)
        while self.heap or self.fleet.due < math.inf:
            if self.fleet.due < (self.heap[0][0] if self.heap else math.inf):
                self.now = self.fleet.due
                self.collect(self.fleet.advance())
            else:
                self.outcome.events += 1
                self.now, _, call, args = heapq.heappop(self.heap)
                call(*args)
        self.outcome.remembered = sum(front.size() for front in self.fronts)
        for index in range(self.config.replicas):
            self.retire(index)
        return self.outcome

    def reset(self) -> None:
        """Count what replicas do from here on."""
        self.outcome.served = [0] * self.config.replicas
        self.outcome.busy = [-engine.busy for engine in self.fleet.engines]

    def retire(self, index: int) -> None:
        """Add up what an engine did that leaves the fleet."""
        engine = self.fleet.engines[index]
        self.outcome.busy[index] += engine.busy
        self.outcome.steps += engine.steps
        self.outcome.planned += engine.planned

    def expect(self) -> None:
        """Schedule the beginning of the next conversation."""
        talk = next(self.talks, None)
        if talk is not None:
            self.at(talk.begins, self.begin, talk)

    def begin(self, talk: Talk) -> None:
        self.expect()
        self.ask(talk, 0)

    def ask(self, talk: Talk, turn: int, came: float | None = None) -> None:
        """Bring a message to a router, or bring it back because its replica was lost."""
        tokens, answer = talk.tokens(turn), talk.turns[turn].answer
        if self.now > self.config.ends or tokens + answer > self.config.replica.context:
            self.where.pop(talk.number, None)
            return
        self.tick(self.now)
        self.outcome.asked += came is None
        counts = self.now >= self.config.warm
        asked = Asked(talk.number, talk.keys(tokens), tokens, self.now)
        front = self.fronts[self.random.randrange(len(self.fronts))]
        for name in list(front.rank(asked))[:3]:
            index = int(name)
            if self.fleet.engines[index].waiting < self.config.replica.waiting:
                front.sent(name, asked)
                self.offer(index, _Job(talk, turn, front, self.now if came is None else came, counts))
                if turn and counts:
                    self.outcome.followed += 1
                    self.outcome.stayed += self.where.get(talk.number) == index
                self.where[talk.number] = index
                return
        self.outcome.refused += counts
        self.where.pop(talk.number, None)

    def offer(self, index: int, job: _Job) -> None:
        stop, name = StopRules(max_tokens=job.talk.turns[job.turn].answer), f"{job.talk.number}/{job.turn}"
        request = SequenceRequest(name, job.talk.prompt(job.turn), stop=stop, arrival=self.now)
        patience = max(0.0, self.config.replica.patience - (self.now - job.came))
        self.jobs[index][name] = job
        self.at_once[str(index)] += 1
        self.fleet.offer(index, Arrival(self.now, request, job.talk.answer(job.turn), patience))

    def collect(self, index: int) -> None:
        """Take what an engine's last decision brought about."""
        engine = self.fleet.engines[index]
        for served in engine.served:
            self.at(max(self.now, served.ended), self.end, index, served)
        for seq_id in engine.left:
            self.leave(index, seq_id)
        if engine.refused:
            raise RuntimeError(f"a replica refused {engine.refused}: its context or its memory is too small")
        engine.served.clear()
        engine.left.clear()
        engine.firsts.clear()
        self.report_soon(index)

    def end(self, index: int, served: Served) -> None:
        """Complete an answer."""
        job = self.jobs[index].pop(served.id, None)
        if job is None:
            return  # its replica was lost
        self.at_once[str(index)] -= 1
        job.front.ended(str(index), served.prompt_tokens, self.now)
        self.outcome.served[index] += 1
        if job.counts:
            self.outcome.first_token.append(served.times[0] - job.came)
            self.outcome.whole.append(served.ended - job.came)
            self.outcome.prompt_tokens += served.prompt_tokens
            self.outcome.cached_tokens += served.cached_tokens
        if job.turn + 1 < len(job.talk.turns):
            self.at(self.now + job.talk.turns[job.turn + 1].think, self.ask, job.talk, job.turn + 1)
        else:
            self.where.pop(job.talk.number, None)

    def leave(self, index: int, seq_id: str) -> None:
        """End the conversation of a client that lost patience."""
        job = self.jobs[index].pop(seq_id)
        self.at_once[str(index)] -= 1
        job.front.ended(str(index), job.talk.tokens(job.turn), self.now)
        self.outcome.left += job.counts
        self.where.pop(job.talk.number, None)

    def report_soon(self, index: int) -> None:
        """Have a replica that has decided something report when its next report is due."""
        if self.reports and not self.reporting[index]:
            self.reporting[index] = True
            every = self.config.report_every
            ticks = math.floor((self.now - self.phase[index]) / every) + 1
            self.at(max(self.now, self.phase[index] + ticks * every), self.report, index)

    def report(self, index: int) -> None:
        self.reporting[index] = False
        if index in self.there:
            load = self.fleet.engines[index].load()
            self.at(self.now + self.config.report_delay, self.reported, index, load)

    def reported(self, index: int, load: Any) -> None:
        for front in self.fronts:
            front.report(str(index), load, self.now)

    def set_replicas(self, new: Sequence[int] | None = None) -> None:
        """Tell the routers which replicas exist, and the load of new ones; of all if `new` is None."""
        for front in self.fronts:
            front.set_replicas([str(each) for each in self.there])
        for index in self.there if new is None else new:
            self.reported(index, self.fleet.engines[index].load())

    def lose(self) -> None:
        """Lose a replica: its messages go through a router again, and another replica takes its place after a while."""
        index = self.random.choice(list(self.there))
        del self.there[index]
        self.retire(index)
        self.fleet.replace(index, replica_engine(self.config.replica, self.speed[index]))
        self.set_replicas(())
        back, self.jobs[index] = self.jobs[index], {}
        self.at_once[str(index)] = 0
        for job in back.values():
            self.ask(job.talk, job.turn, job.came)
        self.at(self.now + 20.0, self.return_to, index)

    def return_to(self, index: int) -> None:
        self.there[index] = None
        self.set_replicas((index,))


def simulate(
    config: FleetConfig,
    talks: Iterable[Talk],
    make: Callable[[int, Callable[[str], int]], Contender],
    *,
    seed: int = 0,
    tick: Callable[[float], object] = lambda _: None,
) -> Outcome:
    """Simulate all conversations.

    Args:
        config: the fleet.
        talks: the conversations, in the order in which they begin.
        make: makes a router, from a seed and a function that counts a replica's requests.
        seed: seeds everything that is random besides the conversations.
        tick: called with the time of each message.
    """
    return _Run(config, talks, make, seed, tick).run()
