"""Has chat templates compiled and rendered in worker processes.

Decides what a rendering may take: processor time for what the model's authors wrote, and more in proportion to what
the caller sent. A process has one `Renderer`, whatever models it serves: a worker knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any

from penstock.workers import Budget, Exceeded, Turns, WorkerPool

__all__ = ["COMPILE_SECONDS", "MEMORY_BYTES", "Renderer", "TemplateFault", "TemplateRefusal", "shared_renderer"]

MEMORY_BYTES = 256 * 1024 * 1024
"""Beyond what a worker needs for itself."""
COMPILE_SECONDS = 2.0
"""Of processor time, to compile a template; before each rendering too, for a worker that was started anew."""
SECONDS = 0.25
"""Of processor time for a rendering; usual ones take a thousandth of that."""
SECONDS_PER_CHAR = 0.25e-6
"""And for each character that may be written, which grow with what the caller sent."""
WALL_SECONDS = 20.0
"""Until an answer must have come, on a machine that has other things to do."""
PROCESSES = 4
PROCESSES_OF_A_KEY = 2
MOST_WAITING, MOST_WAITING_OF_A_KEY = 64, 24
WAIT_SECONDS = 15.0
"""Workers go last where processors are few: a quarter of a second of theirs may be seconds there."""
RETRY_SECONDS = 1


class TemplateFault(Exception):
    """The template cannot be compiled: says why, and in which line."""


class TemplateRefusal(Exception):
    """The template does not render what it was given: says why, in its own words where it has any.

    Attributes:
        too_costly: it takes more time or memory than it may.
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
        """Have a worker at hand when it is needed; does not wait for it."""
        self._pool.start()

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the workers there are."""
        return self._pool.pids

    def declared(self, source: str) -> frozenset[str]:
        """The variables that a template reads from its caller.

        Raises:
            TemplateFault: it is not valid, or too costly to compile.
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
        """What a template writes.

        Args:
            source: of a template that `declared` has taken.
            given: its variables, JSON values.
            most_chars: how much it may write.
            now: the time that it is told.
            key: on whose behalf.

        Raises:
            TemplateRefusal: it refuses, fails, or takes or writes more than it may.
            Overloaded: too many wait.
            Unavailable: workers were killed again and again.
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
