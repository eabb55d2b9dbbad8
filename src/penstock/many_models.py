"""A server of several models: who loads each, and what stands around all of them.

Beside `app`, the only place that starts a server. Each model is assembled as a server of one has it, its runner in a
process of its own; the HTTP front is one process for all.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from penstock.app import CLOSE_SECONDS, FORCED_SECONDS, Assembly, assemble, observers_of
from penstock.computing import start_computing
from penstock.contract.config import HostingConfig, ServerConfig
from penstock.contract.errors import ConfigError, PenstockError
from penstock.contract.hosting import HostedModel, HostLimits, ModelChoice
from penstock.contract.limits import DEFAULT_LIMITS
from penstock.contract.memory_budget import LEAST_BYTES, MemoryBudget
from penstock.contract.model import ModelCard
from penstock.engine import LocalClient
from penstock.freed_memory import give_back
from penstock.hosting import ModelHost
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


def hosted_models(choices: Sequence[ModelChoice], cache_dir: Path) -> list[HostedModel]:
    """Find every model, download those that are not on disk, and name them.

    Raises:
        SetupError: there is no such model, or two have the same name.
    """
    found = []
    for choice in choices:
        path = pull(choice.config.model, cache_dir, show_progress=True)
        if choice.config.draft_model:
            pull(choice.config.draft_model, cache_dir, show_progress=True)
        names = choice.config.served_model_name or (default_name(path),)
        found.append(HostedModel(choice.config, names, _size(path), choice.pinned, choice.idle_seconds))
    counts = Counter(name for each in found for name in each.names)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise ConfigError("served_model_name", f"two models would be called {twice[0]!r}; give one another name")
    return found


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return sum(each.stat().st_size for each in files)


class _Loader:
    """Loads models for a host; what is kept for a model's clients stays within one budget, however often it loads."""

    def __init__(self, cache_dir: Path, announce: Callable[[str], None], share: int, *, tenants: bool) -> None:
        self._cache_dir = cache_dir
        self._announce = announce
        self._share = share
        self._tenants = tenants
        self._budgets: dict[str, MemoryBudget] = {}

    async def __call__(self, model: HostedModel, lost: Callable[[str], None]) -> LoadedModel:
        """Load a model in a thread."""
        budget = self._budgets.setdefault(model.names[0], MemoryBudget(self._share, give_back))
        return await asyncio.to_thread(self._load, model, lost, budget)

    def _load(self, model: HostedModel, lost: Callable[[str], None], budget: MemoryBudget) -> LoadedModel:
        name, watchdog = model.names[0], Watchdog()
        starting = start_computing(model.config, self._cache_dir, serves=True)
        assembly = assemble(
            replace(model.config, served_model_name=model.names),
            self._cache_dir,
            lambda line: self._announce(f"{name}: {line}"),
            starting,
            watchdog,
            tenants=self._tenants,
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
    on_ready: Callable[[str, str], None] = lambda url, model: None,  # noqa: ARG005
) -> None:
    """Serve several models over HTTP until the process is asked to end.

    Args:
        choices: the models, in the order in which they are listed; requests that name none are the first one's.
        hosting: how much may be loaded at once.
        server_options: the HTTP side.
        cache_dir: where downloaded models are kept.
        announce: called with each line of the start report.
        on_ready: called with the URL and the models' names once connections are accepted.

    Raises:
        SetupError: a model, an option or the address cannot be used.
    """
    from penstock import server  # users of the library do not need the HTTP stack

    for name in _ONE_MODEL_ONLY:
        if getattr(server_options, name):
            raise ConfigError(name, "is for a server of one model; leave it out, or serve that model alone")
    models = hosted_models(choices, cache_dir)
    access = server.open_access(server_options, os.environ)
    server.configure_logging(server_options.log_format)
    notifier, end, last_resort = server.open_notifier(os.environ), server.End(), server.LastResort()

    def say(line: str) -> None:
        with server.unread_is_fine(sys.stdout):
            announce(line)
        notifier.status(line)

    limit = max(each.config.memory_limit for each in models)
    memory = MemoryBudget(limit, give_back)
    share = max(LEAST_BYTES, memory.limit // len(models))
    load = _Loader(cache_dir, say, share, tenants=bool(access.keys))
    host = ModelHost(models, load, HostLimits(hosting.max_loaded_models, hosting.models_memory, hosting.model_wait))

    def ready(url: str) -> None:
        say(f"listening {url} (POST {url}/v1/chat/completions), models {', '.join(host.names)}")
        on_ready(url, ", ".join(model.names[0] for model in models))

    failures: list[PenstockError] = []

    @asynccontextmanager
    async def around() -> AsyncGenerator[None]:
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(host.running())
            except PenstockError as error:  # a pinned model cannot be loaded
                failures.append(error)
                end.now()
            yield
            last_resort.within(CLOSE_SECONDS)

    with observers_of(server_options, "") as observers:
        server.run(
            server.create_many_app(host, around(), DEFAULT_LIMITS, access, memory, observers),
            server_options,
            on_ready=ready,
            drain_seconds=server_options.drain_timeout,
            end=end,
            on_force=partial(last_resort.within, FORCED_SECONDS),
            notifier=notifier,
        )
    last_resort.cancel()
    if failures:
        raise failures[0].__cause__ or failures[0]
