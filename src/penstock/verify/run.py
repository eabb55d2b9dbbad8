"""Runs requests through the real scheduler and a runner, alone or in a schedule, and collects their outcomes.

Uses neither HTTP nor an engine thread. Generated tokens go through the engine's own detokenizer and stop strings, so a
stop string ends a sequence while others continue. Every run is recorded as a trace for `penstock.core.replaying`, and
counts what its schedule was built for, such as preemptions and plain batches.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from penstock.contract.errors import EngineFault
from penstock.contract.events import DraftsJudged, Finished, FinishReason, Generated, PromptScored, SeqEvent
from penstock.contract.plan import StepPlan, TopLogprobs
from penstock.contract.request import SequenceRequest
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core import Scheduler
from penstock.core.draft_chances import MODEL
from penstock.core.trace import (
    encode_abort,
    encode_drafts,
    encode_fail,
    encode_header,
    encode_plan,
    encode_reset,
    encode_result,
    encode_submit,
)
from penstock.engine.choice import Choice
from penstock.text import Tokenizer
from penstock.verify.guesses import Guesser
from penstock.verify.requests import is_plain
from penstock.verify.schedules import Arrival, Schedule
from penstock.verify.target import Target

__all__ = ["Outcome", "ScheduleCrashed", "ScheduleRun", "run_alone", "run_schedule"]

OnFinished = Callable[[], object]

PromptEntry = tuple[int, float, TopLogprobs, int]

Record = Callable[[], str]
"""Encodes one line of a trace."""

log = logging.getLogger(__name__)


class ScheduleCrashed(EngineFault):
    """Raised when a step raised, or left the scheduler in a state that its invariants forbid.

    Attributes:
        index: the schedule's index.
        trace: the record up to the crash.
    """

    def __init__(self, index: int, steps: int, error: Exception, trace: tuple[str, ...]) -> None:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        super().__init__(f"schedule {index} crashed after {steps} steps: {reason}")
        self.index = index
        self.trace = trace


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that a caller is told about a request.

    Attributes:
        tokens: the generated ids.
        logprobs: log probability of each token, by the request's `logprobs_mode`; 0.0 if it asked for none.
        failure: why it failed; "" if it did not.
        tops: the top tokens at each token's position.
        ranks: the rank of each token by likelihood, from 1; 0 if the request asked for no log probabilities.
        text: the text of the answer.
        end: the finish reason, and the stop string that ended it.
        prompt: (place, log probability, top tokens, rank) of prompt tokens, if the request asked for them.
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
class ScheduleRun:
    """A schedule that was run.

    Attributes:
        outcomes: by request id, one mapping for each repetition.
        preemptions: how often a sequence was preempted.
        recomputed: how often a preempted request was admitted again with generated tokens to recompute; strangers and
            readmissions after a loss of the runner do not count.
        plain_steps: steps that drew tokens for two or more plain requests, and for nothing else.
        hit_tokens: positions that admissions found in the prefix cache.
        given_back: blocks that running sequences gave back because they had left the attention window.
        restored: admissions that resumed from a checkpoint of recurrent state.
        drafted: draft tokens that were computed.
        accepted: how many draft tokens were right.
        accepted_of_model: how many right draft tokens came from the draft model.
        losses: how often the runner was lost.
        records: the trace, one function per line.
    """

    outcomes: tuple[dict[str, Outcome], ...]
    steps: int
    preemptions: int
    recomputed: int
    plain_steps: int
    hit_tokens: int
    given_back: int
    restored: int
    drafted: int
    accepted: int
    accepted_of_model: int
    losses: int
    records: tuple[Record, ...]

    @property
    def trace(self) -> tuple[str, ...]:
        """The lines of the record, without line ends; encoded only on request, because most runs are exact."""
        return _encoded(self.records)


class _Watch:
    """Counts, plan by plan, the events that a schedule was built for. Owned by the drive.

    Args:
        schedule: the schedule whose requests are counted; None counts nothing.
    """

    def __init__(self, schedule: Schedule | None) -> None:
        requests = [] if schedule is None else [arrival.request for arrival in schedule.arrivals]
        self._counted = {request.id for request in requests}
        self._plain = {request.id for request in requests if is_plain(request)}
        self._owners: dict[int, str] = {}  # sequence ids by slot
        self._excused: set[str] = set()  # sequences that a runner had when it was lost
        self.recomputed = 0
        self.plain_steps = 0

    def lose(self) -> None:
        """Note that the runner is lost: sequences that are admitted again now were not preempted."""
        self._excused.update(self._owners.values())
        self._owners.clear()

    def see(self, plan: StepPlan) -> None:
        for admit in plan.admits:
            self._owners[admit.slot] = admit.seq_id
            had_output = 0 <= admit.prompt_tokens < len(admit.tokens)
            excused = admit.seq_id in self._excused
            self._excused.discard(admit.seq_id)
            self.recomputed += had_output and admit.seq_id in self._counted and not excused
        drawing = [self._owners[row.slot] for row in plan.rows if row.sample]
        self.plain_steps += len(drawing) > 1 and self._plain.issuperset(drawing)


class _Live:
    """An unfinished request and what it has generated so far. Owned by the drive."""

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
        scores = zip(event.logprobs, event.top_logprobs, event.ranks, strict=True)
        self._prompt |= {at: (at, *entry) for at, entry in enumerate(scores, start=event.start)}

    def push(self, event: Generated) -> None:
        self._drawn.append(event)
        self._text.append(self._choice.push(event.token, event.logprob).text)

    def outcome(self, finished: Finished | None) -> Outcome:
        """The outcome; `finished` is None if a stop string ended the request."""
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
    """Steps and records a scheduler and a runner. Owned by the function that made it.

    Attributes:
        outcomes: by id, of requests that finished and were not aborted; the reader removes them.
    """

    def __init__(
        self,
        target: Target,
        config: SchedulerConfig,
        watched: Schedule | None = None,
        guesser: Guesser | None = None,
    ) -> None:
        self.scheduler = Scheduler(config)
        self._guesser = guesser
        self.drafted = self.accepted = self.accepted_of_model = self.losses = 0
        self._losing = () if watched is None else watched.losses
        self._target = target
        self.records: list[Record] = [partial(encode_header, config)]
        self.outcomes: dict[str, Outcome] = {}
        self.watch = _Watch(watched)
        self._runner = target.make_runner(config)
        self._tokenizer = target.text.tokenizer
        self._live: dict[str, _Live] = {}

    def submit(self, request: SequenceRequest) -> None:
        self.scheduler.submit(request)
        self.records.append(partial(encode_submit, request))
        self._live[request.id] = _Live(request, self._tokenizer)

    def abort(self, seq_id: str) -> None:
        """End a sequence if it has not finished."""
        if self._live.pop(seq_id, None) is not None:
            self._drop(seq_id)

    def step(self) -> list[str]:
        """Plan, run and commit; returns the ids of sequences that finished. There must be work.

        Raises:
            EngineFault: the scheduler has work, but its plan has no rows.
        """
        drafts = () if self._guesser is None else self._guesser.guess(self.scheduler.draftable())
        if drafts:
            self.records.append(partial(encode_drafts, drafts))
        plan = self.scheduler.plan(drafts)
        self.records.append(partial(encode_plan, plan))
        self.watch.see(plan)
        if not plan.rows:
            raise EngineFault(f"nothing will ever move again: {plan.explain()}")
        if plan.step in self._losing:
            return self._lose_runner()
        result = self._runner.run(plan)
        self.records.append(partial(encode_result, result))
        return [event.seq_id for event in self.scheduler.commit(plan, result) if self._ends(event)]

    def _lose_runner(self) -> list[str]:
        """Do what the engine does when the runner's process was killed: a new runner computes everything again."""
        self.losses += 1
        self.watch.lose()
        events = self.scheduler.fail_step(killed=True)
        self.records.append(partial(encode_fail, True))
        self._runner = self._target.make_runner(self.scheduler.config)
        self.scheduler.reset_prefix_cache()
        self.records.append(encode_reset)
        return [event.seq_id for event in events if self._ends(event)]

    def _ends(self, event: SeqEvent) -> bool:
        """Note an event; return whether it is the last one of its sequence."""
        live = self._live.get(event.seq_id)
        if live is None:  # a stop string ended it earlier in this step
            return False
        match event:
            case PromptScored():
                live.score(event)
            case DraftsJudged():
                self.drafted += event.drafts
                self.accepted += event.right
                self.accepted_of_model += event.right if event.drafter == MODEL else 0
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
        """Abort a sequence, as the engine does."""
        self.records.append(partial(encode_abort, seq_id))
        self.scheduler.abort(seq_id)


def run_alone(target: Target, request: SequenceRequest) -> Outcome:
    """Run one request on a fresh scheduler and runner, its prompt in one chunk, with no prefix cache: the reference.

    The request keeps all its blocks, even outside its attention window, because giving them back must not matter.

    Raises:
        EngineFault: the request fails, so there is nothing to compare with.
    """
    tokens = len(request.prompt) + request.stop.max_tokens
    config = SchedulerConfig(
        num_blocks=-(-tokens // 16),
        max_num_seqs=1,
        max_num_batched_tokens=len(request.prompt),
        max_model_len=tokens,
        prefix_caching=False,
        checkpoints=0 if target.stateful else None,
        model_digest=target.model_digest,
    )
    drive = _Drive(target, config)
    drive.submit(request)
    while drive.scheduler.has_work:
        drive.step()
    outcome = drive.outcomes[request.id]
    if outcome.failure:
        raise EngineFault(f"request {request.id} fails even alone: {outcome.failure}")
    return outcome


def run_schedule(
    target: Target, schedule: Schedule, on_finished: OnFinished, guesser: Guesser | None = None
) -> ScheduleRun:
    """Run everything in a schedule, and check the scheduler's invariants afterwards.

    Args:
        target: makes the runner.
        schedule: the schedule to run.
        on_finished: called whenever a request that is not a stranger is complete.
        guesser: guesses the next tokens; None for no guesses.

    Raises:
        ScheduleCrashed: the schedule could not be run to its end.
    """
    target.set_threads(schedule.threads)
    drive = _Drive(target, schedule.config, schedule, guesser)
    try:
        outcomes = tuple(_run_all(drive, schedule, on_finished) for _ in range(schedule.runs))
        drive.scheduler.check()
    except Exception as error:
        log.exception("schedule %d crashed", schedule.index)
        raise ScheduleCrashed(schedule.index, drive.scheduler.stats.steps, error, _encoded(drive.records)) from error
    stats, watch = drive.scheduler.stats, drive.watch
    return ScheduleRun(
        outcomes=outcomes,
        steps=stats.steps,
        preemptions=stats.preemptions,
        recomputed=watch.recomputed,
        plain_steps=watch.plain_steps,
        hit_tokens=stats.hit_tokens,
        given_back=drive.scheduler.given_back,
        restored=drive.scheduler.restored,
        drafted=drive.drafted,
        accepted=drive.accepted,
        accepted_of_model=drive.accepted_of_model,
        losses=drive.losses,
        records=tuple(drive.records),
    )


def _run_all(drive: _Drive, schedule: Schedule, on_finished: OnFinished) -> dict[str, Outcome]:
    """Run one repetition of a schedule, from its own step 0; return the outcomes of all requests except strangers."""
    counted = {arrival.request.id for arrival in schedule.arrivals}
    coming = deque(sorted((*schedule.arrivals, *(s.arrival for s in schedule.strangers)), key=_step_of))
    leaving = deque(sorted((s.arrival.step + s.life, s.arrival.request.id) for s in schedule.strangers))
    step = 0
    while coming or drive.scheduler.has_work:
        if not drive.scheduler.has_work:
            step = max(step, coming[0].step)  # nothing happens until the next arrival
        while coming and coming[0].step <= step:
            drive.submit(coming.popleft().request)
        while leaving and leaving[0][0] <= step:
            drive.abort(leaving.popleft()[1])
        for seq_id in drive.step() if drive.scheduler.has_work else ():
            if seq_id in counted:
                on_finished()
        step += 1
    return {seq_id: drive.outcomes.pop(seq_id) for seq_id in counted}


def _encoded(records: Iterable[Record]) -> tuple[str, ...]:
    return tuple(record() for record in records)


def _step_of(arrival: Arrival) -> int:
    return arrival.step
