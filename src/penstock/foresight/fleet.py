"""Several simulated engines behind one router, each on a machine of its own.

An engine is simulated only when its state is needed: simulating costs time per decision, not per engine, so a thousand
idle engines cost nothing. Messages between router and replicas take no time here.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import inf, nextafter
from typing import Protocol

from penstock.core.block_keys import KeyChain, root_key
from penstock.foresight.arrivals import Arrival
from penstock.foresight.engine import SimulatedEngine
from penstock.routing import Router

__all__ = ["Chooser", "Fleet", "InTurn", "Routed"]

_REPORT_SECONDS = 0.25
"""Seconds between two reports of a replica, as in a real fleet."""


class Fleet:
    """Engines on one clock.

    Args:
        engines: the engines, without any work.

    Attributes:
        engines: the engines, in the order given.
    """

    def __init__(self, engines: Sequence[SimulatedEngine]) -> None:
        self.engines = list(engines)
        self._due: list[tuple[float, int]] = []  # when engines decide; `due` skips entries that are out of date

    @property
    def due(self) -> float:
        """When the next engine decides something; infinity if none has anything to do."""
        while self._due and self.engines[self._due[0][1]].decides_at != self._due[0][0]:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else inf

    def offer(self, index: int, arrival: Arrival) -> None:
        """Give an engine a request, which must not arrive before requests that it was offered earlier."""
        self.engines[index].offer(arrival)
        self._note(index)

    def advance(self) -> int:
        """Let the next engine decide once, at `due`, which must be finite. Returns its index."""
        due = self.due
        _, index = heapq.heappop(self._due)
        self.engines[index].run(nextafter(due, inf))
        self._note(index)
        return index

    def run(self, until: float = inf) -> None:
        """Compute every step that begins before `until`."""
        while self.due < until:
            _, index = heapq.heappop(self._due)
            self.engines[index].run(until)
            self._note(index)

    def replace(self, index: int, engine: SimulatedEngine) -> None:
        """Put another engine in the place of one that is lost with all its work."""
        self.engines[index] = engine

    def _note(self, index: int) -> None:
        decides_at = self.engines[index].decides_at
        if decides_at < inf:
            heapq.heappush(self._due, (decides_at, index))


class Chooser(Protocol):
    """Decides which engine gets a request."""

    def choose(self, arrival: Arrival, engines: Sequence[SimulatedEngine]) -> int:
        """The index of the engine. All engines have run up to the arrival of the request."""
        ...


class InTurn:
    """Chooses each engine in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, arrival: Arrival, engines: Sequence[SimulatedEngine]) -> int:  # noqa: ARG002
        """See `Chooser`."""
        self._next = (self._next + 1) % len(engines)
        return self._next


class Routed:
    """Chooses as a fleet does: by the prefixes that replicas hold, and by their loads.

    Args:
        engines: how many there are.
        seed: seeds draws among equals.
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
