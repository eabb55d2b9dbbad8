"""Whether the server takes work now, and whether it ever will again.

It is not ready when it stops, when a step takes far longer than its like, and when the engine has taken no message for
too long. Messages go through the same inbox and to the same thread as work, so one that is answered proves that work
would be. It is dead when only a new process can serve again; then it should be ended and started anew.
"""

from __future__ import annotations

import asyncio

from penstock.contract.errors import EngineDead
from penstock.contract.ports import EngineClient, StepWatch

__all__ = ["NoWatch", "Readiness"]

PATIENCE_SECONDS = 0.5
"""How long a probe waits for the engine: orchestrators wait a second by default."""

SAME_STEP_SECONDS = 1.0
"""The engine takes its messages before a step; one that came with the step's beginning may have come too late."""

STOPPING = "the server is shutting down"


class NoWatch:
    """In place of a `StepWatch` where nobody watches steps."""

    def overdue(self) -> str:
        """See `StepWatch`."""
        return ""

    def lost(self) -> str:
        """See `StepWatch`."""
        return ""

    def began(self) -> float:
        """See `StepWatch`."""
        return float("inf")


class Readiness:
    """Asks the engine whether it takes messages. Confined to one event loop, and asked as often as anybody likes.

    Args:
        heartbeat_seconds: how long the engine may take for a message. A step that was begun before the message came,
            and is not overdue, may take longer.
        stopping: set when the server begins to stop.
    """

    def __init__(
        self, client: EngineClient, watch: StepWatch, heartbeat_seconds: float, stopping: asyncio.Event
    ) -> None:
        self._client = client
        self._watch = watch
        self._limit = heartbeat_seconds
        self._stopping = stopping
        self._heartbeat: asyncio.Task[None] | None = None
        self._asked = 0.0

    async def unready(self) -> str:
        """Why no work is taken; "" while it is. Returns within `PATIENCE_SECONDS`, whatever the engine does."""
        return self.known_unready() or await self._unanswered()

    def known_unready(self) -> str:
        """The same without asking the engine."""
        return self.dead() or (STOPPING if self._stopping.is_set() else self._watch.overdue())

    async def stuck(self) -> str:
        """Why the engine does not answer, whether the server stops or not; "" while it does."""
        return self.dead() or self._watch.overdue() or await self._unanswered()

    def dead(self) -> str:
        """Why nothing can be served until another process is started; "" otherwise."""
        health = self._client.health()
        return self._watch.lost() if health.alive else health.reason or "the engine is dead"

    async def _unanswered(self) -> str:
        """One message is on its way at a time; what it waits for counts from when it was sent, whoever asks again."""
        time = asyncio.get_running_loop().time
        if self._heartbeat is None or self._heartbeat.done():
            self._heartbeat = asyncio.ensure_future(self._client.heartbeat())
            self._heartbeat.add_done_callback(_note_failure)
            self._asked = time()
        heartbeat, deadline = self._heartbeat, self._asked + self._limit
        await asyncio.wait((heartbeat,), timeout=max(0.0, min(PATIENCE_SECONDS, deadline - time())))
        if heartbeat.done():
            return _failure(heartbeat)
        if time() < deadline or self._watch.began() <= self._asked + SAME_STEP_SECONDS:
            return ""
        return f"the engine has taken no message for {self._limit:g} seconds"


def _note_failure(heartbeat: asyncio.Task[None]) -> None:
    """See how it ended, as nobody may ask again: else asyncio logs an error that was never looked at."""
    if not heartbeat.cancelled():
        heartbeat.exception()


def _failure(heartbeat: asyncio.Task[None]) -> str:
    """Why an ended message failed; "" where it did not."""
    try:
        heartbeat.result()
    except EngineDead as dead:
        return str(dead)
    return ""
