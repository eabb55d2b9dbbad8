"""Compiles and renders chat templates in worker processes.

Sets the CPU time of a rendering: a fixed part for the template, which the model's authors wrote, and a part in
proportion to what the caller sent. One `Renderer` per process serves all its models, because workers know no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any

from penstock.workers import Budget, Exceeded, Turns, WorkerPool

__all__ = ["COMPILE_SECONDS", "MEMORY_BYTES", "Renderer", "TemplateFault", "TemplateRefusal", "shared_renderer"]

MEMORY_BYTES = 256 * 1024 * 1024
"""Address space beyond what a worker needs for itself."""
COMPILE_SECONDS = 2.0
"""CPU time to compile a template; allowed before each rendering too, because a new worker has compiled none."""
SECONDS = 0.25
"""CPU time for a rendering; a usual one takes a thousandth of that."""
SECONDS_PER_CHAR = 0.25e-6
"""CPU time added for each character that may be written; their number grows with what the caller sent."""
WALL_SECONDS = 20.0
"""How long a worker may get no processor time before it counts as lost."""
PROCESSES = 4
PROCESSES_OF_A_KEY = 2
MOST_WAITING, MOST_WAITING_OF_A_KEY = 64, 24
WAIT_SECONDS = 15.0
"""How long a request waits for its turn. Workers have low priority: with few CPUs, a quarter of a second of their CPU
time may take seconds."""
RETRY_SECONDS = 1


class TemplateFault(Exception):
    """The template cannot be compiled: says why and, for an error of syntax, in which line."""


class TemplateRefusal(Exception):
    """The template does not render what it was given: says why, in its own words where it has any.

    Attributes:
        too_costly: whether it takes more time or memory than it may.
    """

    def __init__(self, message: str, *, too_costly: bool = False) -> None:
        super().__init__(message)
        self.too_costly = too_costly


class Renderer:
    """Compiles and renders templates, given by their source. Safe to call from several threads."""

    def __init__(self) -> None:
        program = ("-m", "penstock.rendering.worker")
        self._pool = WorkerPool("renders chat templates", program, wall_seconds=WALL_SECONDS)
        self._turns = Turns(
            "conversations",
            places=PROCESSES,
            most_waiting=MOST_WAITING,
            key_places=PROCESSES_OF_A_KEY,
            key_waiting=MOST_WAITING_OF_A_KEY,
            wait_seconds=WAIT_SECONDS,
            retry_after=RETRY_SECONDS,
        )

    def start(self) -> None:
        """Start a worker if none is idle; does not wait for it."""
        self._pool.start()

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the workers' processes."""
        return self._pool.pids

    def declared(self, source: str) -> frozenset[str]:
        """The variables that a template reads from its caller.

        Raises:
            TemplateFault: the template is not valid, or too costly to compile.
            Overloaded, Unavailable: as for `render`.
        """
        try:
            answer = self._ask({"source": source}, COMPILE_SECONDS, "")
        except Exceeded as error:
            raise TemplateFault(f"chat template {_budget(error.budget, COMPILE_SECONDS)} to compile") from error
        if "fault" in answer:
            raise TemplateFault(answer["fault"])
        return frozenset(answer["declared"])

    def render(self, source: str, given: Mapping[str, Any], most_chars: int, now: datetime, key: str = "") -> str:
        """Return what a template writes.

        Args:
            source: the source of a template that `declared` has accepted.
            given: the template's variables, JSON values.
            most_chars: how many characters it may write.
            now: the time that `strftime_now` formats.
            key: the tenant that the rendering is for; "" for none.

        Raises:
            TemplateRefusal: the template refuses, fails, or takes or writes more than it may.
            Overloaded: too many renderings wait, or the wait took too long.
            Unavailable: two workers were lost, or none can be started.
        """
        seconds = SECONDS + SECONDS_PER_CHAR * most_chars
        order = {
            "source": source,
            "given": given,
            "most_chars": most_chars,
            "now": now.isoformat(),
            "seconds": seconds,
        }
        try:
            answer = self._ask(order, COMPILE_SECONDS, key)
        except Exceeded as error:
            raise TemplateRefusal(f"{_budget(error.budget, seconds)} to write them", too_costly=True) from error
        if "refusal" in answer:
            raise TemplateRefusal(answer["refusal"])
        return str(answer["text"])

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    def _ask(self, order: Mapping[str, Any], seconds: float, key: str) -> dict[str, Any]:
        with self._turns.turn(key):
            answer: dict[str, Any] = self._pool.ask(order, seconds)
        return answer


@cache
def shared_renderer() -> Renderer:
    """The renderer of this process; its workers end with the process."""
    return Renderer()


def _budget(budget: Budget, seconds: float) -> str:
    match budget:
        case Budget.TIME:
            return f"takes more than {seconds:.2g} s of processor time"
        case Budget.MEMORY:
            return f"takes more than {MEMORY_BYTES >> 20} MiB of memory"
        case Budget.UNKNOWN:
            return "takes more than a process has"
