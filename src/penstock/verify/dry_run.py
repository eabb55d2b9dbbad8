"""Runs a schedule without a model, to see whether it does what it was built for: preempt, and draw plain batches.

A request that a stop string, a stop token, repetition or a grammar may end generates only its fewest possible tokens
here, so whatever happens here is certain to happen with a model too. Plain requests run to their last token in both. A
dry run takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from penstock.contract.plan import Draft, Draftable, Row, RowResult, SampledToken, StepPlan, StepResult
from penstock.contract.request import SequenceRequest, StopRules
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.verify.guesses import LONGEST_GUESS
from penstock.verify.run import ScheduleRun, run_schedule
from penstock.verify.schedules import Schedule
from penstock.verify.target import Target

__all__ = ["dry_run"]


def dry_run(schedule: Schedule, target: Target) -> ScheduleRun:
    """Run a schedule with meaningless tokens; the counts of the result are what a real run is expected to see."""
    stand_in = replace(
        target, make_runner=lambda config: _NoModel(config, target.vocab_size), set_threads=_keep_threads
    )
    guesser = None if schedule.right_guesses is None else _AlwaysRight()
    return run_schedule(stand_in, _at_its_shortest(schedule), _count_nothing, guesser)


def _at_its_shortest(schedule: Schedule) -> Schedule:
    """The schedule with requests that end only by length, because the tokens mean nothing."""
    arrivals = tuple(replace(each, request=_shortest(each.request)) for each in schedule.arrivals)
    strangers = tuple(
        replace(each, arrival=replace(each.arrival, request=_shortest(each.arrival.request)))
        for each in schedule.strangers
    )
    return replace(schedule, arrivals=arrivals, strangers=strangers)


def _shortest(request: SequenceRequest) -> SequenceRequest:
    rules = request.stop
    may_end = rules.token_ids or rules.strings or rules.repetition or request.grammar is not None
    return replace(request, stop=StopRules(max_tokens=max(1, rules.min_tokens) if may_end else rules.max_tokens))


class _NoModel:
    """A runner that computes nothing. Owned by `dry_run`."""

    def __init__(self, config: SchedulerConfig, vocab_size: int) -> None:
        self._slots = config.max_num_seqs
        self._vocab_size = vocab_size

    def run(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step, tuple(self._result(plan.step, row) for row in plan.rows if row.sample))

    def _result(self, step: int, row: Row) -> RowResult:
        # All slots get different tokens, so that no two sequences share blocks by accident.
        last = (step * self._slots + row.slot) % self._vocab_size
        return RowResult(row.slot, tuple(map(SampledToken, (*row.drafts, last))))

    def reset(self) -> bool:
        """Do nothing: there is no state to lose."""
        return False


class _AlwaysRight:
    """Makes the longest guesses, all of which `_NoModel` then draws, so that sequences end in the fewest steps."""

    def guess(self, sequences: Iterable[Draftable]) -> tuple[Draft, ...]:
        return tuple(Draft(one.seq_id, (one.tokens[-1],) * min(one.most, LONGEST_GUESS)) for one in sequences)


def _keep_threads(threads: int) -> None:
    """Do nothing: nothing is computed, so there are no threads to set."""


def _count_nothing() -> None:
    """Do nothing: the progress that is shown leaves dry runs out."""
