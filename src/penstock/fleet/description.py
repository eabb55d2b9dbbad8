"""What a replica says of its model, from which a client opens the text half of it and resolves requests."""

from __future__ import annotations

import msgspec

from penstock.contract.adapter import AdapterFacts
from penstock.contract.config import EngineConfig
from penstock.contract.memory import RunnerFacts
from penstock.remote.messages import Found

__all__ = ["Description", "Options"]


class Description(msgspec.Struct, frozen=True):
    """A replica's model.

    Attributes:
        answers: names all that answers depend on; a stream goes on only where it is the same.
        found: what the model's files say.
        facts: its runner.
        config: the options as the engine has them.
        adapters: those that requests may name.
    """

    answers: bytes
    found: Found
    facts: RunnerFacts
    config: EngineConfig
    adapters: tuple[AdapterFacts, ...] = ()


class Options(msgspec.Struct, frozen=True):
    """What a replica is started with.

    Attributes:
        config: the engine's options.
        cache_dir: where downloaded models are kept.
        tenants: whether requests come from tenants that can be told apart.
    """

    config: EngineConfig
    cache_dir: str
    tenants: bool
