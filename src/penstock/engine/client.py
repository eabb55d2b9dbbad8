"""An engine in this process, behind the `EngineClient` port: what the HTTP server and `AsyncLLM` talk to.

Tokenising and rendering happen in worker threads, off the event loop. Closing an iterator aborts its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

from penstock.contract.adapter import AdapterFacts
from penstock.contract.engine_views import PrefixTree, RecentSteps, TenantShare
from penstock.contract.errors import InvalidParameter, RequestError, SetupError
from penstock.contract.events import Output
from penstock.contract.measurements import Measurements
from penstock.contract.ports import Health, Tokenized
from penstock.contract.request import EngineRequest, Prompt
from penstock.core.block_uses import CachedBlocks, prefix_tree
from penstock.engine.adapter_folder import AdapterFolder
from penstock.engine.answer_cache import CachedAnswers
from penstock.engine.engine import Engine
from penstock.engine.intake import Intake, ResolvedRequest
from penstock.engine.intake_threads import IntakeThreads
from penstock.engine.loop import EngineCall, EngineLoop, Reader
from penstock.engine.output_queue import OutputQueue, WaitingRoom
from penstock.engine.profile import Profile, Profiles
from penstock.engine.recent_steps import KeptSteps, told

__all__ = ["LocalClient"]


def _do_nothing(_: Engine) -> None:
    """The work of a heartbeat."""


def _set(event_loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set an event from the engine's thread; if its loop is closed, nobody waits for the event."""
    with suppress(RuntimeError):
        event_loop.call_soon_threadsafe(event.set)


class LocalClient:
    """Submits requests to an `EngineLoop` and streams their outputs. Usable from any event loop.

    Args:
        intake: resolves requests.
        loop: runs the engine.
        profiles: where profiles are written; None if they are not allowed.
        room: bounds the unread outputs; all readers must then be on one event loop. None for no bound.
        adapters: the folder that adapters may be loaded from; None if requests may not load any.
        answers: where `generate` keeps and finds answers; None for no answer cache.
    """

    def __init__(
        self,
        intake: Intake,
        loop: EngineLoop,
        profiles: Profiles | None = None,
        room: WaitingRoom | None = None,
        adapters: AdapterFolder | None = None,
        answers: CachedAnswers | None = None,
    ) -> None:
        self._answers = answers
        self._adapter_folder = adapters
        self._intake = IntakeThreads(intake)
        self._loop = loop
        self._profiles = profiles
        self._room = room

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Output, None]:
        """See `EngineClient.generate`."""
        resolved = await self._intake.resolve(request)
        lookup = None if self._answers is None else self._answers.look_up(request, resolved)
        if lookup is not None:
            yield lookup.told()
            if lookup.hit:
                self._intake.take_abort(request.id)  # it ends here, aborted meanwhile or not
                for piece in lookup.pieces():
                    for output in piece:
                        yield output
                    await asyncio.sleep(0)  # let other tasks use the event loop
                return
        queue = self._submit(resolved)
        try:
            while not queue.drained:
                for output in await queue.take():
                    if lookup is not None:
                        lookup.note(output)
                    yield output
        finally:
            queue.leave()
            if not queue.closed:
                self._loop.abort(request.id)

    async def stream(self, resolved: ResolvedRequest) -> AsyncGenerator[list[Output], None]:
        """Submit a resolved request; yields all outputs that arrived since the last yield."""
        queue = self._submit(resolved)
        try:
            while not queue.drained:
                yield await queue.take()
        finally:
            queue.leave()
            if not queue.closed:
                self._loop.abort(resolved.id)

    async def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`."""
        if not self._intake.note_abort(request_id):
            self._loop.abort(request_id)

    def _submit(self, resolved: ResolvedRequest) -> OutputQueue:
        aborted = self._intake.take_abort(resolved.id)
        queue = OutputQueue(self._room, partial(self._loop.abort, resolved.id))
        self._loop.submit(resolved, Reader(queue, asyncio.get_running_loop()))
        if aborted:
            self._loop.abort(resolved.id)
        return queue

    def check_queue(self, tenant: str) -> None:
        """See `EngineClient.check_queue`."""
        self._loop.check_queue(tenant)

    def health(self) -> Health:
        """See `EngineClient.health`."""
        return self._loop.health()

    def measurements(self) -> Measurements:
        """See `EngineClient.measurements`."""
        measured = self._loop.measurements()
        return measured if self._answers is None else replace(measured, answer_cache=self._answers.use())

    async def heartbeat(self) -> None:
        """See `EngineClient.heartbeat`."""
        await self._run(_do_nothing)

    async def reset_prefix_cache(self) -> None:
        """See `EngineClient.reset_prefix_cache`."""
        await self._run(Engine.reset_prefix_cache)

    def adapters(self) -> Mapping[str, AdapterFacts]:
        """See `EngineClient.adapters`."""
        return self._loop.adapters()

    async def load_adapter(self, name: str, path: str) -> AdapterFacts:
        """See `EngineClient.load_adapter`."""
        if self._adapter_folder is None:
            message = "There is no folder for adapters; start the server with --lora-dir DIRECTORY."
            raise RequestError(message, code="adapters_off")
        loaded: list[AdapterFacts] = []
        found = self._adapter_folder.find(path)
        try:
            await self._run(lambda engine: loaded.append(engine.load_adapter(name, found)))
        except SetupError as error:
            raise InvalidParameter("lora_path", str(error)) from error
        return loaded[0]

    async def unload_adapter(self, name: str) -> None:
        """See `EngineClient.unload_adapter`."""
        event_loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        await self._run(lambda engine: engine.unload_adapter(name, partial(_set, event_loop, gone)))
        await gone.wait()

    async def start_profile(self) -> None:
        """See `EngineClient.start_profile`."""
        if self._profiles is None:
            message = "There is no folder for profiles; start the server with --profile-dir DIRECTORY."
            raise RequestError(message, code="profiling_off")
        profile = self._profiles.new()
        await self._run(lambda engine: engine.start_profile(profile))

    async def stop_profile(self) -> tuple[str, ...]:
        """See `EngineClient.stop_profile`."""
        stopped: list[Profile] = []
        await self._run(lambda engine: stopped.append(engine.stop_profile()))
        return await asyncio.to_thread(stopped[0].write)

    async def tokenize(self, prompt: Prompt, tenant: str = "") -> Tokenized:
        """See `EngineClient.tokenize`."""
        return await self._intake.tokenize(prompt, tenant)

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        """See `EngineClient.detokenize`."""
        return await self._intake.detokenize(token_ids)

    async def recent_steps(self, after: int = -1, requests: frozenset[str] = frozenset()) -> RecentSteps:
        """See `EngineViews.recent_steps`."""
        kept: list[KeptSteps] = []
        await self._run(lambda engine: kept.append(engine.recent_steps.snapshot()))
        return await asyncio.to_thread(told, kept[0], after, requests)

    async def cached_prefixes(self) -> PrefixTree:
        """See `EngineViews.cached_prefixes`."""
        blocks: list[CachedBlocks] = []
        await self._run(lambda engine: blocks.append(engine.scheduler.cached_blocks()))
        return await asyncio.to_thread(prefix_tree, blocks[0])

    async def tenant_shares(self) -> tuple[TenantShare, ...]:
        """See `EngineViews.tenant_shares`."""
        shares: list[tuple[TenantShare, ...]] = []
        await self._run(lambda engine: shares.append(engine.tenant_shares()))
        return shares[0]

    async def waiting_seconds(self) -> tuple[float, float]:
        """How long a request that came now would wait: until all accepted prompts are read, and until it is started.

        Raises:
            EngineDead: the engine is dead.
        """
        found: list[tuple[float, float]] = []
        await self._run(lambda _: found.append(self._loop.waiting_seconds()))
        return found[0]

    async def _run(self, work: Callable[[Engine], None]) -> None:
        """Run `work` on the engine's thread between two steps, and wait for it."""
        event_loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = event_loop.create_future()
        self._loop.run_between_steps(EngineCall(work, done, event_loop))
        await done

    def close(self) -> None:
        """Stop the engine; live requests fail."""
        self._loop.stop()
        self._intake.close()
