"""Whether the server takes work now, and whether it ever will again.

The server is not ready while it stops, when a step takes far longer than similar steps, or when the engine has taken
no message for too long. Messages go through the same inbox and to the same thread as work, so an answered message
proves that work would be handled. The server is dead when only a new process can serve again; it should then be
restarted.
"""

from __future__ import annotations

import asyncio

from penstock.contract.errors import EngineDead
from penstock.contract.ports import EngineClient, StepWatch

__all__ = ["NoWatch", "Readiness"]

PATIENCE_SECONDS = 0.5
"""How long a probe waits for the engine: orchestrators wait a second by default."""

SAME_STEP_SECONDS = 1.0
"""A step that began within this time after a message may still have missed it: the engine reads messages before a step.
"""

STOPPING = "the server is shutting down"


class NoWatch:
    """Stands in for a `StepWatch` when nobody watches steps."""

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
    """Asks the engine whether it takes messages. Confined to one event loop; may be asked as often as wanted.

    Args:
        heartbeat_seconds: how long the engine may take to answer a message. A step that began before the message came,
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
        """Why the server takes no work; "" if it does. Returns within `PATIENCE_SECONDS`, whatever the engine does."""
        return self.known_unready() or await self._unanswered()

    def known_unready(self) -> str:
        """As `unready`, without asking the engine."""
        return self.dead() or (STOPPING if self._stopping.is_set() else self._watch.overdue())

    async def stuck(self) -> str:
        """Why the engine does not respond, whether the server is stopping or not; "" if it does."""
        return self.dead() or self._watch.overdue() or await self._unanswered()

    def dead(self) -> str:
        """Why nothing can be served until another process is started; "" otherwise."""
        health = self._client.health()
        return self._watch.lost() if health.alive else health.reason or "the engine is dead"

    async def _unanswered(self) -> str:
        """Why the engine answers no message; "" if it does, or still has time to.

        Only one message is in flight at a time; its time counts from when it was sent, however often this is called.
        """
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
    """Retrieve the exception, because nobody may ask again and asyncio would log it as never retrieved."""
    if not heartbeat.cancelled():
        heartbeat.exception()


def _failure(heartbeat: asyncio.Task[None]) -> str:
    """Why a finished message failed; "" if it did not."""
    try:
        heartbeat.result()
    except EngineDead as dead:
        return str(dead)
    return ""
