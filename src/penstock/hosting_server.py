"""A server of several models: finds and names them, loads each for the host, and serves them.

Each model is assembled as in a server of one model, with its runner in a process of its own; the HTTP front is one
process for all models.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from penstock.app import Assembly, assemble, profile_directory
from penstock.computing import open_nursery, start_computing
from penstock.contract.adapter import adapter_option
from penstock.contract.clock import SystemClock
from penstock.contract.config import ANY_NAME
from penstock.contract.errors import ConfigError, PenstockError
from penstock.contract.hosting import HostedModel, HostLimits, ModelChoice
from penstock.contract.limits import DEFAULT_LIMITS
from penstock.contract.memory_budget import LEAST_BYTES, MemoryBudget
from penstock.contract.model import ModelCard
from penstock.contract.server_config import HostingConfig, ServerConfig
from penstock.engine import AnswerCache, LocalClient, Profiles
from penstock.freed_memory import give_back
from penstock.hosting import ModelHost
from penstock.journal import AnswerJournal, StreamJournal, model_digest
from penstock.server import create_hosting_app
from penstock.server_process import ServerProcess
from penstock.watchdog import Watchdog
from penstock.weights.locate import default_name
from penstock.weights.pull import pull

__all__ = ["hosted_models", "serve_models"]

log = logging.getLogger("penstock.server")


@dataclass(slots=True)
class _Kept:
    """What stays of a model when it is unloaded.

    Attributes:
        lora: the adapters to load with it, as options: those that it had when it was unloaded.
        memory: bounds what is kept for its clients.
        streams: the journal of its streams; None if the operator named no journal.
        answers: the journal of its stored answers; None likewise.
    """

    lora: tuple[str, ...]
    memory: MemoryBudget
    streams: StreamJournal | None
    answers: AnswerJournal | None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model; see `contract.hosting.ServedModel`."""

    client: LocalClient
    card: ModelCard
    watch: Watchdog
    kept: _Kept
    assembly: Assembly
    around: ExitStack

    @property
    def memory(self) -> MemoryBudget:
        """The budget for what is kept for its clients."""
        return self.kept.memory

    @property
    def streams(self) -> StreamJournal | None:
        """The journal of its streams."""
        return self.kept.streams

    @property
    def answers(self) -> AnswerJournal | None:
        """The journal of its stored answers."""
        return self.kept.answers

    @property
    def bytes(self) -> int:
        """Memory of its weights, KV cache and recurrent state."""
        report = self.assembly.computing.facts.memory
        return report.weight_bytes + report.kv_bytes + report.state_bytes + report.draft_bytes

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of one request."""
        return self.card.max_model_len

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of its adapters."""
        return tuple(self.client.adapters())

    async def close(self) -> None:
        """End its engine and its process, and free its memory."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self.kept.lora = tuple(f"{name}={facts.path}" for name, facts in self.client.adapters().items())
        self.client.close()
        self.assembly.close()
        self.around.close()
        give_back()


def hosted_models(choices: Sequence[ModelChoice], pins: Sequence[str], cache_dir: Path) -> list[HostedModel]:
    """Find every model, download those that are not on disk, and name them.

    Args:
        choices: the models.
        pins: models to pin in addition to choices that are pinned, by any name, or as they were chosen.
        cache_dir: where downloaded models are kept.

    Raises:
        SetupError: there is no such model, two have the same name or address for KV events, or a pin names none of
            the models.
    """
    found = []
    for choice in choices:
        config = choice.config
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
    adapters = Counter(name for each in models for name in each.adapters)
    twice = [name for name, count in adapters.items() if count > 1 or name in counts]
    if twice:
        raise ConfigError("lora", f"{twice[0]!r} would be the name of two; give one another name")
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
    """Loads models for a host.

    Args:
        cache_dir: where downloaded models are kept.
        process: announces what is loaded.
        kept: what stays of each model, by main name.
        profiles: the directory for profiles; None for no profiles.
        answers: the answer cache of all models; None for no cache.
        standby: whether a zygote stands by, from which the processes of all models are forked.
    """

    def __init__(
        self,
        cache_dir: Path,
        process: ServerProcess,
        kept: Mapping[str, _Kept],
        profiles: Path | None,
        answers: AnswerCache | None,
        *,
        standby: bool,
    ) -> None:
        self._nursery = open_nursery() if standby else None
        self._cache_dir = cache_dir
        self._process = process
        self._kept = kept
        self._profiles = profiles
        self._answers = answers

    def close(self) -> None:
        """End the zygote, once no model is loaded any more."""
        if self._nursery is not None:
            self._nursery.close()

    async def __call__(self, model: HostedModel, lost: Callable[[str], None]) -> LoadedModel:
        """Load a model in a thread."""
        return await asyncio.to_thread(self._load, model, lost)

    def _load(self, model: HostedModel, lost: Callable[[str], None]) -> LoadedModel:
        kept = self._kept[model.names[0]]
        config = replace(model.config, lora=_present(kept.lora, model))
        watchdog = Watchdog()
        nursery = self._nursery if model.config.standby else None
        starting = start_computing(config, self._cache_dir, serves=True, nursery=nursery)
        assembly = assemble(
            config,
            self._cache_dir,
            lambda line: self._process.say(f"{model.names[0]}: {line}"),
            starting,
            watchdog,
            tenants=bool(self._process.access.keys),
            keeps_times=True,
        )
        around = ExitStack()
        around.enter_context(watchdog.looking())
        for each in (kept.streams, kept.answers):
            if each is not None:
                each.model = model_digest(assembly.computing.facts, assembly.card.max_model_len)
        profiles = None
        if self._profiles is not None:
            prefix = f"{_file_name(model)}-"
            profiles = Profiles(self._profiles, assembly.computing.profiler, SystemClock(), prefix)
        facts, answers = assembly.computing.facts, self._answers
        if answers is not None and facts.contract is None:
            self._process.say(f"{model.names[0]}: answer cache     none: {facts.uncertified}")
            answers = None
        client = assembly.start_client(profiles, lambda: lost("its engine has ended"), kept.memory, answers)
        return LoadedModel(client, assembly.card, watchdog, kept, assembly, around)


def _present(lora: Sequence[str], model: HostedModel) -> tuple[str, ...]:
    """The adapters whose files exist. A missing one does not prevent the model from being loaded again."""
    present = []
    for each in lora:
        name, path = adapter_option(each)
        if each in model.config.lora or Path(path).exists():
            present.append(each)
        else:
            log.error("model %s is loaded without its adapter %s: there is no %s", model.names[0], name, path)
    return tuple(present)


def _file_name(model: HostedModel) -> str:
    """A model's main name for use in a path: names may contain slashes."""
    return quote(model.names[0], safe="")


@contextmanager
def _keeping(models: Sequence[HostedModel], journal: str, share: int) -> Iterator[Mapping[str, _Kept]]:
    """What stays of each model, by main name: a budget of `share` bytes, and journals in a folder of its own.

    Raises:
        ConfigError: a journal cannot be used.
    """
    kept: dict[str, _Kept] = {}
    with ExitStack() as opened:
        for model in models:
            streams = answers = None
            if journal:
                folder = Path(journal) / f"model-{_file_name(model)}"
                streams = opened.enter_context(closing(StreamJournal(folder)))
                answers = opened.enter_context(closing(AnswerJournal(folder)))
            kept[model.names[0]] = _Kept(model.config.lora, MemoryBudget(share, give_back), streams, answers)
        yield kept


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
        choices: the models, in the order in which they are listed; requests that name no model go to the first.
        hosting: how much may be loaded at once.
        server_options: the HTTP side.
        cache_dir: where downloaded models are kept.
        announce: called with each line of the start report.
        on_ready: called with the URL and the models once connections are accepted.

    Raises:
        SetupError: a model, an option or the address cannot be used.
    """
    profiles = profile_directory(server_options.profile_dir) if server_options.profile_dir else None
    models = hosted_models(choices, hosting.pin, cache_dir)
    process = ServerProcess(server_options, announce)
    # This budget's quarter for requests is used while they are read, before their model is known. The shares of the
    # models have such a quarter too, which they do not use; so together they stay within the limit.
    memory = MemoryBudget(choices[0].config.memory_limit, give_back)
    share, standby = max(LEAST_BYTES, memory.limit // len(models)), any(each.config.standby for each in models)
    answers = AnswerCache(server_options.answer_cache) if server_options.answer_cache else None
    failures: list[PenstockError] = []
    limits = HostLimits(hosting.max_loaded_models, hosting.models_memory, hosting.model_wait)
    with (
        _keeping(models, server_options.journal, share) as kept,
        closing(_Loader(cache_dir, process, kept, profiles, answers, standby=standby)) as load,
        process.observers("") as observers,
    ):
        host = ModelHost(models, load, limits)

        @asynccontextmanager
        async def around() -> AsyncGenerator[None]:
            """Run the host. A failure is kept and raised later: uvicorn would log it as its own."""
            stack = AsyncExitStack()
            try:
                await stack.enter_async_context(host.running())
            except PenstockError as error:  # a pinned model cannot be loaded
                failures.append(error)
                process.end()
            yield
            with process.closing():
                await stack.aclose()

        journals = {name: each.answers for name, each in kept.items() if each.answers is not None}
        app = create_hosting_app(host, around(), DEFAULT_LIMITS, process.access, memory, observers, journals)
        process.run(app, "/v1/chat/completions", lambda url: on_ready(url, models))
    if failures:
        raise failures[0].__cause__ or failures[0]
