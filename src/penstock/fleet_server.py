"""Runs `penstock fleet`: the HTTP side of a server, in this process, and engines on Ray behind it.

The server is the same as in `penstock serve`; only its `EngineClient` differs. Ray starts, watches and replaces the
replicas, and decides how many there are; this process decides which replica computes which request.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from penstock.app import model_card
from penstock.contract.clock import SystemClock
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError, SetupError
from penstock.contract.fleet_config import FleetConfig
from penstock.contract.limits import DEFAULT_LIMITS
from penstock.contract.measurements import Measurements
from penstock.contract.memory import readable_bytes
from penstock.contract.memory_budget import MemoryBudget
from penstock.contract.model import HuggingFaceText, ModelCard
from penstock.contract.server_config import ServerConfig
from penstock.engine import Certifying, Intake, WaitingRoom
from penstock.fleet import FleetClient, Ranking, Replicas
from penstock.fleet.description import Description, Options
from penstock.fleet.keys import PromptKeys
from penstock.fleet.ray_replicas import RayReplica, RayReplicas
from penstock.fleet_cluster import cluster, deployment, end_replicas, run_replicas
from penstock.freed_memory import give_back
from penstock.journal import AnswerJournal, StreamJournal
from penstock.model_text import grammars_of, open_model_text
from penstock.routing import Router
from penstock.server_process import ServerProcess
from penstock.text import TextModel
from penstock.weights.pull import pull

__all__ = ["first_replica", "fleet_client", "open_text", "serve_fleet"]

_OF_ONE_ENGINE = ("kv_events", "kv_events_replay", "lora_dir")
"""Options for addresses that two engines cannot share, and for what is loaded into a running engine."""

_NO_RAY = "Ray is not installed, which fleets need: pip install 'penstock[ray]'"

_FIRST_SECONDS = 60.0
"""How long the first replica may take to describe itself, once Ray says that it runs."""


def serve_fleet(
    engine_options: EngineConfig,
    server_options: ServerConfig,
    fleet: FleetConfig,
    cache_dir: Path,
    announce: Callable[[str], None],
    on_ready: Callable[[str, str], None] = lambda url, model: None,  # noqa: ARG005
) -> None:
    """Start replicas, or replace those of the same name, and serve until asked to end; or, with `fleet.ends`, end them.

    Args:
        engine_options: options of every replica.
        server_options: options of the HTTP side.
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
    name = fleet.name_for(engine_options.model)
    if fleet.ends:
        with cluster(fleet, announce):
            end_replicas(name)
        announce(f"replicas         those of {name} have ended")
        return
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
        stack.enter_context(cluster(fleet, process.say))
        handle = run_replicas(name, deployment(options.config, fleet), options)
        replicas = stack.enter_context(RayReplicas(handle))
        first = first_replica(replicas)
        description = first.description
        replicas.answers = description.answers
        for each in (journal, answers):
            if each is not None:
                each.model = description.answers
        text = open_text(description)
        card = model_card(description.facts, description.found.facts, text)
        memory = MemoryBudget(engine_options.memory_limit, give_back)
        room = WaitingRoom(memory.outputs)
        memory.watch("outputs", lambda: room.bytes)
        state = first.state()
        assert state is not None, "a replica is present once it has said how it is"
        client = fleet_client(
            description, text, card, replicas, Router(seed=secrets.randbits(32)), state.measurements, room
        )
        stack.callback(client.close)
        for line in description.facts.memory.lines():
            process.say(line)
        process.say(f"replicas         {fleet.replicas}, each as above")
        process.say(f"memory           {readable_bytes(memory.limit)} for requests and waiting output of all of them")
        endpoint = f"/v1/{'chat/completions' if card.generates else 'embeddings'}"
        observers = stack.enter_context(process.observers(card.name))
        app = create_app(client, card, DEFAULT_LIMITS, process.access, observers, None, journal, answers, memory)
        process.run(app, endpoint, lambda url: on_ready(url, card.name))


def _shared_out(config: EngineConfig, fleet: FleetConfig) -> EngineConfig:
    """The options of one replica; the replicas of a cluster on this machine share its processors."""
    if config.threads or fleet.address:
        return config
    return replace(config, threads=max(1, (os.cpu_count() or 1) // fleet.bounds[1]))


def first_replica(replicas: RayReplicas) -> RayReplica:
    """Wait for a replica that has described itself.

    Raises:
        SetupError: none has in time.
    """
    last = time.monotonic() + _FIRST_SECONDS
    while not (present := replicas.present()):
        if time.monotonic() > last:
            raise SetupError("no replica answers, though Ray says that they run")
        time.sleep(0.05)
    return next(iter(present.values()))


def open_text(description: Description) -> TextModel:
    """The text half of a replica's model.

    Raises:
        SetupError: the model's text files are not on this machine.
    """
    model, config = description.found.facts, description.config
    if isinstance(model.text, HuggingFaceText) and not Path(model.text.directory).is_dir():
        raise ConfigError("model", f"its tokenizer is not on this machine: there is no {model.text.directory}")
    return open_model_text(config, model.text)


def fleet_client(
    description: Description,
    text: TextModel,
    card: ModelCard,
    replicas: Replicas,
    router: Ranking,
    like: Measurements,
    room: WaitingRoom | None = None,
) -> FleetClient:
    """A client that resolves requests here, as every replica would itself, and has `replicas` compute them."""
    adapters, facts = {each.name: each for each in description.adapters}, description.facts
    intake = Intake(
        text,
        card,
        DEFAULT_LIMITS,
        SystemClock(),
        lambda: secrets.randbits(62),
        description.config.scheduling_policy,
        grammars_of(text, card.vocab_size, compiles=False),
        lambda: adapters,
        None if facts.contract is None else Certifying(facts.contract, text),
        facts.uncertified,
    )
    keys = PromptKeys(facts.model_digest, facts.config.block_size)
    return FleetClient(intake, replicas, router, keys, SystemClock(), like, room, adapters)
