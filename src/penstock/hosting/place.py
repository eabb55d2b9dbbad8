"""One model's place in a host: not loaded, coming, or loaded, and how many requests use it or wait for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from penstock.contract.hosting import HostedModel, ModelState, ModelStatus

__all__ = ["Coming", "Loaded", "LoadedT", "Place", "Stay"]


class Loaded(Protocol):
    """A model that can answer requests."""

    @property
    def bytes(self) -> int:
        """Memory of its weights, KV cache and recurrent state."""
        ...

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of one request."""
        ...

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of its adapters."""
        ...

    async def close(self) -> None:
        """End the model, and free its memory."""
        ...


LoadedT = TypeVar("LoadedT", bound=Loaded)


class Stay(Generic[LoadedT]):
    """A model while it is loaded.

    Attributes:
        users: number of requests that it answers, plus those that waited for it and have not begun yet.
        leaving: whether it takes no new request, because it is to be unloaded.
        last_used: when a request last began or ended, in seconds of the host's clock.
    """

    def __init__(self, loaded: LoadedT, users: int, now: float) -> None:
        self.loaded = loaded
        self.users = users
        self.leaving = False
        self.last_used = now
        self._unused = asyncio.Event()
        self._note()

    def enter(self, now: float) -> None:
        """Count a request that begins."""
        self.users += 1
        self.last_used = now
        self._note()

    def leave(self, now: float) -> None:
        """Count a request that has ended."""
        self.users -= 1
        self.last_used = now
        self._note()

    async def unused(self) -> None:
        """Wait until no request uses it."""
        await self._unused.wait()

    def _note(self) -> None:
        if self.users:
            self._unused.clear()
        else:
            self._unused.set()


class Coming(Generic[LoadedT]):
    """A model that is to be loaded.

    Attributes:
        waiting: number of requests that wait for it. They use it from when it is loaded, so that it cannot be unloaded
            first.
        task: loads it; set by the host.
    """

    task: asyncio.Task[Stay[LoadedT] | None]

    def __init__(self) -> None:
        self.waiting = 0
        self.stay: Stay[LoadedT] | None = None

    def give_up(self, now: float) -> None:
        """Note that a request waits no longer."""
        self.waiting -= 1
        if self.stay is not None:
            self.stay.leave(now)


@dataclass(slots=True, eq=False)
class Place(Generic[LoadedT]):
    """One model of a host, loaded or not; for fields not explained here see `ModelStatus`."""

    model: HostedModel
    pinned: bool
    stay: Stay[LoadedT] | None = None
    coming: Coming[LoadedT] | None = None
    loading: bool = False
    loads: int = 0
    load_seconds: float = 0.0
    size: int = 0
    max_model_len: int = 0
    reason: str = ""
    left_adapters: tuple[str, ...] = ()
    ending: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the model's adapters; while it is not loaded, those that it had last."""
        return self.left_adapters if self.stay is None else self.stay.loaded.adapters

    @property
    def state(self) -> ModelState:
        """What the model is doing."""
        if self.stay is not None:
            return ModelState.UNLOADING if self.stay.leaving else ModelState.LOADED
        return ModelState.LOADING if self.loading else ModelState.UNLOADED

    def status(self) -> ModelStatus:
        """The present status of the model."""
        return ModelStatus(
            model=self.model,
            state=self.state,
            pinned=self.pinned,
            requests=self.stay.users if self.stay is not None else 0,
            waiting=self.coming.waiting if self.coming is not None else 0,
            bytes=self.stay.loaded.bytes if self.stay is not None else 0,
            max_model_len=self.max_model_len,
            loads=self.loads,
            load_seconds=self.load_seconds,
            reason=self.reason,
            adapters=self.adapters,
        )
