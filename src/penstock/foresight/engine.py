"""An engine on a simulated clock: the scheduler that serves, and no model.

    arrivals -> plan -> seconds are drawn -> results are made up -> commit -> tokens leave

The scheduler cannot tell: it gets requests, results and seconds as from an engine that computes. Between two steps,
things happen in the order of `engine.loop` and `engine.engine`: requests are taken in before a plan, and the tokens of
a step leave when the next step has begun, or at once if there is none.

One plan is in flight at a time. Nothing is read from a store, no step fails, and the queue has no limit.

Steps in which running sequences only draw their next tokens are not planned one by one. Their durations are drawn
ahead, and the scheduler passes them all at once as soon as a request arrives or may end
(`Scheduler.pass_plain_steps`); its state is then as if it had planned them.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left
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
from penstock.core.step_time import row_decodes
from penstock.foresight.arrivals import Arrival, Served
from penstock.foresight.step_costs import CostDraws, StepCosts
from penstock.routing import ReplicaLoad

__all__ = ["SimulatedEngine", "run", "simulated_config"]

_UNLIKE = 1 << 40
"""Made-up tokens begin here: no vocabulary and no prompt contains them."""

_EMBEDDING = bytes(4)
_NEXT = SequenceRequest("next", (0,), stop=StopRules(max_tokens=1))
"""A request for asking the scheduler how long a new request would wait."""


def simulated_config(config: SchedulerConfig) -> SchedulerConfig:
    """A configuration without what a simulation lacks: a store, a draft model, more than one plan in flight."""
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
        """The token at an index of its answer."""
        answer = self.arrival.answer
        return answer[index] if index < len(answer) else _UNLIKE + (self.number << 24) + index

    def tokens(self, count: int) -> list[int]:
        """The next tokens of its answer."""
        first, end = self.drawn, self.drawn + count
        made_up = _UNLIKE + (self.number << 24)
        known = self.arrival.answer[first:end]
        return [*known, *range(made_up + first + len(known), made_up + end)]

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
    """Simulates one engine. Offer arrivals in order of time; `run` makes time pass.

    Args:
        config: the scheduler's configuration, as `simulated_config` returns it.
        costs: how long steps take.
        seed: seeds everything that is drawn.
        part: see `CostDraws`.
        speculate: whether the drafts that arrivals bring are offered.
        every: plan every step, even steps in which nothing is decided.

    Raises:
        ConfigError: the configuration has something that a simulation lacks.

    Attributes:
        now: when the next step may begin; steps that were only drawn ahead are not over.
        served: the requests that ended, in order.
        refused: ids of requests that the scheduler refused.
        left: ids of requests whose callers left before the first token.
        steps: how many steps were computed.
        planned: how many steps were planned one by one.
        busy: seconds in which steps were computed or prepared.
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
        every: bool = False,
    ) -> None:
        if simulated_config(config) != config:
            raise ConfigError("config", "a simulated engine has no store, no draft model and one plan in flight")
        self.scheduler = Scheduler(config)
        self._costs = CostDraws(costs, seed, part)
        self._wake = costs.wake
        self._speculate = speculate
        self._every = every
        self._ahead: list[float] = []  # when each step that was drawn ahead begins, and when the last ends
        self._drawing: list[_Live] = []  # the requests that draw in these steps
        self._read = (0, 0.0)  # positions of prompts computed, and seconds of the steps that computed them
        self._offered = False  # whether any arrival brought drafts
        self._inbox: deque[Arrival] = deque()
        self._live: dict[str, _Live] = {}
        self._slots: dict[int, _Live] = {}
        self._impatient: list[tuple[float, str]] = []
        self._touched: list[_Live] = []  # requests whose tokens wait to leave
        self._number = 0
        self.now = 0.0
        self.served: list[Served] = []
        self.refused: list[str] = []
        self.left: list[str] = []
        self.steps = 0
        self.planned = 0
        self.busy = 0.0
        self.firsts: list[float] = []

    @property
    def decides_at(self) -> float:
        """When the engine next decides something if no request arrives; infinity if it has nothing to do.

        Until then nothing that others can see of it changes, except that free blocks become fewer.
        """
        if self._ahead:
            return self._ahead[self._undisturbed]
        if self.scheduler.has_work:
            return self.now
        return max(self.now, self._inbox[0].at + self._wake) if self._inbox else inf

    @property
    def _undisturbed(self) -> int:
        """How many steps drawn ahead begin before a request arrives, or a caller leaves before its first token."""
        change = self._inbox[0].at + self._wake if self._inbox else inf
        if self._impatient and self.scheduler.num_waiting:
            change = min(change, self._impatient[0][0])
        return min(bisect_left(self._ahead, change), len(self._ahead) - 1)

    @property
    def waiting(self) -> int:
        """How many requests have no slot."""
        return self.scheduler.num_waiting + len(self._inbox)

    def load(self) -> ReplicaLoad:
        """The load that it would report as a replica of a fleet."""
        stats = self.scheduler.stats
        positions, seconds = self._read
        return ReplicaLoad(
            backlog_seconds=self.scheduler.backlog(_NEXT).seconds,
            running=stats.running,
            waiting=self.waiting,
            slots=self.scheduler.config.max_num_seqs,
            free_blocks=stats.free_blocks,
            total_blocks=stats.total_blocks,
            tokens_per_second=positions / seconds if seconds else 0.0,
        )

    def offer(self, arrival: Arrival) -> None:
        """Add a request, which must not arrive before requests that were offered earlier."""
        self._inbox.append(arrival)

    def run(self, until: float = inf) -> None:
        """Compute every step that begins before `until`; steps in which nothing is decided may be computed later."""
        while True:
            if self._ahead and not self._pass_drawn(until):
                return
            if not self.scheduler.has_work:
                if not self._inbox:
                    return
                self.now = max(self.now, self._inbox[0].at + self._wake)
            if self.now >= until:
                return
            self._take_in()
            if self._impatient:
                self._let_go()
            if self.scheduler.has_work and not self._draw_ahead():
                self._step()

    def _draw_ahead(self) -> bool:
        """Draw how long the next steps take, up to the first that decides something. False if there are none."""
        steps, seq_ids = (0, ()) if self._every or self._offered else self.scheduler.plain_steps()
        if not steps:
            return False
        self._send(self.now)
        self._drawing = [self._live[seq_id] for seq_id in seq_ids]
        starts = [len(live.arrival.request.prompt) + live.drawn - 1 for live in self._drawing]
        self._ahead = self._costs.draw_ahead(starts, steps, self.now)
        return True

    def _pass_drawn(self, until: float) -> bool:
        """Pass the steps drawn ahead, up to the first arrival or departure. False if that is not before `until`."""
        times, steps = self._ahead, self._undisturbed
        if times[steps] >= until:
            return False
        self._ahead = []
        if steps:
            tokens = {live.arrival.request.id: live.tokens(steps) for live in self._drawing}
            self.scheduler.pass_plain_steps(steps, tokens)
        for live in self._drawing if steps else ():
            live.drawn += steps
            live.times.extend(times[1:steps])
            self._touch(live)
        self.steps += steps
        self.busy += times[steps] - self.now
        self.now = times[steps]
        return True

    def _take_in(self) -> None:
        """Queue the requests that have arrived."""
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
        """Let callers leave that have waited too long for a first token."""
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
        seconds, rest = self._costs.draw(plan, began)
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
        self.planned += 1
        read = sum(row.count for row in plan.rows if not row_decodes(row))
        if read:
            self._read = self._read[0] + read, self._read[1] + seconds
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
        """Let the tokens of the last step leave."""
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
        """The results that a runner could have returned."""
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
        """The drafts that the arrivals offer at the current place of each answer."""
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
    """Run a workload to its end on one engine; returns what became of its requests, in the order of their ends."""
    for arrival in arrivals:
        engine.run(arrival.at)
        engine.offer(arrival)
    engine.run()
    return engine.served
