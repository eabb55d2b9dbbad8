"""The composition root: the only file that names concrete classes of several rooms, and puts them together.

Reads top to bottom as the start of an engine: find the model, read it, place it, size the KV cache, join the parts.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from penstock.contract.config import (
    ANY_NAME,
    BYTE_FIELDS,
    EngineConfig,
    Front,
    SchedulerConfig,
    ServerConfig,
    most_blocks,
    options_behind,
    read_bytes,
)
from penstock.contract.embedding import EmbeddingSpec
from penstock.contract.errors import ConfigError
from penstock.contract.limits import DEFAULT_LIMITS
from penstock.contract.model import HuggingFaceText, ModelCard, StepCost, StepRow, TextFiles
from penstock.contract.ports import Grammars
from penstock.core import Scheduler
from penstock.engine import Engine, EngineLoop, Intake, LocalClient, NoRecorder, Profiles, Recorder
from penstock.exec.device import (
    kv_budget,
)
from penstock.exec.kv_store import (
    MemoryReport,
    block_bytes,
    blocks_for,
)
from penstock.exec.profiler import TorchProfiler
from penstock.exec.runner import TorchRunner
from penstock.exec.start_report import (
    plain_text_line,
    sampling_line,
)
from penstock.exec.state_store import share_memory, state_bytes
from penstock.grammar import GrammarLibrary, Vocabulary
from penstock.loading import LoadedModel, SystemClock, find_model, load_model
from penstock.nn.cost import cost
from penstock.sampling import read_model_defaults
from penstock.text import ReasoningBudgets, TextModel, open_text
from penstock.weights.embedding_config import read_embedding
from penstock.weights.files import ModelFiles
from penstock.weights.generation_config import read_generation_config
from penstock.weights.gguf_file import GgufSource
from penstock.weights.locate import default_cache_dir
from penstock.weights.pull import pull

__all__ = [
    "Assembly",
    "assemble",
    "engine_config",
    "local_application",
    "serve",
    "vocabulary_of",
]


@dataclass(frozen=True, slots=True)
class Assembly:
    """An engine that is ready to be stepped, and what it says of itself.

    Attributes:
        report: lines for the operator: model, who computes, memory.
        cost: what a step of given rows takes.
    """

    engine: Engine
    intake: Intake
    card: ModelCard
    config: EngineConfig
    report: tuple[str, ...]
    cost: Callable[[Sequence[StepRow]], StepCost]
    grammars: GrammarLibrary

    def start_client(self, profiles: Profiles | None = None) -> LocalClient:
        """Run the engine in a thread of its own from now on; nobody else may step it then.

        Without `profiles` it cannot be profiled.
        """
        config = self.config
        loop = EngineLoop(self.engine, SystemClock(), config.max_queued_requests, config.max_queued_tokens)
        loop.start()
        return LocalClient(self.intake, loop, profiles)

    def close(self) -> None:
        """End the engine and let go of its memory."""
        self.engine.close()
        self.grammars.close()


def engine_config(front: Front = Front.HTTP, /, **options: Any) -> EngineConfig:
    """An `EngineConfig` from keyword arguments; sizes may be text, such as `2GB`, as on the command line.

    Raises:
        ConfigError: an option is unknown, has a value that cannot be used, or would do nothing behind this front.
    """
    known = options_behind(front)
    for name in options:
        if name not in known:
            raise ConfigError(name, f"is not an option; options are {', '.join(sorted(known))}")
    return EngineConfig(**{name: _read_size(name, value) for name, value in options.items()})


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
    text = open_text(
        _text_files(config, files, cache_dir),
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        chat_template=config.chat_template,
    )
    loaded = load_model(config, files, say)
    config = loaded.config
    grammars = GrammarLibrary(partial(vocabulary_of, text, loaded.shape.vocab_size))
    runner, memory = _build_runner(config, loaded, grammars, text)
    names = tuple(dict.fromkeys(name for name in config.served_model_name if name != ANY_NAME)) or (files.name,)
    header = files.source.header if isinstance(files.source, GgufSource) else None
    embedding = read_embedding(files.path, header) or EmbeddingSpec()
    card = ModelCard(
        name=names[0],
        created=int(time.time()),
        max_model_len=memory.max_model_len,
        vocab_size=loaded.shape.vocab_size,
        has_chat_template=text.chat_template is not None,
        template_variables=text.template_variables,
        thinks=text.reply_format.thinks,
        hidden_size=loaded.embedding_size,
        sampling_defaults=sampling_defaults,
        named_roles=text.chat_template.named_roles if text.chat_template is not None else frozenset(),
        aliases=names[1:],
        any_name=ANY_NAME in config.served_model_name,
        embedding=embedding,
        generates=not loaded.program.looks_ahead,
    )
    if text.plain and card.generates:
        say(plain_text_line())
    if sampling_defaults and card.generates:
        say(sampling_line(sampling_defaults, recommended.origin))
    for line in memory.lines():
        say(line)
    engine, intake = _join(config, loaded, text, runner, card, memory, grammars)
    return Assembly(
        engine, intake, card, config, tuple(report), partial(cost, loaded.program, kv_dtype=loaded.kv_dtype), grammars
    )


def _text_files(config: EngineConfig, files: ModelFiles, cache_dir: Path | None) -> TextFiles:
    """Where the tokenizer is read from: the model's own files, unless the operator names others."""
    if not config.tokenizer:
        return files.text
    path = pull(config.tokenizer, cache_dir or default_cache_dir(os.environ), show_progress=True)
    if not path.is_dir():
        raise ConfigError("tokenizer", f"{path} is no directory with a tokenizer.json")
    return HuggingFaceText(str(path))


def vocabulary_of(text: TextModel, width: int) -> Vocabulary:
    """A model's vocabulary as grammars see it, `width` tokens wide."""
    tokenizer = text.tokenizer
    special = tuple(id_ for id_ in range(width) if tokenizer.is_special(id_) or id_ in text.eos_token_ids)
    hidden = frozenset(special)
    tokens = tuple(b"" if id_ in hidden else tokenizer.token_bytes(id_) for id_ in range(width))
    return Vocabulary(tokens, special, tuple(sorted(text.eos_token_ids)))


def _build_runner(
    config: EngineConfig, loaded: LoadedModel, grammars: Grammars, text: TextModel
) -> tuple[TorchRunner, MemoryReport]:
    """Size the KV cache from what memory is left now, and warm up."""
    caches, dtype, block_size = loaded.program.caches, loaded.kv_dtype, config.block_size
    least = most_blocks(config.max_model_len, block_size, config.max_num_batched_tokens, loaded.program.window)
    each = block_bytes(caches, block_size, dtype)
    if loaded.program.looks_ahead:  # nothing is kept from step to step
        budget = config.kv_cache_memory or each * _step_blocks(config)
    else:
        budget = kv_budget(config.kv_cache_memory, loaded.device, least * each)
    num_seqs, checkpoints = config.max_num_seqs, None
    carried = state_bytes(loaded.program.states)
    if carried:
        interval = _checkpoint_interval(config)
        num_seqs, checkpoints, budget = share_memory(budget, carried, each // block_size, num_seqs, interval)
    num_blocks = blocks_for(budget, caches, block_size, dtype)
    max_model_len = _max_model_len(config, loaded, num_blocks)
    kv, budgets = loaded.kv_store(num_blocks, block_size), ReasoningBudgets(text)
    states = loaded.state_store(num_seqs, checkpoints or 0)
    runner = loaded.runner(kv, num_seqs, max_model_len, grammars, budgets, states)
    runner.warm_up()
    kept_in = str(dtype).removeprefix("torch.")
    report = MemoryReport(
        weight_bytes=loaded.weight_bytes,
        kv_bytes=num_blocks * each,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        kv_dtype=kept_in,
        weight_formats=loaded.weight_formats,
        max_num_seqs=num_seqs,
        state_bytes=carried * (num_seqs + (checkpoints or 0)),
        checkpoints=checkpoints,
        generates=not loaded.program.looks_ahead,
    )
    return runner, report


def _step_blocks(config: EngineConfig) -> int:
    """Blocks that one step may fill, of which each sequence's last may be filled in part."""
    return -(-config.max_num_batched_tokens // config.block_size) + config.max_num_seqs


def _checkpoint_interval(config: EngineConfig) -> int:
    """In whole blocks."""
    size = config.block_size
    return -(-config.state_checkpoint_interval // size) * size


def _join(
    config: EngineConfig,
    loaded: LoadedModel,
    text: TextModel,
    runner: TorchRunner,
    card: ModelCard,
    memory: MemoryReport,
    grammars: GrammarLibrary,
) -> tuple[Engine, Intake]:
    """The engine around a runner, and what hands it requests."""
    scheduler_config = SchedulerConfig(
        num_blocks=memory.num_blocks,
        block_size=config.block_size,
        max_num_seqs=memory.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=card.max_model_len,
        policy=config.scheduling_policy,
        prefix_caching=config.prefix_caching and not loaded.program.looks_ahead,
        model_digest=loaded.files.digest,
        window=loaded.program.window,
        checkpoints=memory.checkpoints,
        checkpoint_interval=_checkpoint_interval(config),
        looks_ahead=loaded.program.looks_ahead,
    )
    recorder = Recorder(Path(config.record), scheduler_config) if config.record else NoRecorder()
    engine = Engine(Scheduler(scheduler_config), runner, text, recorder, SystemClock())
    intake = Intake(
        text, card, DEFAULT_LIMITS, SystemClock(), lambda: secrets.randbits(62), config.scheduling_policy, grammars
    )
    return engine, intake


def serve(
    engine_options: EngineConfig,
    server_options: ServerConfig,
    cache_dir: Path,
    announce: Callable[[str], None],
    on_ready: Callable[[str, str], None] = lambda url, model: None,  # noqa: ARG005
) -> None:
    """Assemble an engine and serve it over HTTP until the process is asked to end.

    `on_ready` is told the URL and the model's name once connections are accepted.
    """
    from penstock import server  # the HTTP stack is not needed by those who use the library

    access = server.open_access(server_options, os.environ)
    server.configure_logging(server_options.log_format)
    profiles = _open_profiles(server_options.profile_dir) if server_options.profile_dir else None
    assembly = assemble(engine_options, cache_dir, announce)
    observers: list[Callable[[Any], None]] = [server.log_request] if server_options.log_requests else []
    endpoint = server_options.otlp_traces_endpoint
    spans = server.open_spans(endpoint, assembly.card.name) if endpoint else None
    if spans is not None:
        observers.append(spans)
    client = assembly.start_client(profiles)

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
        )
    finally:
        client.close()
        assembly.close()
        if spans is not None:
            spans.close()


def _open_profiles(directory: str) -> Profiles:
    """Profiles that go to a folder, which is made if it is not there."""
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("profile_dir", f"{path} cannot be made: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError("profile_dir", f"{path} cannot be written to")
    return Profiles(path, TorchProfiler(), SystemClock())


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


def _max_model_len(config: EngineConfig, loaded: LoadedModel, num_blocks: int) -> int:
    """Most tokens of one request: what the model was made for and the cache holds, or less if the operator says so.

    Where every layer has a window, a request gives back what it leaves behind, and may be longer than the cache.
    """
    context, kv_tokens = loaded.shape.max_positions, num_blocks * config.block_size
    if config.max_model_len > context:
        raise ConfigError("max_model_len", f"{config.max_model_len} is above the model's context, {context}")
    window = loaded.program.window
    if most_blocks(context, config.block_size, config.max_num_batched_tokens, window) <= num_blocks:
        kv_tokens = context
    if config.max_model_len > kv_tokens:
        raise ConfigError(
            "max_model_len",
            f"{config.max_model_len} tokens do not fit the KV cache of {kv_tokens}; raise kv_cache_memory",
        )
    return config.max_model_len or min(context, kv_tokens)
