"""The composition root: puts concrete classes of several rooms together, as an engine and as a server.

Reads top to bottom as the start of an engine: find the model, make what computes, here or in a process of its own, and
join the parts. How a model is placed is in `loading`, how a runner is made of it in `building`.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from penstock.building import checkpoint_interval, grammars_of, load_runner, open_model_text
from penstock.contract.config import (
    ANY_NAME,
    BYTE_FIELDS,
    EngineConfig,
    Front,
    SchedulerConfig,
    ServerConfig,
    options_behind,
    read_bytes,
)
from penstock.contract.embedding import EmbeddingSpec
from penstock.contract.errors import ConfigError, EngineDead
from penstock.contract.limits import DEFAULT_LIMITS
from penstock.contract.memory import RunnerFacts
from penstock.contract.model import ModelCard, StepCost, StepRow
from penstock.contract.ports import OverlappingRunner, Profiler, Runner
from penstock.contract.sampling import SamplingScalar
from penstock.core import Scheduler
from penstock.engine import Engine, EngineLoop, Intake, LocalClient, NoRecorder, Profiles, Recorder
from penstock.exec.profiler import TorchProfiler
from penstock.exec.start_report import plain_text_line, sampling_line
from penstock.grammar import GrammarLibrary
from penstock.loading import SystemClock, find_model, plan_model, resolve_choices
from penstock.nn.cost import cost
from penstock.remote import ProcessProfiler, ProcessRunner
from penstock.runner_process import RUNNER_PROGRAM
from penstock.sampling import read_model_defaults
from penstock.text import TextModel
from penstock.weights.embedding_config import read_embedding
from penstock.weights.files import ModelFiles
from penstock.weights.generation_config import read_generation_config
from penstock.weights.gguf_file import GgufSource
from penstock.weights.locate import default_cache_dir

__all__ = [
    "Assembly",
    "assemble",
    "engine_config",
    "local_application",
    "serve",
]


@dataclass(frozen=True, slots=True)
class Computing:
    """What computes, wherever it does: a runner and what belongs to it.

    Attributes:
        grammars: those that requests are checked with.
        cost: what a step of given rows takes.
        close: ends what is not this process's own.
    """

    runner: Runner | OverlappingRunner
    facts: RunnerFacts
    grammars: GrammarLibrary
    profiler: Profiler
    cost: Callable[[Sequence[StepRow]], StepCost]
    close: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Assembly:
    """An engine that is ready to be stepped, and what it says of itself.

    Attributes:
        report: lines for the operator: model, who computes, memory.
    """

    engine: Engine
    intake: Intake
    card: ModelCard
    config: EngineConfig
    report: tuple[str, ...]
    computing: Computing

    def cost(self, rows: Sequence[StepRow]) -> StepCost:
        """What a step of these rows takes."""
        return self.computing.cost(rows)

    def start_client(
        self, profiles: Profiles | None = None, on_death: Callable[[], None] = lambda: None
    ) -> LocalClient:
        """Run the engine in a thread of its own from now on; nobody else may step it then.

        Without `profiles` it cannot be profiled. `on_death` is called when nothing can be served any more.
        """
        config = self.config
        loop = EngineLoop(self.engine, SystemClock(), config.max_queued_requests, config.max_queued_tokens, on_death)
        loop.start()
        return LocalClient(self.intake, loop, profiles)

    def close(self) -> None:
        """End the engine and let go of its memory."""
        self.engine.close()
        self.computing.grammars.close()
        self.computing.close()


def engine_config(front: Front = Front.HTTP, /, **options: Any) -> EngineConfig:
    """An `EngineConfig` from keyword arguments; sizes may be text, such as `2GB`, as on the command line.

    Raises:
        ConfigError: an option is unknown, has a value that cannot be used, or would do nothing behind this front.
    """
    known = options_behind(front)
    for name in options:
        if name not in known:
            raise ConfigError(name, f"is not an option; options are {', '.join(sorted(known))}")
    config = EngineConfig(**{name: _read_size(name, value) for name, value in options.items()})
    return replace(config, step_target_ms=0) if front is Front.NONE else config  # nobody waits for a single token there


def _read_size(name: str, value: Any) -> Any:
    if name not in BYTE_FIELDS or not isinstance(value, str):
        return value
    try:
        return read_bytes(value)
    except ValueError as error:
        raise ConfigError(name, str(error)) from error


def assemble(
    config: EngineConfig, cache_dir: Path | None = None, announce: Callable[[str], None] | None = None
) -> Assembly:
    """Find, load and join everything that an engine needs.

    Args:
        config: what the operator chose.
        cache_dir: where fetched models are kept; None takes the user's cache directory.
        announce: called with each line of the start report.

    Raises:
        SetupError: the model or an option cannot be used. Nothing is left half-loaded.
    """
    report: list[str] = []

    def say(line: str) -> None:
        report.append(line)
        if announce is not None:
            announce(line)

    files = find_model(config, cache_dir)
    recommended = read_generation_config(config.generation_config, files.path)
    sampling_defaults = read_model_defaults(recommended.values, recommended.origin)
    text = open_model_text(config, files, cache_dir)
    computing = (_compute_apart if config.runner == "process" else _compute_here)(config, files, text, cache_dir, say)
    try:
        card = _model_card(computing.facts, files, text, sampling_defaults)
        if text.plain and card.generates:
            say(plain_text_line())
        if sampling_defaults and card.generates:
            say(sampling_line(sampling_defaults, recommended.origin))
        for line in computing.facts.memory.lines():
            say(line)
        engine, intake = _join(computing, text, card)
    except BaseException:
        computing.close()
        raise
    return Assembly(engine, intake, card, computing.facts.config, tuple(report), computing)


def _model_card(
    facts: RunnerFacts, files: ModelFiles, text: TextModel, sampling_defaults: tuple[tuple[str, SamplingScalar], ...]
) -> ModelCard:
    """What callers may know of the model."""
    asked = facts.config.served_model_name
    names = tuple(dict.fromkeys(name for name in asked if name != ANY_NAME)) or (files.name,)
    header = files.source.header if isinstance(files.source, GgufSource) else None
    return ModelCard(
        name=names[0],
        created=int(time.time()),
        max_model_len=facts.memory.max_model_len,
        vocab_size=facts.vocab_size,
        has_chat_template=text.chat_template is not None,
        template_variables=text.template_variables,
        thinks=text.reply_format.thinks,
        hidden_size=facts.embedding_size,
        sampling_defaults=sampling_defaults,
        named_roles=text.chat_template.named_roles if text.chat_template is not None else frozenset(),
        aliases=names[1:],
        any_name=ANY_NAME in asked,
        embedding=read_embedding(files.path, header) or EmbeddingSpec(),
        generates=not facts.looks_ahead,
    )


def _compute_here(
    config: EngineConfig, files: ModelFiles, text: TextModel, _cache_dir: Path | None, say: Callable[[str], None]
) -> Computing:
    """A runner in this process."""
    runner, facts, loaded, grammars = load_runner(config, files, text, say)
    return Computing(
        runner, facts, grammars, TorchProfiler(), partial(cost, loaded.program, kv_dtype=loaded.kv_dtype), _nothing
    )


def _compute_apart(
    config: EngineConfig, files: ModelFiles, text: TextModel, cache_dir: Path | None, say: Callable[[str], None]
) -> Computing:
    """A runner in a process of its own."""
    runner = ProcessRunner(config, str(cache_dir or default_cache_dir(os.environ)), RUNNER_PROGRAM, say)
    facts = runner.facts

    def planned_cost(rows: Sequence[StepRow]) -> StepCost:
        choices = resolve_choices(facts.config, files)
        program = plan_model(facts.config, files, choices).program
        return cost(program, rows, kv_dtype=choices.kv_dtype)

    grammars = grammars_of(text, facts.vocab_size)
    return Computing(runner, facts, grammars, ProcessProfiler(runner), planned_cost, runner.close)


def _nothing() -> None:
    pass


def _join(computing: Computing, text: TextModel, card: ModelCard) -> tuple[Engine, Intake]:
    """The engine around a runner, and what hands it requests."""
    facts, memory, config = computing.facts, computing.facts.memory, computing.facts.config
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
        checkpoint_interval=checkpoint_interval(config),
        looks_ahead=facts.looks_ahead,
        step_target_ms=config.step_target_ms,
    )
    recorder = Recorder(Path(config.record), scheduler_config) if config.record else NoRecorder()
    engine = Engine(Scheduler(scheduler_config), computing.runner, text, recorder, SystemClock())
    intake = Intake(
        text,
        card,
        DEFAULT_LIMITS,
        SystemClock(),
        lambda: secrets.randbits(62),
        config.scheduling_policy,
        computing.grammars,
    )
    return engine, intake


def serve(
    engine_options: EngineConfig,
    server_options: ServerConfig,
    cache_dir: Path,
    announce: Callable[[str], None],
    on_ready: Callable[[str, str], None] = lambda url, model: None,  # noqa: ARG005
) -> None:
    """Assemble an engine and serve it over HTTP until the process is asked to end, or can serve nothing any more.

    `on_ready` is told the URL and the model's name once connections are accepted.

    Raises:
        SetupError: the model, an option or the address cannot be used.
        EngineDead: the engine died; whoever started this process should see that it ended, and start another.
    """
    from penstock import server  # the HTTP stack is not needed by those who use the library

    access = server.open_access(server_options, os.environ)
    server.configure_logging(server_options.log_format)
    directory = _profile_directory(server_options.profile_dir) if server_options.profile_dir else None
    assembly = assemble(engine_options, cache_dir, announce)
    observers: list[Callable[[Any], None]] = [server.log_request] if server_options.log_requests else []
    endpoint = server_options.otlp_traces_endpoint
    spans = server.open_spans(endpoint, assembly.card.name) if endpoint else None
    if spans is not None:
        observers.append(spans)
    profiles = None if directory is None else Profiles(directory, assembly.computing.profiler, SystemClock())
    end = server.End()
    client = assembly.start_client(profiles, end.now)

    def ready(url: str) -> None:
        announce(f"listening {url} (POST {url}/v1/{'chat/completions' if assembly.card.generates else 'embeddings'})")
        on_ready(url, assembly.card.name)

    try:
        app = server.create_app(client, assembly.card, DEFAULT_LIMITS, access, observers)
        server.run(
            app,
            server_options,
            on_ready=ready,
            drain_seconds=server_options.drain_timeout,
            end=end,
        )
        health = client.health()
        if not health.alive:
            raise EngineDead(f"the server ends, for {health.reason}")
    finally:
        client.close()
        assembly.close()
        if spans is not None:
            spans.close()


def _profile_directory(directory: str) -> Path:
    """The folder that profiles go to, which is made if it is not there."""
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
    """The server's ASGI application over an engine of its own, for use in this process; ends with the block.

    Raises:
        SetupError: as `assemble`.
    """
    from penstock import server
    from penstock.server.http.access import Access

    assembly = assemble(config, cache_dir, announce)
    client = assembly.start_client()
    try:
        access = Access(request_seconds=0)  # work that nobody waits for may take as long as it takes
        yield server.create_app(client, assembly.card, DEFAULT_LIMITS, access)
    finally:
        client.close()
        assembly.close()
