"""`penstock fleet`: the HTTP side of a server, in this process, and engines on Ray behind it.

The server is the one that `penstock serve` has; only its `EngineClient` differs. Ray starts, watches, replaces and
counts the replicas; which of them computes what is decided here.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.app import model_card
from penstock.contract.clock import SystemClock
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError, SetupError
from penstock.contract.fleet_config import FleetConfig
from penstock.contract.limits import DEFAULT_LIMITS
from penstock.contract.memory import readable_bytes
from penstock.contract.memory_budget import MemoryBudget
from penstock.contract.model import HuggingFaceText, ModelCard
from penstock.contract.server_config import ServerConfig
from penstock.engine import Certifying, Intake, WaitingRoom
from penstock.fleet import FleetClient
from penstock.fleet.description import Description, Options
from penstock.fleet.keys import PromptKeys
from penstock.freed_memory import give_back
from penstock.journal import AnswerJournal, StreamJournal
from penstock.model_text import grammars_of, open_model_text
from penstock.routing import Router
from penstock.server_process import ServerProcess
from penstock.text import TextModel
from penstock.weights.pull import pull

__all__ = ["serve_fleet"]

APPLICATION = "penstock"

_OF_ONE_ENGINE = ("kv_events", "kv_events_replay", "lora_dir")
"""Options of addresses that two engines cannot share, and of what is loaded into one while it runs."""

_NO_RAY = "Ray is not installed, which fleets need: pip install 'penstock[ray]'"

_LOOPBACK = ("127.", "localhost:", "[::1]:")

_STORE_BYTES = 80 * 2**20
"""Ray's shared memory, about the least that it takes: messages are small, and go another way."""

_HEADROOM = 64
"""Calls beside those that the engine's queue has room for: states, heartbeats, aborts."""

_FIRST_SECONDS = 60.0
"""How long the first replica may take to say what it is, once Ray says that it runs."""


def serve_fleet(
    engine_options: EngineConfig,
    server_options: ServerConfig,
    fleet: FleetConfig,
    cache_dir: Path,
    announce: Callable[[str], None],
    on_ready: Callable[[str, str], None] = lambda url, model: None,  # noqa: ARG005
) -> None:
    """Start replicas, or replace those that run with other options, and serve them until asked to end.

    Args:
        engine_options: of every replica.
        server_options: of the HTTP side.
        fleet: how many replicas, and where.
        cache_dir: where downloaded models are kept.
        announce: called with each line of the start report.
        on_ready: called with the URL and the model's name once connections are accepted.

    Raises:
        SetupError: Ray is not installed, or the model, an option or the address cannot be used.
    """
    for name in _OF_ONE_ENGINE:
        if getattr(engine_options, name):
            raise ConfigError(name, "is for one engine; a fleet has several")
    for name in ("profile_dir", "answer_cache"):
        if getattr(server_options, name):
            raise ConfigError(name, "is for one engine; a fleet has several")
    if find_spec("ray") is None:
        raise SetupError(_NO_RAY)
    from penstock.fleet.ray_replicas import RayReplicas
    from penstock.server import create_app

    process = ServerProcess(server_options, announce)
    for model in filter(None, (engine_options.model, engine_options.draft_model)):
        pull(model, cache_dir, show_progress=True)
    options = Options(_shared_out(engine_options, fleet), str(cache_dir), bool(process.access.keys))
    with ExitStack() as stack:
        journal = answers = None
        if server_options.journal:
            journal = stack.enter_context(closing(StreamJournal(Path(server_options.journal))))
            answers = stack.enter_context(closing(AnswerJournal(Path(server_options.journal))))
        stack.enter_context(_cluster(fleet, process.say))
        handle = _deploy(options, fleet)
        replicas = stack.enter_context(RayReplicas(handle))
        first = _first(replicas)
        description = first.description
        replicas.answers = description.answers
        for each in (journal, answers):
            if each is not None:
                each.model = description.answers
        text = _open_text(description)
        card = model_card(description.facts, description.found.facts, text)
        memory = MemoryBudget(engine_options.memory_limit, give_back)
        room = WaitingRoom(memory.outputs)
        memory.watch("outputs", lambda: room.bytes)
        state = first.state()
        assert state is not None, "a replica is present once it has said how it is"
        facts = description.facts
        client = FleetClient(
            _intake(description, text, card),
            replicas,
            Router(seed=secrets.randbits(32)),
            PromptKeys(facts.model_digest, facts.config.block_size),
            SystemClock(),
            state.measurements,
            room,
            {each.name: each for each in description.adapters},
        )
        stack.callback(client.close)
        for line in facts.memory.lines():
            process.say(line)
        process.say(f"replicas         {fleet.replicas}, each as above")
        process.say(f"memory           {readable_bytes(memory.limit)} for requests and waiting output of all of them")
        endpoint = f"/v1/{'chat/completions' if card.generates else 'embeddings'}"
        observers = stack.enter_context(process.observers(card.name))
        app = create_app(client, card, DEFAULT_LIMITS, process.access, observers, None, journal, answers, memory)
        process.run(app, endpoint, lambda url: on_ready(url, card.name))


def _shared_out(config: EngineConfig, fleet: FleetConfig) -> EngineConfig:
    """The options of one replica; those of a cluster on this machine share its processors."""
    if config.threads or fleet.address:
        return config
    return replace(config, threads=max(1, (os.cpu_count() or 1) // fleet.bounds[1]))


@contextmanager
def _cluster(fleet: FleetConfig, say: Callable[[str], None]) -> Iterator[None]:
    """Inside, this process is part of a Ray cluster: of one that runs, or of its own.

    Raises:
        ConfigError: there is no such cluster.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    _use_token(create=not fleet.address)
    if not fleet.address or fleet.address.startswith(_LOOPBACK):
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # what keeps Ray on 127.0.0.1, on Linux too
    import ray
    from ray import serve
    from ray.serve.config import ProxyLocation

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "WARNING"}
    with ExitStack() as stack:
        try:
            if fleet.address:
                ray.init(address=fleet.address, **quiet)
            else:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pr-", ignore_cleanup_errors=True))
                ray.init(
                    num_cpus=max(os.cpu_count() or 1, round(fleet.bounds[1] * fleet.replica_cpus + 0.5)),
                    include_dashboard=False,
                    object_store_memory=_STORE_BYTES,
                    _temp_dir=folder,
                    _node_ip_address="127.0.0.1",
                    **quiet,
                )
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            raise ConfigError("address", f"no Ray cluster could be joined or started: {error}") from error
        stack.callback(ray.shutdown)
        serve.start(proxy_location=ProxyLocation.Disabled)
        if not fleet.address:
            stack.callback(serve.shutdown)
        where = fleet.address or ray.get_runtime_context().gcs_address
        say(f"Ray              {ray.__version__} at {where}")
        yield


def _use_token(*, create: bool) -> None:
    """Have Ray ask for a token, and send it: the user's, whom alone its file is for; with `create` there is one."""
    if any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        return
    path = Path.home() / ".ray" / "auth_token"
    if create and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
    if path.exists():
        path.chmod(0o600)
        os.environ["RAY_AUTH_MODE"] = "token"


def _deploy(options: Options, fleet: FleetConfig) -> Any:
    """Start the replicas, or bring those that run up to these options one by one; returns Ray's handle.

    Raises:
        SetupError: they cannot be started.
    """
    import msgspec
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

    from penstock.fleet_replica import EngineReplica

    config, (least, most) = options.config, fleet.bounds
    size: dict[str, Any] = {"num_replicas": least}
    if least < most:
        policy = AutoscalingPolicy(
            policy_function="penstock.fleet.ray_scaling:WaitingPolicy", policy_kwargs={"most_wait": fleet.scale_up_wait}
        )
        size = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=least,
                max_replicas=most,
                look_back_period_s=2.0,
                upscale_delay_s=fleet.scale_up_delay,
                downscale_delay_s=fleet.scale_down_delay,
                policy=policy,
            )
        }
    deployment = serve.deployment(
        **size,
        name="engine",
        max_ongoing_requests=config.max_num_seqs + config.max_queued_requests + _HEADROOM,
        health_check_period_s=1,
        health_check_timeout_s=30,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=fleet.replica_drain,
        max_constructor_retry_count=2,
        ray_actor_options={"num_cpus": fleet.replica_cpus, "num_gpus": fleet.replica_gpus},
        request_router_config=RequestRouterConfig(request_router_class="penstock.fleet.ray_router:NamedRouter"),
    )(EngineReplica)
    try:
        return serve.run(
            deployment.bind(msgspec.msgpack.encode(options)), name=APPLICATION, route_prefix=None, blocking=False
        )
    except RuntimeError as error:
        status = serve.status().applications[APPLICATION].deployments.get("engine")
        reason = str(error) if status is None else status.message
        lines = [line for line in reason.splitlines() if line.strip()]
        raise SetupError(f"the replicas could not be started: {lines[-1] if lines else error}") from error


def _first(replicas: Any) -> Any:
    """A replica that has said what it is."""
    last = time.monotonic() + _FIRST_SECONDS
    while not (present := replicas.present()):
        if time.monotonic() > last:
            raise SetupError("no replica answers, though Ray says that they run")
        time.sleep(0.05)
    return next(iter(present.values()))


def _open_text(description: Description) -> TextModel:
    """The text half of the model.

    Raises:
        SetupError: its files are not here.
    """
    model, config = description.found.facts, description.config
    if isinstance(model.text, HuggingFaceText) and not Path(model.text.directory).is_dir():
        raise ConfigError("model", f"its tokenizer is not on this machine: there is no {model.text.directory}")
    return open_model_text(config, model.text)


def _intake(description: Description, text: TextModel, card: ModelCard) -> Intake:
    """What resolves requests here, as every replica's own would."""
    adapters, facts = {each.name: each for each in description.adapters}, description.facts
    grammars = grammars_of(text, card.vocab_size, compiles=False)
    return Intake(
        text,
        card,
        DEFAULT_LIMITS,
        SystemClock(),
        lambda: secrets.randbits(62),
        description.config.scheduling_policy,
        grammars,
        lambda: adapters,
        None if facts.contract is None else Certifying(facts.contract, text),
        facts.uncertified,
    )
