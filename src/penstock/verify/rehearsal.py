"""Trying a schedule without a model: does its pool run out, as it was meant to?

Possible because no drawn request stops at a token: how long each lives, and so who needs how many blocks when, does not
depend on what is generated, but for blocks of generated tokens that happen to be shared. Takes milliseconds.
"""

from __future__ import annotations

from penstock.contract.config import SchedulerConfig
from penstock.contract.plan import StepPlan, StepResult
from penstock.verify.episode import run_schedule
from penstock.verify.schedules import Schedule
from penstock.verify.subject import Subject

__all__ = ["preempts"]

_VOCABULARY = 1 << 16


def preempts(schedule: Schedule) -> bool:
    """Whether, when the schedule is run, a request is preempted with output in hand and recomputed."""
    watch = _Watch({arrival.request.id: len(arrival.request.prompt) for arrival in schedule.arrivals})
    understudy = Subject(
        vocab_size=_VOCABULARY,
        max_positions=schedule.config.max_model_len,
        make_runner=watch.over,
        set_threads=_keep_threads,
        threads=schedule.threads,
        cache_root=b"",
    )
    run_schedule(understudy, schedule, _count_nothing)
    return watch.recomputed


class _Watch:
    """A runner that computes nothing and notices recomputed requests. Owned by `preempts`; strangers do not count."""

    def __init__(self, prompt_tokens: dict[str, int]) -> None:
        self.recomputed = False
        self._prompt_tokens = prompt_tokens

    def over(self, config: SchedulerConfig) -> _Watch:  # noqa: ARG002 - it needs no memory of any size
        return self

    def run(self, plan: StepPlan) -> StepResult:
        for admit in plan.admits:
            if len(admit.tokens) > self._prompt_tokens.get(admit.seq_id, len(admit.tokens)):
                self.recomputed = True
        # Different tokens in all slots, lest blocks be shared that never would be.
        tokens = tuple((plan.step * 257 + row.slot) % _VOCABULARY for row in plan.rows if row.sample)
        return StepResult(plan.step, tokens, (0.0,) * len(tokens))


def _keep_threads(threads: int) -> None:
    """Nothing is computed, in no thread."""


def _count_nothing() -> None:
    """A rehearsal is no progress."""
