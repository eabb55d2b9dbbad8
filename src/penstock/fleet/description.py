"""How a replica describes its model, so that a client can open the model's text half and resolve requests."""

from __future__ import annotations

import msgspec

from penstock.contract.adapter import AdapterFacts
from penstock.contract.config import EngineConfig
from penstock.contract.memory import RunnerFacts
from penstock.remote.messages import Found

__all__ = ["Description", "Options"]


class Description(msgspec.Struct, frozen=True):
    """The model of a replica.

    Attributes:
        answers: identifies everything that answers depend on; a stream continues only at a replica with the same value.
        found: what the model's files say.
        facts: facts of its runner.
        config: the options as the engine has them.
        adapters: the adapters that requests may name.
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
