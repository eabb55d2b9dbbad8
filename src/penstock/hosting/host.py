"""Decides which of several models are loaded: each from its first request on, within limits on number and memory.

A model that needs room takes the room of the least recently used model: of an idle one if there is any, else of a busy
one, which then takes no new requests and is unloaded when it has answered its present ones. Pinned models keep their
room. Models are loaded and unloaded one at a time, in the order in which this was asked for.

Invariants: a request that has been given a model keeps it until it ends; a model that was loaded for a request answers
that request before it is unloaded. Confined to one event loop. Knows neither HTTP nor how a model is loaded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Generic

from penstock.contract.errors import PenstockError, UnknownModel
from penstock.contract.hosting import HostedModel, HostLimits, ModelStatus
from penstock.hosting.failures import HostClosed, ModelCannotLoad, ModelIsComing, NoRoomForModel
from penstock.hosting.place import Coming, LoadedT, Place, Stay

__all__ = ["ModelHost"]

log = logging.getLogger("penstock.server")

_LOOK_SECONDS = 1.0
"""How often the host looks for models that were idle for too long."""


class ModelHost(Generic[LoadedT]):
    """The models of one server; see the module.

    Args:
        models: the models in the order in which they are listed; no two share a name.
        load: loads a model. Gets a function to call, from any thread, with the reason why the model can answer no more.
        limits: how much may be loaded at once.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        models: Sequence[HostedModel],
        load: Callable[[HostedModel, Callable[[str], None]], Awaitable[LoadedT]],
        limits: HostLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._places = [Place[LoadedT](model, model.pinned, left_adapters=model.adapters) for model in models]
        self._by_name = {name: place for place in self._places for name in place.model.names}
        self._of_any_name = next((place for place in self._places if place.model.any_name), None)
        self._load = load
        self._limits = limits
        self._clock = clock
        self._moving = asyncio.Lock()
        self._closed = False

    @property
    def names(self) -> tuple[str, ...]:
        """All names under which models and their adapters are listed."""
        return (*self._by_name, *(name for place in self._places for name in place.adapters))

    def statuses(self) -> tuple[ModelStatus, ...]:
        """The present status of every model, in the order in which the models were given."""
        return tuple(place.status() for place in self._places)

    def status(self, name: str) -> ModelStatus:
        """The present status of one model.

        Raises:
            UnknownModel: no model has this name.
        """
        return self._find(name).status()

    def present(self, name: str) -> LoadedT | None:
        """A model if it is loaded, else None.

        Raises:
            UnknownModel: no model has this name.
        """
        stay = self._find(name).stay
        return stay.loaded if stay is not None else None

    @asynccontextmanager
    async def use(self, name: str) -> AsyncGenerator[LoadedT]:
        """Hold a model while a request is answered; it is loaded first if need be.

        Raises:
            UnknownModel: no model has this name.
            ModelIsComing: the model was not loaded in time; loading goes on.
            ModelCannotLoad: the model cannot be loaded.
            NoRoomForModel: pinned models and the limits leave no room.
        """
        stay = await self._enter(self._find(name), self._limits.wait_seconds)
        try:
            yield stay.loaded
        finally:
            stay.leave(self._clock())

    async def load(self, name: str) -> None:
        """Have a model loaded, and wait as long as that takes. Raises as `use` does."""
        stay = await self._enter(self._find(name), 0.0)
        stay.leave(self._clock())

    async def unload(self, name: str) -> None:
        """Unpin a model, unload it when it has answered its present requests, and wait for that.

        Raises:
            UnknownModel: no model has this name.
        """
        place = self._find(name)
        place.pinned = False
        stay = place.stay
        if stay is not None:
            stay.leaving = True
            await stay.unused()  # before taking the lock, so that others may be loaded meanwhile
        async with self._moving:
            if place.stay is not None and place.stay.leaving:
                await self._leave(place)

    async def pin(self, name: str) -> None:
        """Load a model, and have it keep its room from now on. Raises as `use` does."""
        await self.load(name)
        self._find(name).pinned = True

    def unpin(self, name: str) -> None:
        """Let a model make room for others again.

        Raises:
            UnknownModel: no model has this name.
        """
        self._find(name).pinned = False

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Load pinned models, and inside unload models that are idle for too long; at the end unload all.

        Raises:
            PenstockError: a pinned model cannot be loaded.
        """
        looking = asyncio.create_task(self._look())
        try:
            for place in self._places:
                if place.pinned:
                    await self.load(place.model.names[0])
            yield
        finally:
            looking.cancel()
            await self._close()

    def _find(self, name: str) -> Place[LoadedT]:
        place = self._by_name.get(name)
        if place is None:
            place = next((each for each in self._places if name in each.adapters), self._of_any_name)
        if place is None:
            raise UnknownModel(name, *self.names)
        return place

    async def _enter(self, place: Place[LoadedT], seconds: float) -> Stay[LoadedT]:
        """Begin a request of this model as soon as it is loaded, at most `seconds` later; 0 for no limit."""
        try:
            async with asyncio.timeout(seconds or None):
                if place.stay is None or place.stay.leaving:
                    return await self._wait(place)
        except TimeoutError:
            raise ModelIsComing(place.model.names[0]) from None
        place.stay.enter(self._clock())
        return place.stay

    async def _wait(self, place: Place[LoadedT]) -> Stay[LoadedT]:
        """Wait until a model has been loaded, which then counts this request among its users."""
        coming = place.coming
        if coming is None:
            coming = place.coming = Coming()
            coming.task = asyncio.create_task(self._bring(place, coming))
            coming.task.add_done_callback(_look_at)
        coming.waiting += 1
        try:
            stay = await asyncio.shield(coming.task)
        except BaseException:
            coming.give_up(self._clock())
            raise
        if stay is None:  # loading was dropped since all requests had given up; this one came after
            return await self._wait(place)
        return stay

    async def _bring(self, place: Place[LoadedT], coming: Coming[LoadedT]) -> Stay[LoadedT] | None:
        """Load a model in its turn; None if no request waits for it any more."""
        try:
            async with self._moving:
                if self._closed:
                    raise HostClosed
                if not coming.waiting:
                    return None
                await self._leave(place)  # ends its earlier stay, which takes no new requests
                await self._make_room(place)
                if not coming.waiting:  # all that waited gave up while other models finished
                    return None
                loaded = await self._load_now(place)
                coming.stay = place.stay = Stay(loaded, coming.waiting, self._clock())
                self._keep_within_memory(place)
                return coming.stay
        finally:
            place.coming = None

    async def _load_now(self, place: Place[LoadedT]) -> LoadedT:
        name = place.model.names[0]
        began, place.loading = self._clock(), True
        number, event_loop = place.loads + 1, asyncio.get_running_loop()

        def lost(reason: str) -> None:
            event_loop.call_soon_threadsafe(self._lost, place, number, reason)

        try:
            loaded = await self._load(place.model, lost)
        except PenstockError as error:
            place.reason = str(error)
            log.error("model %s cannot be loaded: %s", name, error)
            raise ModelCannotLoad(name) from error
        finally:
            place.loading = False
        place.loads, place.load_seconds, place.reason = number, self._clock() - began, ""
        place.size, place.max_model_len = loaded.bytes, loaded.max_model_len
        log.info("model %s is loaded, after %.1f s", name, place.load_seconds)
        return loaded

    async def _make_room(self, place: Place[LoadedT]) -> None:
        """Unload others until this model fits."""
        wanted = place.size or place.model.file_bytes
        while not self._fits(wanted):
            other = self._next_to_leave(place)
            if other is None:
                raise NoRoomForModel(place.model.names[0])
            await self._leave(other)

    def _keep_within_memory(self, place: Place[LoadedT]) -> None:
        """Have other models unloaded if this one takes more memory than expected."""
        excess = sum(loaded.bytes for loaded in self._loaded()) - self._limits.memory
        while self._limits.memory and excess > 0 and (other := self._next_to_leave(place, leaving=False)) is not None:
            assert other.stay is not None, "it is loaded"
            excess -= other.stay.loaded.bytes
            other.stay.leaving = True
            self._end(other)

    def _fits(self, size: int) -> bool:
        """Whether one more model of this size may be loaded."""
        limits = self._limits
        taken = sum(loaded.bytes for loaded in self._loaded())
        few_enough = not limits.most or len(self._loaded()) < limits.most
        return few_enough and (not limits.memory or taken + size <= limits.memory)

    def _loaded(self) -> list[LoadedT]:
        """The models that are loaded now, including those that are about to be unloaded."""
        return [place.stay.loaded for place in self._places if place.stay is not None]

    def _next_to_leave(self, newcomer: Place[LoadedT], *, leaving: bool = True) -> Place[LoadedT] | None:
        """The model to unload for `newcomer`; with `leaving`, it may be one that is about to be unloaded anyway."""
        stays = [
            (bool(place.stay.users), place.stay.last_used, index)
            for index, place in enumerate(self._places)
            if place.stay is not None
            and not place.pinned
            and place is not newcomer
            and (leaving or not place.stay.leaving)
        ]
        return self._places[min(stays)[2]] if stays else None

    async def _leave(self, place: Place[LoadedT]) -> None:
        """Unload a model, if it is loaded, as soon as it is idle. The caller holds `_moving`."""
        stay = place.stay
        if stay is None:
            return
        stay.leaving = True
        await stay.unused()
        place.left_adapters = stay.loaded.adapters
        await stay.loaded.close()
        place.stay = None
        log.info("model %s is unloaded", place.model.names[0])

    def _lost(self, place: Place[LoadedT], number: int, reason: str) -> None:
        """Unload a model that cannot answer any more; the next request loads it again."""
        if place.stay is None or place.loads != number:
            return
        place.reason, place.stay.leaving = reason, True
        log.error("model %s is lost: %s", place.model.names[0], reason)
        self._end(place)

    def _end(self, place: Place[LoadedT]) -> None:
        """Start to unload a model that takes no new requests."""

        async def leave() -> None:
            async with self._moving:
                if place.stay is not None and place.stay.leaving:
                    await self._leave(place)

        task = asyncio.create_task(leave())
        place.ending.add(task)
        task.add_done_callback(place.ending.discard)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self.unload_idle()

    def unload_idle(self) -> None:
        """Begin to unload every model that has been idle for longer than its limit."""
        for place in self._places:
            idle, stay = place.model.idle_seconds, place.stay
            if stay is None or stay.leaving or stay.users or place.pinned or not idle:
                continue
            if self._clock() - stay.last_used >= idle:
                stay.leaving = True
                self._end(place)

    async def _close(self) -> None:
        """Unload all models, whatever they are doing."""
        self._closed = True
        for place in self._places:
            if place.coming is not None and not place.loading:
                place.coming.task.cancel()
        async with self._moving:
            for place in self._places:
                if place.stay is not None:
                    stay, place.stay = place.stay, None
                    await stay.loaded.close()


def _look_at(task: asyncio.Task[object]) -> None:
    """Retrieve a task's exception, so that asyncio does not log it if no request waits for the task any more."""
    if not task.cancelled():
        task.exception()
