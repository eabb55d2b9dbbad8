"""An engine in this process, behind the `EngineClient` port: what the HTTP server and `AsyncLLM` talk to.

Tokenising and rendering happen in worker threads, off the event loop; closing an iterator aborts its ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from penstock.contract.events import Output
from penstock.contract.measurements import Measurements
from penstock.contract.ports import Health, Tokenized
from penstock.contract.request import EngineRequest, Prompt
from penstock.engine.engine import Engine
from penstock.engine.intake import Intake, ResolvedRequest
from penstock.engine.loop import EngineLoop, Errand, Reader
from penstock.engine.mailbox import Mailbox

__all__ = ["LocalClient"]


def _do_nothing(_: Engine) -> None:
    """What a heartbeat has the engine do."""


class LocalClient:
    """Submits asks to an `EngineLoop` and streams what comes back. Usable from any event loop."""

    def __init__(self, intake: Intake, loop: EngineLoop) -> None:
        self._intake = intake
        self._loop = loop
        self._arriving: set[str] = set()  # asks that are being resolved, which the engine does not know yet
        self._left_early: set[str] = set()  # those of them that were aborted meanwhile

    async def generate(self, ask: EngineRequest) -> AsyncGenerator[Output, None]:
        """See `EngineClient.generate`."""
        self._arriving.add(ask.id)
        try:
            submission = await asyncio.to_thread(self._intake.resolve, ask)
        except BaseException:
            self._left_early.discard(ask.id)
            raise
        finally:
            self._arriving.discard(ask.id)
        async with aclosing(self.stream(submission)) as stream:
            async for outputs in stream:
                for output in outputs:
                    yield output

    async def stream(self, submission: ResolvedRequest) -> AsyncGenerator[list[Output], None]:
        """Submit and yield, each time, all that has come since the last."""
        mailbox = Mailbox()
        self._loop.submit(submission, Reader(mailbox, asyncio.get_running_loop()))
        if submission.id in self._left_early:
            self._left_early.discard(submission.id)
            self._loop.abort(submission.id)
        try:
            while not mailbox.drained:
                yield await mailbox.take()
        finally:
            if not mailbox.closed:
                self._loop.abort(submission.id)

    async def abort(self, ask_id: str) -> None:
        """See `EngineClient.abort`."""
        if ask_id in self._arriving:
            self._left_early.add(ask_id)
        else:
            self._loop.abort(ask_id)

    def health(self) -> Health:
        """See `EngineClient.health`."""
        return self._loop.health()

    def measurements(self) -> Measurements:
        """See `EngineClient.measurements`."""
        return self._loop.measurements()

    async def heartbeat(self) -> None:
        """See `EngineClient.heartbeat`."""
        await self._run(_do_nothing)

    async def reset_prefix_cache(self) -> None:
        """See `EngineClient.reset_prefix_cache`."""
        await self._run(Engine.reset_prefix_cache)

    async def tokenize(self, prompt: Prompt) -> Tokenized:
        """See `EngineClient.tokenize`."""
        return await asyncio.to_thread(self._intake.tokenize, prompt)

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        """See `EngineClient.detokenize`."""
        return await asyncio.to_thread(self._intake.detokenize, token_ids)

    async def _run(self, work: Callable[[Engine], None]) -> None:
        """Have the engine's thread do something between two steps, and wait for it."""
        event_loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = event_loop.create_future()
        self._loop.run_between_steps(Errand(work, done, event_loop))
        await done

    def close(self) -> None:
        """Stop the engine; live asks fail."""
        self._loop.stop()
