"""Runs the product's runner process with faults: a step with a row of a marked request does what the mark says.

Wraps what `penstock.building.load_runner` returns, and is otherwise `penstock.runner_process`.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock import runner_process
from penstock.contract.plan import Row, StepPlan, StepResult
from planted import clock
from planted.faults import fault_in

_HEADROOM = 64 << 20
_ASKED = 8 << 30
NO_NUMBER = "is not a number"


class FaultyRunner:
    """A runner that fails in a step where a marked sequence has a row.

    Attributes:
        marked: maps each slot to its fault, "" for none.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.marked: dict[int, str] = {}

    def run(self, plan: StepPlan) -> StepResult:
        """Run the plan as the runner does, except for marked rows."""
        for slot in plan.releases:
            self.marked.pop(slot, None)
        for admit in plan.admits:
            self.marked[admit.slot] = fault_in(admit.tokens)
        for row in plan.rows:
            _go_wrong(self.marked.get(row.slot, ""))
        result: StepResult = self._runner.run(plan)
        return result

    def reset(self) -> bool:
        """Reset as the runner does."""
        self.marked.clear()
        return bool(self._runner.reset())


def lose_numbers(marked: Mapping[int, str]) -> None:
    """Turn the logits of sequences whose fault is `NO_NUMBER` into NaN, where tokens are drawn and rows are known.

    Args:
        marked: maps each slot to its fault.
    """
    from penstock.exec.drawing import Drawing  # torch comes with it

    draw = Drawing.draw

    def draw_faulty(self: Drawing, rows: Sequence[Row], logits: Any, pending: Any) -> None:
        first = 0
        for row in rows:
            end = first + 1 + len(row.drafts)
            if marked.get(row.slot) == NO_NUMBER:
                logits[first:end] = float("nan")
            first = end
        draw(self, rows, logits, pending)

    Drawing.draw = draw_faulty  # type: ignore[method-assign]


def _go_wrong(fault: str) -> None:
    match fault:
        case "raises":
            raise ValueError("planted")
        case "segfaults":
            ctypes.string_at(0)
        case "aborts":
            os.abort()
        case "exits":
            os._exit(3)
        case "hangs":
            time.sleep(1000)
        case "spins":
            while True:
                pass
        case "lacks memory":
            _ask_for_too_much()
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)  # as a system that is out of memory does


def _ask_for_too_much() -> None:
    """Allocate beyond a limit, as a batch too large for the machine would."""
    import torch

    before = resource.getrlimit(resource.RLIMIT_AS)
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    size = 1024 * int(next(line for line in status if line.startswith("VmSize")).split()[1])
    resource.setrlimit(resource.RLIMIT_AS, (size + _HEADROOM, before[1]))
    try:
        torch.ones(_ASKED, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def main() -> None:
    """Run the product's runner process with a faulty runner."""
    prepare = runner_process._prepare

    def prepare_faulty() -> Any:
        prepared = prepare()
        _make_runners_faulty()
        return prepared

    runner_process._prepare = prepare_faulty
    clock.jump_on_signals()
    runner_process.main()


def _make_runners_faulty() -> None:
    import penstock.building  # where the product imports it: torch comes with it

    load = penstock.building.load_runner

    def load_faulty(*arguments: Any) -> tuple[Any, ...]:
        runner, *rest = load(*arguments)
        faulty = FaultyRunner(runner)
        lose_numbers(faulty.marked)
        return (faulty, *rest)

    penstock.building.load_runner = load_faulty  # type: ignore[assignment]


if __name__ == "__main__":
    main()
