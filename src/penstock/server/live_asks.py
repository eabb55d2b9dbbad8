"""The engine as the routes see it: a client that knows which asks are live, whose they are, and how long they may take.

Decides that a request ends when its time is up, and who may abort what. Invariant: an ask is listed here exactly while
its outputs are being read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol, runtime_checkable

from penstock.contract.events import Output
from penstock.contract.measurements import Measurements
from penstock.contract.ports import EngineClient, Health, Tokenized
from penstock.contract.request import EngineRequest, Prompt
from penstock.server.failures import RequestTimedOut

__all__ = ["LiveAsks"]


@runtime_checkable
class _Closable(Protocol):
    async def aclose(self) -> None: ...


class _Time:
    """How long an ask may still be waited for: as `asyncio.timeout_at`, but one timer for all of its outputs.

    The task that waits when the time is up is cancelled; between two outputs the reader has the turn, and must not be.
    """

    def __init__(self, seconds: float) -> None:
        self.up = False
        self._waiting: asyncio.Task[object] | None = None
        self._cancelled: asyncio.Task[object] | None = None
        self._timer = asyncio.get_running_loop().call_later(seconds, self._end) if seconds else None

    def begin(self) -> None:
        """The present task is about to wait."""
        self._waiting = asyncio.current_task()

    def pause(self) -> None:
        """It has its output."""
        self._waiting = None

    def take_back(self) -> bool:
        """Whether the present task's cancellation was this timer's alone; then it is undone."""
        return self._cancelled is not None and self._cancelled.uncancel() == 0

    def stop(self) -> None:
        """Nobody waits any more."""
        self._waiting = None
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        self.up = True
        if self._waiting is not None:
            self._cancelled = self._waiting
            self._waiting.cancel()


class LiveAsks:
    """An `EngineClient` around another one. Confined to one event loop.

    Args:
        seconds: how long an ask may take; 0 for any time.
    """

    def __init__(self, client: EngineClient, seconds: float) -> None:
        self._client = client
        self._seconds = seconds
        self._tenants: dict[str, str] = {}

    async def generate(self, ask: EngineRequest) -> AsyncGenerator[Output, None]:
        """See `EngineClient.generate`.

        Raises:
            RequestTimedOut: its time is up; it has been aborted.
        """
        time = _Time(self._seconds)
        self._tenants[ask.id] = ask.tenant
        outputs = self._client.generate(ask)
        try:
            while not time.up:
                time.begin()
                output = await anext(outputs, None)
                time.pause()
                if output is None:
                    return
                yield output
            raise RequestTimedOut(self._seconds)
        except asyncio.CancelledError:
            if time.take_back():
                raise RequestTimedOut(self._seconds) from None
            raise
        finally:
            time.stop()
            del self._tenants[ask.id]
            await self._close(ask, outputs)

    async def abort(self, ask_id: str) -> None:
        """See `EngineClient.abort`."""
        await self._client.abort(ask_id)

    async def abort_answer(self, answer_id: str, tenant: str) -> bool:
        """End every ask of an answer that belongs to `tenant` ("" where there are no keys); whether there was one."""
        found = [
            ask_id
            for ask_id, owner in self._tenants.items()
            if (ask_id == answer_id or ask_id.startswith(answer_id + "-")) and tenant in ("", owner)
        ]
        for ask_id in found:
            await self._client.abort(ask_id)
        return bool(found)

    def health(self) -> Health:
        """See `EngineClient.health`."""
        return self._client.health()

    def measurements(self) -> Measurements:
        """See `EngineClient.measurements`."""
        return self._client.measurements()

    async def heartbeat(self) -> None:
        """See `EngineClient.heartbeat`."""
        await self._client.heartbeat()

    async def reset_prefix_cache(self) -> None:
        """See `EngineClient.reset_prefix_cache`."""
        await self._client.reset_prefix_cache()

    async def tokenize(self, prompt: Prompt) -> Tokenized:
        """See `EngineClient.tokenize`."""
        return await self._client.tokenize(prompt)

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        """See `EngineClient.detokenize`."""
        return await self._client.detokenize(token_ids)

    async def _close(self, ask: EngineRequest, outputs: AsyncIterator[Output]) -> None:
        if isinstance(outputs, _Closable):
            await outputs.aclose()
        else:
            await self._client.abort(ask.id)
