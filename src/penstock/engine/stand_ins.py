"""Stand-ins for a runner or a clock that an engine does not have."""

from __future__ import annotations

from penstock.contract.errors import EngineDead
from penstock.contract.plan import StepPlan, StepResult
from penstock.contract.ports import Runner

__all__ = ["NoClock", "NoRunner", "OneAtATime"]


class NoRunner:
    """The runner of a closed engine: refuses every step."""

    def run(self, plan: StepPlan) -> StepResult:
        """Raise `EngineDead`; see `Runner`."""
        raise EngineDead(f"step {plan.step} came after the engine was closed")

    def reset(self) -> bool:
        """See `Runner`."""
        return False


class OneAtATime:
    """Makes an `OverlappingRunner` of a plain one: computes only when the result is asked for. Owned by the engine."""

    depth = 1

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._started: StepPlan | None = None

    def start(self, plan: StepPlan) -> None:
        """See `OverlappingRunner`."""
        self._started = plan

    def finish(self) -> StepResult:
        """See `OverlappingRunner`."""
        assert self._started is not None, "finish() without a started plan"
        return self._runner.run(self._started)

    def reset(self) -> bool:
        """See `OverlappingRunner`."""
        self._started = None
        return self._runner.reset()


class NoClock:
    """The clock of an engine that measures no time."""

    def now(self) -> float:
        """Always the same instant."""
        return 0.0
