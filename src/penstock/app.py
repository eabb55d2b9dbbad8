"""The composition root: one file, because the start of an engine and of a server reads from top to bottom.

Puts concrete classes of several rooms together: has the model loaded, meanwhile opens its text, and joins the parts.
`computing` decides where the model is loaded, and `building` makes a runner of it.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.computing import Computing, Starting, start_computing
from penstock.contract.adapter import adapter_option
from penstock.contract.clock import SystemClock
from penstock.contract.config import ANY_NAME, EngineConfig, options_behind
from penstock.contract.errors import ConfigError, EngineDead, SetupError
from penstock.contract.limits import DEFAULT_LIMITS
from penstock.contract.memory import RunnerFacts, readable_bytes
from penstock.contract.memory_budget import MemoryBudget
from penstock.contract.model import ModelCard, ModelFacts, StepCost, StepRow
from penstock.contract.options import BYTE_FIELDS, Front, read_bytes
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.contract.server_config import ServerConfig
from penstock.contract.stored_blocks import StoredBlocks
from penstock.core import CacheLog, Scheduler
from penstock.drafters import SuffixDrafter
from penstock.engine import (
    AdapterFolder,
    AnswerCache,
    CachedAnswers,
    Certifying,
    Engine,
    EngineLoop,
    Intake,
    LocalClient,
    NoRecorder,
    Profiles,
    QueueLimits,
    Recorder,
    WaitingRoom,
)
from penstock.freed_memory import give_back
from penstock.journal import AnswerJournal, StreamJournal, model_digest
from penstock.kept_times import KeptTimes, kept_times
from penstock.model_text import open_model_text
from penstock.store import BlockStore, StatefulPrefixes, folder_at
from penstock.text import TextModel
from penstock.watchdog import Watchdog
from penstock.weights.locate import default_cache_dir

if TYPE_CHECKING:
    from penstock.kv_events import KvEventPublisher

__all__ = [
    "Assembly",
    "assemble",
    "engine_config",
    "local_application",
    "model_card",
    "profile_directory",
    "serve",
]


@dataclass(frozen=True, slots=True)
class Assembly:
    """An engine that is ready to be stepped, and its description.

    Attributes:
        report: the start report's lines: model, kernels, memory.
    """

    engine: Engine
    intake: Intake
    model: ModelFacts
    text: TextModel
    card: ModelCard
    config: EngineConfig
    report: tuple[str, ...]
    computing: Computing
    drafter: SuffixDrafter | None
    kv_events: KvEventPublisher | None = None
    kept_times: KeptTimes | None = None

    def cost(self, rows: Sequence[StepRow]) -> StepCost:
        """The cost of a step with these rows."""
        return self.computing.cost(rows)

    def start_client(
        self,
        profiles: Profiles | None = None,
        on_death: Callable[[], None] = lambda: None,
        memory: MemoryBudget | None = None,
        answers: AnswerCache | None = None,
    ) -> LocalClient:
        """Run the engine in a thread of its own from now on; no other thread may step it then.

        Without `profiles` it cannot be profiled. `on_death` is called when nothing can be served any more. With
        `memory`, waiting outputs and cached grammars stay within their shares of it, and all kept memory is counted.
        With `answers`, requests that were answered before are not computed again.

        Raises:
            ConfigError: `answers` is given, but the model's answers are not reproducible.
        """
        config, facts = self.config, self.computing.facts
        cached = None
        if answers is not None:
            if facts.contract is None:
                raise ConfigError("answer_cache", f"cannot be used with this model: {facts.uncertified}")
            cached = CachedAnswers(answers, Certifying(facts.contract, self.text), SystemClock())
        loop = EngineLoop(
            self.engine,
            SystemClock(),
            QueueLimits(config.max_queued_requests, config.max_queued_tokens, config.max_queue_seconds),
            on_death,
            on_rest=self._rest,
        )
        room = None if memory is None else self._bound(memory)
        folder = AdapterFolder(config.lora_dir) if config.lora_dir else None
        loop.start()
        return LocalClient(self.intake, loop, profiles, room, folder, cached)

    def _rest(self) -> None:
        """Use the time while the engine, in whose thread this runs, has nothing to do."""
        give_back()
        if self.kept_times is not None:
            self.kept_times.write(self.engine.scheduler.times.known)

    def _bound(self, memory: MemoryBudget) -> WaitingRoom:
        room, grammars = WaitingRoom(memory.outputs), self.computing.grammars
        grammars.keep_within(memory.grammars)
        memory.watch("outputs", lambda: room.bytes)
        memory.watch("grammars", lambda: grammars.bytes)
        if (drafter := self.drafter) is not None:
            memory.watch("recent_answers", lambda: drafter.bytes)
        return room

    def close(self) -> None:
        """End the engine and free its memory."""
        self.engine.close()
        if self.kept_times is not None:
            self.kept_times.write(self.engine.scheduler.times.known)
        if self.kv_events is not None:
            self.kv_events.close()
        self.computing.grammars.close()
        self.computing.close()


def engine_config(front: Front = Front.HTTP, /, **options: Any) -> EngineConfig:
    """An `EngineConfig` from keyword arguments; sizes may be text, for example `2GB`, as on the command line.

    `lora` may map names of adapters to their paths.

    Raises:
        ConfigError: an option is unknown, has an invalid value, or has no effect behind this front.
    """
    known = options_behind(front)
    for name in options:
        if name not in known:
            raise ConfigError(name, f"is not an option; options are {', '.join(sorted(known))}")
    if isinstance(options.get("lora"), Mapping):
        options["lora"] = tuple(f"{name}={path}" for name, path in options["lora"].items())
    config = EngineConfig(**{name: _read_size(name, value) for name, value in options.items()})
    return replace(config, step_target_ms=0) if front is Front.NONE else config  # no caller waits for tokens there


def _read_size(name: str, value: Any) -> Any:
    if name not in BYTE_FIELDS or not isinstance(value, str):
        return value
    try:
        return read_bytes(value)
    except ValueError as error:
        raise ConfigError(name, str(error)) from error


def assemble(
    config: EngineConfig,
    cache_dir: Path | None = None,
    announce: Callable[[str], None] | None = None,
    starting: Starting | None = None,
    watchdog: Watchdog | None = None,
    *,
    tenants: bool = False,
    keeps_times: bool = False,
) -> Assembly:
    """Find, load and connect everything that an engine needs.

    Args:
        config: the operator's options.
        cache_dir: where downloaded models are kept; None for the user's cache directory.
        announce: called with each line of the start report.
        starting: a start already begun with the same options; owned by this function from now on.
        watchdog: watches every step, if given.
        tenants: whether requests come from tenants that can be told apart: the policy `auto` then means `fair`.
        keeps_times: whether learned step times are kept for the next start, unless the operator turns it off.

    Raises:
        SetupError: the model or an option cannot be used. Nothing is left half-loaded.
    """
    report: list[str] = []

    def say(line: str) -> None:
        report.append(line)
        if announce is not None:
            announce(line)

    starting = starting or start_computing(config, cache_dir)
    kv_events = None
    try:
        kv_events = _kv_events(config)
        model = starting.found(say)
        text = open_model_text(config, model.text)
        computing = starting.ready(text, say)
        card = model_card(computing.facts, model, text)
        for line in (*_text_lines(card, model, text), *computing.facts.memory.lines()):
            say(line)
        config = computing.facts.config
        if config.scheduling_policy == "auto":
            config = replace(config, scheduling_policy="fair" if tenants else "fcfs")
        drafter = SuffixDrafter(MemoryBudget(config.memory_limit).recent_answers) if config.speculate else None
        kept = None
        if keeps_times and config.keep_step_times:
            kept = kept_times(cache_dir or default_cache_dir(os.environ), computing.facts)
        engine, intake = _join(config, computing, text, card, drafter, watchdog, kv_events, kept)
        for line in _load_adapters(engine, config):
            say(line)
        if kv_events is not None:
            for line in _kv_events_lines(kv_events, engine.scheduler.config):
                say(line)
    except BaseException:
        if kv_events is not None:
            kv_events.close()
        starting.close()
        raise
    return Assembly(engine, intake, model, text, card, config, tuple(report), computing, drafter, kv_events, kept)


def _kv_events(config: EngineConfig) -> KvEventPublisher | None:
    """The publisher of KV events, if the operator wants them. It listens at once: a bad address fails before loading.

    Raises:
        ConfigError: it cannot listen, or ZeroMQ is not installed.
    """
    if not config.kv_events:
        return None
    try:
        from penstock.kv_events import KvEventPublisher, encoder
    except ModuleNotFoundError as error:
        message = f"needs {error.name}, which is not installed: pip install 'penstock[kv-events]'"
        raise ConfigError("kv_events", message) from error
    encode = encoder(config.block_size, maps=config.kv_events_format == "maps")
    return KvEventPublisher(
        config.kv_events, config.kv_events_replay, config.kv_events_topic, config.kv_events_buffer, encode
    )


def _kv_events_lines(kv_events: KvEventPublisher, config: SchedulerConfig) -> Iterator[str]:
    """The start report's lines about KV events."""
    if not config.prefix_caching:
        yield "KV events        none: this model keeps no KV that could be found again"
        return
    replay = f", again on {kv_events.replay_address}" if kv_events.replay_address else ""
    yield f"KV events        on {kv_events.address}{replay}; they tell what prompts and answers say"


def _load_adapters(engine: Engine, config: EngineConfig) -> Iterator[str]:
    """Load the operator's adapters; yields a line of the start report for each.

    Raises:
        ConfigError: an adapter cannot be used.
    """
    for each in config.lora:
        name, path = adapter_option(each)
        try:
            facts = engine.load_adapter(name, str(Path(path).expanduser().absolute()))
        except SetupError as error:
            raise ConfigError("lora", f"{name}: {error}") from error
        sizes = f"rank {facts.rank}, {facts.modules} modules, {readable_bytes(facts.bytes)}"
        yield f"adapter          {name}: {path}, {sizes}"


def _text_lines(card: ModelCard, model: ModelFacts, text: TextModel) -> Iterator[str]:
    """The start report's lines about prompts and sampling."""
    if not card.generates:
        return
    if text.plain:
        yield "conversations    as plain text: the model has no chat template (--chat-template FILE takes yours)"
    if model.sampling_defaults:
        values = ", ".join(f"{name} {value:g}" for name, value in model.sampling_defaults)
        unless = f"unless a request says otherwise, from {model.sampling_origin} (--generation-config none: without)"
        yield f"sampling         {values} {unless}"


def model_card(facts: RunnerFacts, model: ModelFacts, text: TextModel) -> ModelCard:
    """What callers may know about the model."""
    asked = facts.config.served_model_name
    names = tuple(dict.fromkeys(name for name in asked if name != ANY_NAME)) or (model.name,)
    return ModelCard(
        name=names[0],
        created=int(time.time()),
        max_model_len=facts.memory.max_model_len,
        vocab_size=facts.vocab_size,
        has_chat_template=text.chat_template is not None,
        template_variables=text.template_variables,
        thinks=text.reply_format.thinks,
        hidden_size=facts.embedding_size,
        sampling_defaults=model.sampling_defaults,
        named_roles=text.chat_template.named_roles if text.chat_template is not None else frozenset(),
        aliases=names[1:],
        any_name=ANY_NAME in asked,
        embedding=model.embedding,
        generates=not facts.looks_ahead,
        takes_adapters=facts.config.most_adapters > 0,
    )


def _join(
    config: EngineConfig,
    computing: Computing,
    text: TextModel,
    card: ModelCard,
    drafter: SuffixDrafter | None,
    watchdog: Watchdog | None,
    kv_events: KvEventPublisher | None,
    kept: KeptTimes | None,
) -> tuple[Engine, Intake]:
    """The engine around a runner, and the intake that hands it requests."""
    facts, memory = computing.facts, computing.facts.memory
    scheduler_config = SchedulerConfig(
        num_blocks=memory.num_blocks,
        block_size=config.block_size,
        max_num_seqs=memory.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=card.max_model_len,
        policy=config.scheduling_policy,
        prefix_caching=config.prefix_caching and not facts.looks_ahead,
        model_digest=facts.model_digest,
        window=facts.window,
        checkpoints=memory.checkpoints,
        spare_states=memory.spare_states,
        checkpoint_interval=config.checkpoint_interval,
        looks_ahead=facts.looks_ahead,
        step_target_ms=config.step_target_ms,
        storing=bool(facts.kv_folder),
        draft_context=facts.draft_context,
        step_times=(None if kept is None else kept.read()) or facts.step_times,
    )
    stored = _stored_blocks(facts) if facts.kv_folder else None
    clock = SystemClock()
    recorder = Recorder(Path(config.record), scheduler_config, clock) if config.record else NoRecorder()
    runner = computing.runner
    if watchdog is not None:
        runner = watchdog.watch(runner, recovers=computing.recovers)
    certifying = None if facts.contract is None else Certifying(facts.contract, text)
    scheduler = Scheduler(scheduler_config, None if kv_events is None else CacheLog())
    engine = Engine(
        scheduler,
        runner,
        text,
        recorder,
        clock,
        drafter,
        stored,
        cache_events=kv_events,
        adapting=computing.adapting,
        most_adapters=config.most_adapters,
        certifying=certifying,
    )
    intake = Intake(
        text,
        card,
        DEFAULT_LIMITS,
        SystemClock(),
        lambda: secrets.randbits(62),
        config.scheduling_policy,
        computing.grammars,
        lambda: engine.adapters.known,
        certifying,
        facts.uncertified,
    )
    return engine, intake


def _stored_blocks(facts: RunnerFacts) -> StoredBlocks:
    """Looks up blocks that are stored in files."""
    blocks = BlockStore(folder_at(Path(facts.kv_folder)))
    if not facts.state_folder:
        return blocks
    return StatefulPrefixes(blocks, BlockStore(folder_at(Path(facts.state_folder))))


def serve(
    engine_options: EngineConfig,
    server_options: ServerConfig,
    cache_dir: Path,
    announce: Callable[[str], None],
    on_ready: Callable[[str, str], None] = lambda url, model: None,  # noqa: ARG005
    starting: Starting | None = None,
) -> None:
    """Assemble an engine and serve it over HTTP until the process is asked to end, or the engine dies.

    `on_ready` gets the URL and the model's name once connections are accepted; `starting` is as in `assemble`.

    Raises:
        SetupError: the model, an option or the address cannot be used.
        EngineDead: the engine died; a supervisor should start the process again.
    """
    from penstock.server import create_app  # users of the library do not need the HTTP stack
    from penstock.server_process import ServerProcess

    process = ServerProcess(server_options, announce)
    directory = profile_directory(server_options.profile_dir) if server_options.profile_dir else None
    journal = StreamJournal(Path(server_options.journal)) if server_options.journal else None
    answers = AnswerJournal(Path(server_options.journal)) if server_options.journal else None
    watchdog, access = Watchdog(), process.access
    assembly = assemble(
        engine_options, cache_dir, process.say, starting, watchdog, tenants=bool(access.keys), keeps_times=True
    )
    card, facts = assembly.card, assembly.computing.facts
    for each in (journal, answers):
        if each is not None:
            each.model = model_digest(facts, card.max_model_len)
    profiles = None if directory is None else Profiles(directory, assembly.computing.profiler, SystemClock())
    memory = MemoryBudget(engine_options.memory_limit, give_back)
    kept = server_options.answer_cache
    try:
        client = assembly.start_client(profiles, process.end, memory, AnswerCache(kept) if kept else None)
    except BaseException:
        assembly.close()
        raise
    if kept:
        process.say(f"answer cache     {readable_bytes(kept)} for whole answers beside that")
    process.say(
        f"memory           {readable_bytes(memory.limit)} for requests, waiting output and what is stored of answers"
    )
    endpoint = f"/v1/{'chat/completions' if card.generates else 'embeddings'}"
    try:
        with process.observers(card.name) as observers, watchdog.looking():
            app = create_app(client, card, DEFAULT_LIMITS, access, observers, watchdog, journal, answers, memory)
            process.run(app, endpoint, lambda url: on_ready(url, card.name))
        health = client.health()
        if not health.alive:
            raise EngineDead(f"the server ends, for {health.reason}")
    finally:
        with process.closing():
            client.close()
            assembly.close()
        for each in (journal, answers):
            if each is not None:
                each.close()


def profile_directory(directory: str) -> Path:
    """The directory for profiles, created if missing.

    Raises:
        ConfigError: the directory cannot be made, or not be written to.
    """
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("profile_dir", f"{path} cannot be made: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError("profile_dir", f"{path} cannot be written to")
    return path


@contextmanager
def local_application(
    config: EngineConfig, cache_dir: Path, announce: Callable[[str], None]
) -> Iterator[Callable[[Any, Any, Any], Awaitable[None]]]:
    """The server's ASGI application with its own engine, for use in this process; both end with the `with` block.

    Raises:
        SetupError: as in `assemble`.
    """
    from penstock import server
    from penstock.server.http.access import Access

    assembly = assemble(config, cache_dir, announce, keeps_times=True)
    memory = MemoryBudget(config.memory_limit)
    client = assembly.start_client(memory=memory)
    try:
        access = Access(request_seconds=0)  # no time limit: no client waits for this work
        yield server.create_app(client, assembly.card, DEFAULT_LIMITS, access, memory=memory)
    finally:
        client.close()
        assembly.close()
