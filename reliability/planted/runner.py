"""The product's runner process, with faults: a step that has a row of a marked request does what the mark says.

Wraps what `penstock.building.load_runner` returns, and is otherwise `penstock.runner_process`.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock import runner_process
from penstock.contract.plan import StepPlan, StepResult
from planted import clock
from planted.faults import fault_in

_HEADROOM = 64 << 20
_ASKED = 8 << 30


class FaultyRunner:
    """A runner that goes wrong where a marked sequence has a row."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._model = runner._model
        self._marked: dict[int, str] = {}  # slot to fault

    def run(self, plan: StepPlan) -> StepResult:
        """As the runner's, but for marked rows."""
        for slot in plan.releases:
            self._marked.pop(slot, None)
        for admit in plan.admits:
            self._marked[admit.slot] = fault_in(admit.tokens)
        # Logits are of the drawn token's place and of each draft's.
        drawing = [row.slot for row in plan.rows if row.sample for _ in range(1 + len(row.drafts))]
        lost = [at for at, slot in enumerate(drawing) if self._marked.get(slot) == "is not a number"]
        for row in plan.rows:
            _go_wrong(self._marked.get(row.slot, ""))
        self._runner._model = _Diverging(self._model, lost) if lost else self._model
        result: StepResult = self._runner.run(plan)
        return result

    def reset(self) -> bool:
        """As the runner's."""
        self._marked.clear()
        return bool(self._runner.reset())


class _Diverging:
    """A model whose logits are no numbers in some rows."""

    def __init__(self, model: Any, rows: Sequence[int]) -> None:
        self._model = model
        self._rows = list(rows)

    def logits(self, hidden: Any) -> Any:
        found = self._model.logits(hidden)
        found[self._rows] = float("nan")
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


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
            os.kill(os.getpid(), signal.SIGKILL)  # as a system without memory does


def _ask_for_too_much() -> None:
    """Allocate beyond a limit, as a batch that is too large for the machine does."""
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
    """Be the product's process, with a runner that goes wrong."""
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
        return (FaultyRunner(runner), *rest)

    penstock.building.load_runner = load_faulty  # type: ignore[assignment]


if __name__ == "__main__":
    main()
