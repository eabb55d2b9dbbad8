"""Reads a record as a day: the requests as they arrived, what became of them, and how long steps took.

Each request of the record is simulated with its own prompt and tenant, its answer as far as it was generated, and the
drafts that were offered for it. The answer ends where it ended in the record, whatever ended it. Requests that the
record does not hold, because they were refused for example, are not simulated.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf

from penstock.contract.errors import ConfigError
from penstock.contract.plan import Draft, Row, RowResult, StepPlan, StepResult
from penstock.contract.request import SequenceRequest, StopRules
from penstock.contract.sampling import NEUTRAL
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core.trace import Abort, Drafts, Drop, Fail, Recorded, TraceReader
from penstock.foresight.arrivals import Arrival, Served
from penstock.foresight.step_costs import CostLearner, Rest, Shape, StepCosts

__all__ = ["RecordedRun", "read_record"]


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The contents of a record.

    Attributes:
        config: the configuration of its scheduler.
        arrivals: its requests, in order of time; the first arrives at 0.
        served: what became of requests that ended during the recording and had a token or an embedding.
        costs: how long its steps took.
        began: the first arrival, by the clock of arrival times, in seconds.
        seconds: from the first arrival to the last record.
        steps: how many steps were computed.
    """

    config: SchedulerConfig
    arrivals: list[Arrival]
    served: list[Served]
    costs: StepCosts
    began: float
    seconds: float
    steps: int


def read_record(lines: Iterable[str], until: float = inf) -> RecordedRun:
    """Read a record.

    Args:
        lines: the lines of the file.
        until: costs are learned from steps that end at most this many seconds after the first arrival.

    Raises:
        ConfigError: the trace is corrupt, of another version, has no times, holds no request, or has several plans in
            flight at once.
    """
    records = TraceReader(lines)
    config = records.header().config
    if config.depth > 1:
        raise ConfigError("trace", f"{config.depth} plans were in flight at once: no simulation does that")
    reader = _Reader(config, until)
    for record in records:
        if record.at is None:
            raise ConfigError("trace", f"line {record.line}: it says no time: no engine with a clock recorded it")
        reader.take(record, record.at)
    return reader.run()


class _Seen:
    """A request of the record. Owned by the reader."""

    __slots__ = ("begun", "cached", "ended", "left", "offers", "request", "times", "tokens")

    def __init__(self, request: SequenceRequest) -> None:
        self.request = request
        self.begun = -1.0
        self.cached = 0
        self.tokens: list[int] = []
        self.times = array("d")
        self.ended = -1.0
        self.left = False  # aborted before its first token
        self.offers: dict[int, tuple[Draft, ...]] = {}

    def full(self, config: SchedulerConfig) -> bool:
        """Whether its stop rules ended it with its last token; ignores repetition, which ends few requests."""
        stop, count = self.request.stop, len(self.tokens)
        if count >= min(stop.max_tokens, config.max_model_len - len(self.request.prompt)):
            return True
        return self.tokens[-1] in stop.token_ids and count >= stop.min_tokens

    def arrival(self, began: float) -> Arrival:
        request, generated = self.request, len(self.tokens)
        patience = self.ended - request.arrival if self.left and not generated else inf
        most = generated or request.stop.max_tokens
        stop = StopRules(max_tokens=0 if request.embedding is not None else most)
        at = request.arrival - began
        again = replace(request, arrival=at, stop=stop, sampling=NEUTRAL, grammar=None, thinking=None)
        return Arrival(at, again, tuple(self.tokens), patience, self.offers)

    def served(self, began: float) -> Served:
        request = self.request
        return Served(
            id=request.id,
            tenant=request.tenant,
            arrived=request.arrival - began,
            begun=self.begun - began,
            times=array("d", [time - began for time in self.times]),
            ended=self.ended - began,
            prompt_tokens=len(request.prompt),
            cached_tokens=self.cached,
            tokens=len(self.tokens),
        )


class _Reader:
    """Follows a record line by line. Owned by `read_record`."""

    def __init__(self, config: SchedulerConfig, until: float) -> None:
        self._config = config
        self._until = until
        self._learner = CostLearner(config.window)
        self._seen: list[_Seen] = []
        self._live: dict[str, _Seen] = {}
        self._slots: dict[int, _Seen] = {}
        self._ids: dict[int, int] = {}  # one int object for each token id, to save memory
        self._plan: StepPlan | None = None
        self._planned = 0.0
        self._held: list[_Seen] = []  # requests whose tokens wait to leave
        self._last: tuple[Shape, float, float] | None = None  # the last step: shape, `Rest.around`, end
        self._steps = 0
        self._end = 0.0

    def run(self) -> RecordedRun:
        """Everything that was read."""
        if not self._seen:
            raise ConfigError("trace", "it holds no request")
        self._send(self._end)
        began = min(seen.request.arrival for seen in self._seen)
        arrivals = sorted((seen.arrival(began) for seen in self._seen), key=lambda each: each.at)
        ended = [seen for seen in self._seen if seen.ended >= 0 and seen.begun >= 0 and not seen.left]
        served = [seen.served(began) for seen in ended if seen.times or seen.request.embedding is not None]
        costs = self._learner.costs()
        return RecordedRun(self._config, arrivals, served, costs, began, self._end - began, self._steps)

    def take(self, record: Recorded, at: float) -> None:
        """Read one record."""
        self._end = at
        match record.value:
            case SequenceRequest() as request:
                self._submit(request, at)
            case Abort(seq_id):
                self._abort(seq_id, at)
            case Drafts(drafts):
                self._offer(drafts)
            case StepPlan() as plan:
                self._begin(plan, at)
            case StepResult() as result:
                self._finish(result, at)
            case Drop() | Fail():
                self._plan = self._last = None
                self._slots.clear()

    def _submit(self, request: SequenceRequest, at: float) -> None:
        if not self._live and self._learns(at):
            self._learner.wakes.append(at - request.arrival)
        prompt = tuple([self._ids.setdefault(token, token) for token in request.prompt])
        seen = _Seen(replace(request, prompt=prompt))
        self._seen.append(seen)
        self._live[request.id] = seen

    def _abort(self, seq_id: str, at: float) -> None:
        seen = self._live.pop(seq_id, None)
        if seen is not None:
            seen.left = not seen.tokens
            seen.ended = at

    def _offer(self, drafts: tuple[Draft, ...]) -> None:
        for draft in drafts:
            seen = self._live.get(draft.seq_id)
            if seen is not None:
                count = len(seen.tokens)
                seen.offers[count] = (*seen.offers.get(count, ()), draft)

    def _begin(self, plan: StepPlan, at: float) -> None:
        if self._last is not None:
            shape, around, ended = self._last
            if self._live and self._learns(at):
                self._learner.rest(shape, Rest(around, at - ended))
            self._last = None
        self._send(at)
        self._plan, self._planned = plan, at
        for slot in plan.releases:
            self._slots.pop(slot, None)
        for admit in plan.admits:
            seen = self._live.get(admit.seq_id)
            if seen is not None:
                self._slots[admit.slot] = seen
                if seen.begun < 0:
                    seen.begun, seen.cached = at, admit.computed

    def _finish(self, result: StepResult, at: float) -> None:
        plan, self._plan = self._plan, None
        if plan is None or plan.step != result.step:
            raise ConfigError("trace", f"a result of step {result.step} without its plan")
        self._steps += 1
        of_rows = {each.slot: each for each in result.rows}
        for row in plan.rows:
            seen, of_row = self._slots.get(row.slot), of_rows.get(row.slot)
            if seen is not None and of_row is not None and seen.request.id in self._live:
                self._draw(seen, row, of_row, at)
        if self._learns(at) and not plan.num_restored:
            guessing = 0.0 if result.guessing is None else result.guessing.seconds
            shape = self._learner.step(plan, result.seconds - guessing, self._after(at))
            if self._live:
                self._last = (shape, max(0.0, at - self._planned - result.seconds), at)
        if not self._live:
            self._send(at)

    def _draw(self, seen: _Seen, row: Row, result: RowResult, at: float) -> None:
        """Note what a row of a live request yielded."""
        if not row.stored and (result.tokens or result.embedding is not None):
            self._held.append(seen)
        for token in result.tokens:
            seen.tokens.append(self._ids.setdefault(token.id, token.id))
            if seen.full(self._config):
                break
        if result.failure or result.embedding is not None or (result.tokens and seen.full(self._config)):
            seen.ended = at
            del self._live[seen.request.id]

    def _send(self, at: float) -> None:
        """Note that the tokens of the last step leave the engine."""
        for seen in self._held:
            if seen.request.embedding is None:
                seen.times.append(at)
            if seen.ended >= 0:
                seen.ended = at
        self._held.clear()

    def _learns(self, at: float) -> bool:
        return self._after(at) <= self._until

    def _after(self, at: float) -> float:
        """Seconds since the first arrival."""
        return at - self._seen[0].request.arrival if self._seen else 0.0
