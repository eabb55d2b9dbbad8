"""Running: requests through the real scheduler and a runner, alone or by a schedule, and what came of them.

Decides nothing about what is run or whether it is right. No HTTP, no threads of its own. What is generated is read as
the engine reads it, so that stop strings end a sequence in the middle of others. Every episode is recorded as it
happens, as a trace that `penstock.core.trace` replays.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from penstock.contract.config import SchedulerConfig
from penstock.contract.errors import EngineFault
from penstock.contract.events import Finished, FinishReason, Generated, PromptScored, SeqEvent
from penstock.contract.plan import TopLogprobs
from penstock.contract.request import SequenceRequest
from penstock.core import Scheduler
from penstock.core.trace import encode_abort, encode_header, encode_plan, encode_result, encode_submit
from penstock.engine.choice import Choice
from penstock.text import Tokenizer
from penstock.verify.schedules import Arrival, Schedule
from penstock.verify.subject import Subject

__all__ = ["Episode", "Outcome", "ScheduleCrashed", "run_alone", "run_schedule"]

OnFinished = Callable[[], object]

PromptEntry = tuple[int, float, TopLogprobs, int]

log = logging.getLogger(__name__)


class ScheduleCrashed(EngineFault):
    """A step could not be run at all, or left the scheduler in a state that its invariants forbid.

    Attributes:
        index: of the schedule.
        trace: what was recorded until then.
    """

    def __init__(self, index: int, steps: int, error: Exception, trace: tuple[str, ...]) -> None:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        super().__init__(f"schedule {index} crashed after {steps} steps: {reason}")
        self.index = index
        self.trace = trace


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a request came to: its tokens, the log probability of each as the request wants it, and all that is told.

    Attributes:
        failure: why it could not go on; "" where it could.
        tops: the likeliest tokens in place of each.
        ranks: the place of each by likelihood.
        text: what a caller would be given.
        end: why it ended, in a word, and the stop string that did it.
        prompt: (place, log probability, likeliest tokens, rank) of prompt tokens, where they were asked for.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    failure: str = ""
    tops: tuple[TopLogprobs, ...] = ()
    ranks: tuple[int, ...] = ()
    text: str = ""
    end: str = ""
    prompt: tuple[PromptEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class Episode:
    """A schedule that was run.

    Attributes:
        outcomes: by request id, one mapping a run.
        hit_tokens: positions that admissions found in the prefix cache.
        trace: the lines of the record, without line ends.
    """

    outcomes: tuple[dict[str, Outcome], ...]
    steps: int
    preemptions: int
    hit_tokens: int
    trace: tuple[str, ...]


class _Live:
    """A request that is going on, and what came of it so far. Owned by the drive."""

    def __init__(self, request: SequenceRequest, tokenizer: Tokenizer) -> None:
        self._choice = Choice(request.choice, request.stop, tokenizer)
        self._drawn: list[Generated] = []
        self._text: list[str] = []
        self._prompt: dict[int, PromptEntry] = {}

    @property
    def ended(self) -> bool:
        """Whether a stop string ended it."""
        return self._choice.ended

    def score(self, event: PromptScored) -> None:
        scores = zip(event.logprobs, event.tops, event.ranks, strict=True)
        self._prompt |= {at: (at, *entry) for at, entry in enumerate(scores, start=event.start)}

    def push(self, event: Generated) -> None:
        self._drawn.append(event)
        self._text.append(self._choice.push(event.token, event.logprob).text)

    def outcome(self, finished: Finished | None) -> Outcome:
        """What it came to; `finished` is None where a stop string ended it."""
        reason = FinishReason.STOP if finished is None else finished.reason
        if finished is not None:
            self._text.append(self._choice.finish().text)
        return Outcome(
            tokens=tuple(each.token for each in self._drawn),
            logprobs=tuple(each.logprob for each in self._drawn),
            failure=finished.message if finished is not None and reason is FinishReason.ERROR else "",
            tops=tuple(each.top for each in self._drawn),
            ranks=tuple(each.rank for each in self._drawn),
            text="".join(self._text),
            end=f"{reason} {self._choice.matched}",
            prompt=tuple(self._prompt[at] for at in sorted(self._prompt)),
        )


class _Drive:
    """A scheduler and a runner that are stepped and recorded. Owned by the function that made it.

    Attributes:
        outcomes: of what has finished and was not aborted; taken out by whoever reads them.
    """

    def __init__(self, subject: Subject, config: SchedulerConfig) -> None:
        self.scheduler = Scheduler(config)
        self.trace = [encode_header(config)]
        self.outcomes: dict[str, Outcome] = {}
        self._runner = subject.make_runner(config)
        self._tokenizer = subject.text.tokenizer
        self._live: dict[str, _Live] = {}

    def submit(self, request: SequenceRequest) -> None:
        self.scheduler.submit(request)
        self.trace.append(encode_submit(request))
        self._live[request.id] = _Live(request, self._tokenizer)

    def abort(self, seq_id: str) -> None:
        """End a sequence if it is still going on."""
        if self._live.pop(seq_id, None) is not None:
            self._drop(seq_id)

    def step(self) -> list[str]:
        """Plan, run and commit; returns who has finished. There must be work.

        Raises:
            EngineFault: the scheduler has work and does none of it.
        """
        plan = self.scheduler.plan()
        self.trace.append(encode_plan(plan))
        if not plan.rows:
            raise EngineFault(f"nothing will ever move again: {plan.explain()}")
        result = self._runner.run(plan)
        self.trace.append(encode_result(result))
        return [event.seq_id for event in self.scheduler.commit(plan, result) if self._ends(event)]

    def _ends(self, event: SeqEvent) -> bool:
        """Note an event; true where it is its sequence's last."""
        live = self._live.get(event.seq_id)
        if live is None:  # it ended earlier in this very step, by a stop string
            return False
        match event:
            case PromptScored():
                live.score(event)
            case Generated():
                live.push(event)
                if live.ended:
                    self._drop(event.seq_id)
                    self._close(event.seq_id, live.outcome(None))
                return live.ended
            case Finished():
                self._close(event.seq_id, live.outcome(event))
                return True
        return False

    def _close(self, seq_id: str, outcome: Outcome) -> None:
        del self._live[seq_id]
        self.outcomes[seq_id] = outcome

    def _drop(self, seq_id: str) -> None:
        """End a sequence from outside, as the engine does."""
        self.trace.append(encode_abort(seq_id))
        self.scheduler.abort(seq_id)


def run_alone(subject: Subject, request: SequenceRequest) -> Outcome:
    """The reference: one request on a fresh scheduler and runner, its prompt in one chunk, with no prefix cache.

    Raises:
        EngineFault: it fails, so there is nothing to compare with.
    """
    tokens = len(request.prompt) + request.stop.max_tokens
    config = SchedulerConfig(
        num_blocks=-(-tokens // 16),
        max_num_seqs=1,
        max_num_batched_tokens=len(request.prompt),
        max_model_len=tokens,
        prefix_caching=False,
        cache_root=subject.cache_root,
    )
    drive = _Drive(subject, config)
    drive.submit(request)
    while drive.scheduler.has_work:
        drive.step()
    outcome = drive.outcomes[request.id]
    if outcome.failure:
        raise EngineFault(f"request {request.id} fails even alone: {outcome.failure}")
    return outcome


def run_schedule(subject: Subject, schedule: Schedule, on_finished: OnFinished) -> Episode:
    """Run everything that a schedule asks for; afterwards the pool must be whole again.

    Args:
        subject: what runs it.
        schedule: how.
        on_finished: called whenever one of the requests, strangers apart, is complete.

    Raises:
        ScheduleCrashed: it could not be run to its end.
    """
    subject.set_threads(schedule.threads)
    drive = _Drive(subject, schedule.config)
    try:
        outcomes = tuple(_run_all(drive, schedule, on_finished) for _ in range(schedule.runs))
        drive.scheduler.check()
    except Exception as error:
        log.exception("schedule %d crashed", schedule.index)
        raise ScheduleCrashed(schedule.index, drive.scheduler.stats.steps, error, tuple(drive.trace)) from error
    stats = drive.scheduler.stats
    return Episode(outcomes, stats.steps, stats.preemptions, stats.hit_tokens, tuple(drive.trace))


def _run_all(drive: _Drive, schedule: Schedule, on_finished: OnFinished) -> dict[str, Outcome]:
    """One run of a schedule, from its own step 0 on; the outcomes of all but strangers."""
    counted = {arrival.request.id for arrival in schedule.arrivals}
    coming = deque(sorted((*schedule.arrivals, *(s.arrival for s in schedule.strangers)), key=_step_of))
    leaving = deque(sorted((s.arrival.step + s.life, s.arrival.request.id) for s in schedule.strangers))
    step = 0
    while coming or drive.scheduler.has_work:
        if not drive.scheduler.has_work:
            step = max(step, coming[0].step)  # nothing happens until then
        while coming and coming[0].step <= step:
            drive.submit(coming.popleft().request)
        while leaving and leaving[0][0] <= step:
            drive.abort(leaving.popleft()[1])
        for seq_id in drive.step() if drive.scheduler.has_work else ():
            if seq_id in counted:
                on_finished()
        step += 1
    return {seq_id: drive.outcomes.pop(seq_id) for seq_id in counted}


def _step_of(arrival: Arrival) -> int:
    return arrival.step
