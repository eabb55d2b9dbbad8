"""Several simulated engines behind one router, each on a machine of its own.

Every engine runs until a request comes, then it is decided who gets it: in turn, or by `penstock.routing`, which hears
from the engines as often as in a fleet. What passes between router and replicas takes no time here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.core.block_keys import KeyChain, root_key
from penstock.foresight.arrivals import Arrival
from penstock.foresight.engine import SimulatedEngine
from penstock.routing import Router

__all__ = ["Chooser", "InTurn", "Routed"]

_REPORT_SECONDS = 0.25
"""Between two reports of a replica, as in a fleet."""


class Chooser(Protocol):
    """Decides which engine gets a request."""

    def choose(self, arrival: Arrival, engines: Sequence[SimulatedEngine]) -> int:
        """The index of the engine. Engines have run until the request comes."""
        ...


class InTurn:
    """Each engine in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, arrival: Arrival, engines: Sequence[SimulatedEngine]) -> int:  # noqa: ARG002
        """See `Chooser`."""
        self._next = (self._next + 1) % len(engines)
        return self._next


class Routed:
    """Chooses as a fleet does: by the beginnings of prompts that replicas hold, and by their loads.

    Args:
        engines: how many there are.
        seed: of draws among equals.
    """

    def __init__(self, engines: int, seed: int = 0) -> None:
        self._names = [str(index) for index in range(engines)]
        self._router = Router(seed=seed)
        self._router.set_replicas(self._names)
        self._reported = -_REPORT_SECONDS
        self._ended = [0] * engines

    def choose(self, arrival: Arrival, engines: Sequence[SimulatedEngine]) -> int:
        """See `Chooser`."""
        now, request, config = arrival.at, arrival.request, engines[0].scheduler.config
        for index, engine in enumerate(engines):
            for served in engine.served[self._ended[index] :]:
                self._router.ended(self._names[index], served.prompt_tokens, served.ended)
            self._ended[index] = len(engine.served)
        if now - self._reported >= _REPORT_SECONDS:
            self._reported = now
            for name, engine in zip(self._names, engines, strict=True):
                self._router.report(name, engine.load(), now)
        chain = KeyChain(root_key(config.model_digest, request.cache_salt, request.adapter_digest), config.block_size)
        chain.follow(request.prompt)
        name = self._router.rank(chain.keys, len(request.prompt), now)[0]
        self._router.sent(name, chain.keys, len(request.prompt), now)
        return int(name)
