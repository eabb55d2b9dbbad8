"""An engine on a simulated clock: the scheduler that serves, and no model.

    arrivals -> plan -> seconds are drawn -> results are made up -> commit -> tokens leave

The scheduler does not know: it gets requests, results and seconds as from an engine that computes. In what order things
happen between two steps is that of `engine.loop` and `engine.engine`: requests are taken in before a plan, and the
tokens of a step leave when the next step has begun, or at once if there is none.

One plan is in flight at a time. Nothing is read from a store, no step fails, and the queue has no limit.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from math import inf

from penstock.contract.errors import ConfigError, RequestError
from penstock.contract.events import Admitted, Finished, Generated
from penstock.contract.plan import Draft, Row, RowResult, SampledToken, StepPlan, StepResult
from penstock.contract.request import SequenceRequest, StopRules
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core import Scheduler
from penstock.foresight.arrivals import Arrival, Served
from penstock.foresight.step_costs import CostDraws, StepCosts
from penstock.routing import ReplicaLoad

__all__ = ["SimulatedEngine", "run", "simulated_config"]

_UNLIKE = 1 << 40
"""Made-up tokens begin here: no vocabulary has them, and no prompt."""

_EMBEDDING = bytes(4)
_NEXT = SequenceRequest("next", (0,), stop=StopRules(max_tokens=1))
"""A request that asks how long it would wait."""


def simulated_config(config: SchedulerConfig) -> SchedulerConfig:
    """A configuration without what a simulation has not: a store, a draft model, more than one plan in flight."""
    return replace(config, storing=False, draft_context=0, depth=1)


class _Live:
    """A request that has not ended. Owned by the engine."""

    __slots__ = ("arrival", "begun", "cached", "drawn", "ended", "fresh", "number", "times")

    def __init__(self, arrival: Arrival, number: int) -> None:
        self.arrival = arrival
        self.number = number
        self.begun = -1.0
        self.cached = 0
        self.drawn = 0  # tokens
        self.fresh = False  # whether tokens wait to leave
        self.ended = False
        self.times = array("d")

    def token(self, index: int) -> int:
        """The token of its answer at an index."""
        answer = self.arrival.answer
        return answer[index] if index < len(answer) else _UNLIKE + (self.number << 24) + index

    def served(self, at: float) -> Served:
        arrival, request = self.arrival, self.arrival.request
        return Served(
            id=request.id,
            tenant=request.tenant,
            arrived=arrival.at,
            begun=self.begun if self.begun >= 0 else at,
            times=self.times,
            ended=at,
            prompt_tokens=len(request.prompt),
            cached_tokens=self.cached,
            tokens=self.drawn,
        )


class SimulatedEngine:
    """One engine. Offer arrivals in order of time; `run` makes time pass.

    Args:
        config: the scheduler's, as `simulated_config` returns it.
        costs: what steps take.
        seed: of all that is drawn.
        part: see `CostDraws`.
        speculate: whether the drafts that arrivals bring are offered.

    Raises:
        ConfigError: the configuration has what a simulation has not.

    Attributes:
        now: when the next step may begin.
        served: the requests that ended, in order.
        refused: ids of requests that the scheduler refused.
        left: ids of requests whose callers left before the first token.
        steps: how many were computed.
        busy: seconds in which steps were computed, or prepared.
        firsts: seconds until the first token of each request that has one, in order.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        costs: StepCosts,
        seed: int = 0,
        part: float | None = None,
        *,
        speculate: bool = True,
    ) -> None:
        if simulated_config(config) != config:
            raise ConfigError("config", "a simulated engine has no store, no draft model and one plan in flight")
        self.scheduler = Scheduler(config)
        self._costs = CostDraws(costs, seed, part)
        self._wake = costs.wake
        self._speculate = speculate
        self._offered = False  # whether any arrival brought drafts
        self._inbox: deque[Arrival] = deque()
        self._live: dict[str, _Live] = {}
        self._slots: dict[int, _Live] = {}
        self._impatient: list[tuple[float, str]] = []
        self._touched: list[_Live] = []  # whose tokens wait to leave
        self._number = 0
        self.now = 0.0
        self.served: list[Served] = []
        self.refused: list[str] = []
        self.left: list[str] = []
        self.steps = 0
        self.busy = 0.0
        self.firsts: list[float] = []

    def load(self) -> ReplicaLoad:
        """What it would say of itself as a replica of a fleet."""
        stats = self.scheduler.stats
        return ReplicaLoad(
            backlog_seconds=self.scheduler.backlog(_NEXT).seconds,
            running=stats.running,
            waiting=stats.waiting + len(self._inbox),
            slots=self.scheduler.config.max_num_seqs,
            free_blocks=stats.free_blocks,
            total_blocks=stats.total_blocks,
        )

    def offer(self, arrival: Arrival) -> None:
        """A request comes; not before those that were offered earlier."""
        self._inbox.append(arrival)

    def run(self, until: float = inf) -> None:
        """Compute every step that begins before `until`."""
        while True:
            if not self.scheduler.has_work:
                if not self._inbox:
                    return
                self.now = max(self.now, self._inbox[0].at + self._wake)
            if self.now >= until:
                return
            self._take_in()
            if self._impatient:
                self._let_go()
            if self.scheduler.has_work:
                self._step()

    def _take_in(self) -> None:
        """Queue what has come."""
        while self._inbox and self._inbox[0].at + self._wake <= self.now:
            arrival = self._inbox.popleft()
            request = arrival.request
            if request.priority and self.scheduler.config.policy != "priority":
                request = replace(request, priority=0)
            try:
                self.scheduler.submit(request)
            except RequestError:
                self.refused.append(request.id)
                continue
            self._number += 1
            self._offered = self._offered or (self._speculate and bool(arrival.offers))
            self._live[request.id] = _Live(arrival, self._number)
            if arrival.patience < inf:
                heapq.heappush(self._impatient, (arrival.at + arrival.patience, request.id))

    def _let_go(self) -> None:
        """Callers leave who waited too long for a first token."""
        while self._impatient and self._impatient[0][0] <= self.now:
            _, seq_id = heapq.heappop(self._impatient)
            live = self._live.get(seq_id)
            if live is not None and not live.drawn:
                self.scheduler.abort(seq_id)
                self.left.append(seq_id)
                del self._live[seq_id]

    def _step(self) -> None:
        began = self.now
        self._send(began)
        plan = self.scheduler.plan(self._drafts() if self._offered else ())
        seconds, rest = self._costs.draw(plan)
        result = StepResult(plan.step, self._results(plan, began), seconds)
        for event in self.scheduler.commit(plan, result):
            live = self._live.get(event.seq_id)
            if live is None:
                continue
            if isinstance(event, Generated):
                live.drawn += 1
                self._touch(live)
            elif isinstance(event, Admitted):
                live.cached = event.cached
            elif isinstance(event, Finished):
                live.ended = True
                self._touch(live)
        self.steps += 1
        self.now = began + seconds + rest.around
        if self.scheduler.has_work:
            self.now += rest.after
        else:
            self._send(self.now)
        self.busy += self.now - began

    def _touch(self, live: _Live) -> None:
        if not live.fresh:
            live.fresh = True
            self._touched.append(live)

    def _send(self, at: float) -> None:
        """The tokens of the last step leave."""
        for live in self._touched:
            live.fresh = False
            if live.arrival.request.embedding is None:
                if not live.times:
                    self.firsts.append(at - live.arrival.at)
                live.times.append(at)
            if live.ended:
                self.served.append(live.served(at))
                del self._live[live.arrival.request.id]
        self._touched.clear()

    def _results(self, plan: StepPlan, began: float) -> tuple[RowResult, ...]:
        """What a runner could have answered."""
        for slot in plan.releases:
            self._slots.pop(slot, None)
        for admit in plan.admits:
            live = self._live[admit.seq_id]
            self._slots[admit.slot] = live
            if live.begun < 0:
                live.begun = began
        results = []
        for row in plan.rows:
            live = self._slots[row.slot]
            if row.sample:
                results.append(RowResult(row.slot, tuple(_draw(row, live))))
            elif live.arrival.request.embedding is not None and row.start + row.count == len(
                live.arrival.request.prompt
            ):
                results.append(RowResult(row.slot, embedding=_EMBEDDING))
        return tuple(results)

    def _drafts(self) -> list[Draft]:
        """What a drafter offered at these places of these answers."""
        live = [self._live[one.seq_id] for one in self.scheduler.draftable()]
        return [draft for each in live for draft in each.arrival.offers.get(each.drawn, ())]


def _draw(row: Row, live: _Live) -> Iterable[SampledToken]:
    """The right drafts of a row, and the token after them."""
    for index, draft in enumerate((*row.drafts, None)):
        token = live.token(live.drawn + index)
        yield SampledToken(token)
        if token != draft:
            return


def run(engine: SimulatedEngine, arrivals: Iterable[Arrival]) -> list[Served]:
    """Run a workload to its end on one engine; what became of its requests, in the order of their ends."""
    for arrival in arrivals:
        engine.run(arrival.at)
        engine.offer(arrival)
    engine.run()
    return engine.served
