"""The profiler of a runner's process, as seen from the engine's: implements the port `Profiler` by orders."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from penstock.contract.errors import EngineFault
from penstock.remote.messages import Done, Failed, StartProfile, StopProfile
from penstock.remote.runner import ProcessRunner

__all__ = ["ProcessProfiler"]


class ProcessProfiler:
    """Records what a runner's process computes; each plan is a span there. Used only by the engine's thread."""

    def __init__(self, runner: ProcessRunner) -> None:
        self._runner = runner

    def start(self) -> None:
        """See `contract.ports.Profiler`."""
        self._order(StartProfile(), "started")

    def span(self, name: str) -> AbstractContextManager[object]:  # noqa: ARG002
        """Do nothing: the file of the engine's steps covers what its own thread does."""
        return nullcontext()

    def stop(self) -> Callable[[Path], None]:
        """See `contract.ports.Profiler`."""
        kept = Path(tempfile.mkdtemp(prefix="penstock-profile-")) / "trace.json"
        try:
            self._order(StopProfile(str(kept)), "written")
        except EngineFault:
            shutil.rmtree(kept.parent, ignore_errors=True)
            raise

        def write(path: Path) -> None:
            try:
                path.touch(exist_ok=False)
                shutil.copyfile(kept, path)
            finally:
                shutil.rmtree(kept.parent, ignore_errors=True)

        return write

    def _order(self, order: StartProfile | StopProfile, what: str) -> None:
        answer = self._runner.order(order)
        if not isinstance(answer, Done):
            reason = answer.report.strip().rpartition("\n")[2] if isinstance(answer, Failed) else "its process ended"
            raise EngineFault(f"The runner's profile could not be {what}: {reason}")
