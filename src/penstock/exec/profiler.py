"""Torch's profiler behind the port `Profiler`: records one thread's operations and what they launch on a device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch.profiler

from penstock.contract.errors import EngineFault

__all__ = ["TorchProfiler"]


class TorchProfiler:
    """Records the operations of the thread that starts it; the same thread must stop it.

    Compiled kernels are not torch operations; only the spans around them are recorded.
    """

    def __init__(self) -> None:
        self._profile: torch.profiler.profile | None = None

    def start(self) -> None:
        """See `contract.ports.Profiler`."""
        profile = torch.profiler.profile()  # records every activity that this machine has
        try:
            profile.start()
        except RuntimeError as error:
            raise EngineFault("Torch's profiler could not be started; is another one running?") from error
        self._profile = profile

    def span(self, name: str) -> AbstractContextManager[object]:
        """See `contract.ports.Profiler`."""
        return torch.profiler.record_function(name)

    def stop(self) -> Callable[[Path], None]:
        """See `contract.ports.Profiler`."""
        profile, self._profile = self._profile, None
        assert profile is not None, "stop() without start()"
        try:
            profile.stop()
        except RuntimeError as error:
            raise EngineFault("Torch's profiler could not be stopped.") from error

        def write(path: Path) -> None:
            path.touch(exist_ok=False)  # torch says nothing where it cannot write
            profile.export_chrome_trace(str(path))

        return write
