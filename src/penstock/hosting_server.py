"""A server of several models: finds and names them, loads each for the host, and serves them.

Each model is assembled as a server of one model has it, its runner in a process of its own; the HTTP front is one
process for all.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.app import Assembly, assemble
from penstock.computing import open_nursery, start_computing
from penstock.contract.config import ANY_NAME, HostingConfig, ServerConfig
from penstock.contract.errors import ConfigError, PenstockError
from penstock.contract.hosting import HostedModel, HostLimits, ModelChoice
from penstock.contract.limits import DEFAULT_LIMITS
from penstock.contract.memory_budget import LEAST_BYTES, MemoryBudget
from penstock.contract.model import ModelCard
from penstock.engine import LocalClient
from penstock.freed_memory import give_back
from penstock.hosting import ModelHost
from penstock.server import create_hosting_app
from penstock.server_process import ServerProcess
from penstock.watchdog import Watchdog
from penstock.weights.locate import default_name
from penstock.weights.pull import pull

__all__ = ["hosted_models", "serve_models"]

_ONE_MODEL_ONLY = ("journal", "profile_dir")
"""Options of a server that are for one model."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that answers; see `contract.hosting.ServedModel`."""

    client: LocalClient
    card: ModelCard
    watch: Watchdog
    memory: MemoryBudget
    assembly: Assembly
    around: ExitStack

    @property
    def bytes(self) -> int:
        """Memory of its weights, KV cache and recurrent state."""
        report = self.assembly.computing.facts.memory
        return report.weight_bytes + report.kv_bytes + report.state_bytes + report.draft_bytes

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of one request."""
        return self.card.max_model_len

    async def close(self) -> None:
        """End its engine and its process, and free its memory."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self.client.close()
        self.assembly.close()
        self.around.close()
        give_back()


def hosted_models(choices: Sequence[ModelChoice], pins: Sequence[str], cache_dir: Path) -> list[HostedModel]:
    """Find every model, download those that are not on disk, and name them.

    Args:
        choices: the models.
        pins: those that are pinned beside the choices that say so, by any name, or as they were chosen.
        cache_dir: where downloaded models are kept.

    Raises:
        SetupError: there is no such model, two have the same name or address for KV events, or a pinned one is none
            of them.
    """
    found = []
    for choice in choices:
        config = choice.config
        if config.most_adapters:
            raise ConfigError("lora", "adapters are for a server of one model; serve that model alone")
        path = pull(config.model, cache_dir, show_progress=True)
        if config.draft_model:
            pull(config.draft_model, cache_dir, show_progress=True)
        names = tuple(name for name in config.served_model_name if name != ANY_NAME) or (default_name(path),)
        any_name = ANY_NAME in config.served_model_name
        pinned = choice.pinned or not {*names, config.model}.isdisjoint(pins)
        found.append(
            HostedModel(
                replace(config, served_model_name=(*names, *([ANY_NAME] if any_name else []))),
                names,
                path,
                _size(path),
                pinned=pinned,
                idle_seconds=choice.idle_seconds,
                any_name=any_name,
            )
        )
    _check_names(found, pins)
    _check_addresses(found)
    return found


def _check_names(models: Sequence[HostedModel], pins: Sequence[str]) -> None:
    counts = Counter(name for each in models for name in each.names)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise ConfigError("served_model_name", f"two models would be called {twice[0]!r}; give one another name")
    if sum(each.any_name for each in models) > 1:
        raise ConfigError("served_model_name", f"two models would answer to any name ({ANY_NAME})")
    missing = [pin for pin in pins if not any(pin in (*each.names, each.config.model) for each in models)]
    if missing:
        raise ConfigError("pin", f"{missing[0]!r} is none of the models: {', '.join(counts)}")


def _check_addresses(models: Sequence[HostedModel]) -> None:
    """Make sure that no two models publish KV events on one address: the second of them could never be loaded."""
    addresses = [each for model in models for each in (model.config.kv_events, model.config.kv_events_replay) if each]
    twice = [each for each, count in Counter(addresses).items() if count > 1 and not each.endswith(":0")]
    if twice:
        raise ConfigError("kv_events", f"two models would listen on {twice[0]}; give one another address")


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return sum(each.stat().st_size for each in files)


class _Loader:
    """Loads models for a host. A model's clients share one budget, which stays when the model leaves.

    Args:
        cache_dir: where downloaded models are kept.
        process: says what is loaded.
        share: bytes of a model's budget.
        standby: whether a zygote stands by, of which the processes of all models are forked.
    """

    def __init__(self, cache_dir: Path, process: ServerProcess, share: int, *, standby: bool) -> None:
        self._nursery = open_nursery() if standby else None
        self._cache_dir = cache_dir
        self._process = process
        self._share = share
        self._budgets: dict[str, MemoryBudget] = {}

    def close(self) -> None:
        """End the zygote, once no model is loaded any more."""
        if self._nursery is not None:
            self._nursery.close()

    async def __call__(self, model: HostedModel, lost: Callable[[str], None]) -> LoadedModel:
        """Load a model in a thread."""
        budget = self._budgets.setdefault(model.names[0], MemoryBudget(self._share, give_back))
        return await asyncio.to_thread(self._load, model, lost, budget)

    def _load(self, model: HostedModel, lost: Callable[[str], None], budget: MemoryBudget) -> LoadedModel:
        watchdog = Watchdog()
        nursery = self._nursery if model.config.standby else None
        starting = start_computing(model.config, self._cache_dir, serves=True, nursery=nursery)
        assembly = assemble(
            model.config,
            self._cache_dir,
            lambda line: self._process.say(f"{model.names[0]}: {line}"),
            starting,
            watchdog,
            tenants=bool(self._process.access.keys),
        )
        around = ExitStack()
        around.enter_context(watchdog.looking())
        client = assembly.start_client(None, lambda: lost("its engine has ended"), budget)
        return LoadedModel(client, assembly.card, watchdog, budget, assembly, around)


def serve_models(
    choices: Sequence[ModelChoice],
    hosting: HostingConfig,
    server_options: ServerConfig,
    cache_dir: Path,
    announce: Callable[[str], None],
    on_ready: Callable[[str, Sequence[HostedModel]], None] = lambda url, models: None,  # noqa: ARG005
) -> None:
    """Serve several models over HTTP until the process is asked to end.

    Args:
        choices: the models, in the order in which they are listed; requests that name none are the first one's.
        hosting: how much may be loaded at once.
        server_options: the HTTP side.
        cache_dir: where downloaded models are kept.
        announce: called with each line of the start report.
        on_ready: called with the URL and the models once connections are accepted.

    Raises:
        SetupError: a model, an option or the address cannot be used.
    """
    for name in _ONE_MODEL_ONLY:
        if getattr(server_options, name):
            raise ConfigError(name, "is for a server of one model; leave it out, or serve that model alone")
    models = hosted_models(choices, hosting.pin, cache_dir)
    process = ServerProcess(server_options, announce)
    # Of the limit a quarter is for requests that are read, before their model is known; a model's share has as much
    # for them, which it does not use: together that is the limit.
    memory = MemoryBudget(choices[0].config.memory_limit, give_back)
    share, standby = max(LEAST_BYTES, memory.limit // len(models)), any(each.config.standby for each in models)
    load = _Loader(cache_dir, process, share, standby=standby)
    host = ModelHost(models, load, HostLimits(hosting.max_loaded_models, hosting.models_memory, hosting.model_wait))
    failures: list[PenstockError] = []

    @asynccontextmanager
    async def around() -> AsyncGenerator[None]:
        """Models come and go. A failure is kept to be raised by `serve_models`: uvicorn would log it as its own."""
        stack = AsyncExitStack()
        try:
            await stack.enter_async_context(host.running())
        except PenstockError as error:  # a pinned model cannot be loaded
            failures.append(error)
            process.end()
        yield
        with process.closing():
            await stack.aclose()

    with closing(load), process.observers("") as observers:
        app = create_hosting_app(host, around(), DEFAULT_LIMITS, process.access, memory, observers)
        process.run(app, "/v1/chat/completions", lambda url: on_ready(url, models))
    if failures:
        raise failures[0].__cause__ or failures[0]
