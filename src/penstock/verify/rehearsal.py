"""Trying a schedule without a model: does its pool run out, as it was meant to?

Nearly right, because few drawn requests end before their last token: how long each lives, and so who needs how many
blocks when, hardly depends on what is generated. Takes milliseconds.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.contract.config import SchedulerConfig
from penstock.contract.plan import RowResult, SampledToken, StepPlan, StepResult
from penstock.contract.request import SequenceRequest, StopRules
from penstock.verify.episode import run_schedule
from penstock.verify.schedules import Schedule
from penstock.verify.subject import Subject

__all__ = ["preempts"]


def preempts(schedule: Schedule, subject: Subject) -> bool:
    """Whether, when the schedule is run, a request is preempted with output in hand and recomputed."""
    prompts = {arrival.request.id: len(arrival.request.prompt) for arrival in schedule.arrivals}
    watch = _Watch(prompts, subject.vocab_size)
    understudy = replace(subject, make_runner=watch.over, set_threads=_keep_threads)
    run_schedule(understudy, _unread(schedule), _count_nothing)
    return watch.recomputed


def _unread(schedule: Schedule) -> Schedule:
    """The schedule with requests that nothing ends but their length: the understudy's tokens mean nothing."""
    arrivals = tuple(replace(each, request=_to_the_end(each.request)) for each in schedule.arrivals)
    strangers = tuple(
        replace(each, arrival=replace(each.arrival, request=_to_the_end(each.arrival.request)))
        for each in schedule.strangers
    )
    return replace(schedule, arrivals=arrivals, strangers=strangers)


def _to_the_end(request: SequenceRequest) -> SequenceRequest:
    return replace(request, stop=StopRules(max_tokens=request.stop.max_tokens), grammar=None)


class _Watch:
    """A runner that computes nothing and notices recomputed requests. Owned by `preempts`; strangers do not count."""

    def __init__(self, prompt_tokens: dict[str, int], vocab_size: int) -> None:
        self.recomputed = False
        self._vocab_size = vocab_size
        self._prompt_tokens = prompt_tokens

    def over(self, config: SchedulerConfig) -> _Watch:  # noqa: ARG002 - it needs no memory of any size
        return self

    def run(self, plan: StepPlan) -> StepResult:
        for admit in plan.admits:
            if len(admit.tokens) > self._prompt_tokens.get(admit.seq_id, len(admit.tokens)):
                self.recomputed = True
        # Different tokens in all slots, lest blocks be shared that never would be.
        rows = (
            RowResult(row.slot, (SampledToken((plan.step * 257 + row.slot) % self._vocab_size),))
            for row in plan.rows
            if row.sample
        )
        return StepResult(plan.step, tuple(rows))


def _keep_threads(threads: int) -> None:
    """Nothing is computed, in no thread."""


def _count_nothing() -> None:
    """A rehearsal is no progress."""
