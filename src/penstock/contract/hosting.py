"""Several models behind one server: what the operator chose for each, and what each is doing."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from penstock.contract.adapter import adapter_option
from penstock.contract.config import EngineConfig
from penstock.contract.journal import AnswerJournal, Journal
from penstock.contract.memory_budget import MemoryBudget
from penstock.contract.model import ModelCard
from penstock.contract.ports import EngineClient, StepWatch

__all__ = ["HostLimits", "HostedModel", "ModelChoice", "ModelState", "ModelStatus", "Models", "ServedModel"]


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """What the operator chose for one model.

    Attributes:
        config: its engine's options.
        pinned: whether it is loaded at the start and never makes room for another.
        idle_seconds: how long it stays loaded without a request; 0 for as long as there is room.
    """

    config: EngineConfig
    pinned: bool = False
    idle_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class HostedModel:
    """One model that a server offers.

    Attributes:
        config: its engine's options.
        names: what clients call it, the main name first.
        path: where its files are.
        file_bytes: size of these.
        pinned: see `ModelChoice`.
        idle_seconds: see `ModelChoice`.
        any_name: whether it answers to every name that no other model has.
    """

    config: EngineConfig
    names: tuple[str, ...]
    path: Path = Path()
    file_bytes: int = 0
    pinned: bool = False
    idle_seconds: float = 0.0
    any_name: bool = False

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that it is first loaded with."""
        return tuple(adapter_option(each)[0] for each in self.config.lora)


@dataclass(frozen=True, slots=True)
class HostLimits:
    """How much may be loaded at once, and how long a request waits for its model.

    Attributes:
        most: models loaded at once; 0 for no limit.
        memory: bytes of weights, KV caches and recurrent state of all loaded models together; 0 for no limit.
        wait_seconds: how long a request waits for its model; it is then refused, and the model is still loaded. 0 for
            no limit.
    """

    most: int = 0
    memory: int = 0
    wait_seconds: float = 0.0


class ModelState(StrEnum):
    """What a model is doing."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A model at one moment.

    Attributes:
        requests: requests that it answers now.
        waiting: requests that wait until it is loaded.
        bytes: memory of its weights, KV cache and recurrent state; 0 while it is not loaded.
        max_model_len: maximum number of tokens of one request, as when it was loaded last; 0 if it never was.
        loads: how many times it was loaded.
        load_seconds: how long the last load took.
        reason: why the last load failed, or why the model was lost; "" otherwise.
        adapters: the names of its adapters; while it is not loaded, of the adapters that it will be loaded with.
    """

    model: HostedModel
    state: ModelState
    pinned: bool
    requests: int = 0
    waiting: int = 0
    bytes: int = 0
    max_model_len: int = 0
    loads: int = 0
    load_seconds: float = 0.0
    reason: str = ""
    adapters: tuple[str, ...] = ()


class ServedModel(Protocol):
    """A model that is loaded, and answers requests."""

    @property
    def client(self) -> EngineClient:
        """Its engine."""
        ...

    @property
    def card(self) -> ModelCard:
        """What callers may know about it."""
        ...

    @property
    def watch(self) -> StepWatch:
        """Says how long its current step has taken."""
        ...

    @property
    def streams(self) -> Journal | None:
        """Where its streams are written down; the same one whenever the model is loaded again."""
        ...

    @property
    def answers(self) -> AnswerJournal | None:
        """Where its stored answers are written down; the same one whenever the model is loaded again."""
        ...

    @property
    def memory(self) -> MemoryBudget:
        """The budget of what is kept for its clients; the same one whenever the model is loaded again."""
        ...


class Models(Protocol):
    """The models of one server, loaded or not; each is found by any of its names, or by the name of an adapter.

    Confined to one event loop.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """All names under which models and their adapters are listed."""
        ...

    def statuses(self) -> tuple[ModelStatus, ...]:
        """Every model at this moment, in the order in which they are listed."""
        ...

    def status(self, name: str) -> ModelStatus:
        """One model at this moment. Raises UnknownModel."""
        ...

    def present(self, name: str) -> ServedModel | None:
        """A model, if it is loaded. Raises UnknownModel."""
        ...

    def use(self, name: str) -> AbstractAsyncContextManager[ServedModel]:
        """Hold a model while a request is answered; it is loaded first if need be.

        Raises:
            UnknownModel: no model has this name.
            Unavailable: it is not loaded yet, or cannot be.
        """
        ...

    async def load(self, name: str) -> None:
        """Load a model, and wait until it is loaded. Raises as `use` does."""
        ...

    async def unload(self, name: str) -> None:
        """Unload a model once it has answered its present requests, and wait for that. Raises UnknownModel."""
        ...

    async def pin(self, name: str) -> None:
        """Load a model, and from now on do not unload it to make room. Raises as `use` does."""
        ...

    def unpin(self, name: str) -> None:
        """Allow a model to be unloaded again to make room for others. Raises UnknownModel."""
        ...
