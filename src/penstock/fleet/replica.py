"""A replica as the fleet's client sees it, and the ports through which the client finds and chooses replicas."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.contract.events import Output
from penstock.contract.measurements import Measurements
from penstock.contract.ports import Health
from penstock.engine import ResolvedRequest
from penstock.routing import ReplicaLoad

__all__ = ["Ranking", "Replica", "ReplicaLost", "ReplicaState", "Replicas"]


class ReplicaLost(Exception):
    """The replica is gone, or its fate is unknown. Another replica can do what it was doing."""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """The last report of a replica about itself.

    Attributes:
        backlog_seconds: seconds until it has read all prompts that it has accepted.
        waiting_seconds: seconds until it would start a short request that came now; at least `backlog_seconds`.
        retry_after: seconds after which to try again if its queue has no room; 0 while it has room.
        tokens_per_second: prompt tokens that it reads in a second; 0.0 if it has not measured that yet.
    """

    health: Health
    measurements: Measurements
    backlog_seconds: float = 0.0
    waiting_seconds: float = 0.0
    retry_after: int = 0
    tokens_per_second: float = 0.0

    @property
    def load(self) -> ReplicaLoad:
        """The part that routers use."""
        health = self.health
        return ReplicaLoad(
            backlog_seconds=self.backlog_seconds,
            running=health.running,
            waiting=health.waiting,
            slots=health.slots,
            free_blocks=health.free_blocks,
            total_blocks=health.total_blocks,
            tokens_per_second=self.tokens_per_second,
        )


class Replica(Protocol):
    """The link to one replica. Confined to the client's event loop, except for `state`."""

    def generate(self, request: ResolvedRequest) -> AsyncGenerator[list[Output], None]:
        """Submit on the first iteration, and stream the outputs. Closing early aborts the request at the replica.

        Raises:
            ReplicaLost: before or between outputs; it is unknown how far the replica got.
            PenstockError: before the first output, if the replica refuses the request.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """As `EngineClient.abort`. A replica that is lost has nothing to end."""
        ...

    async def heartbeat(self) -> None:
        """As `EngineClient.heartbeat`.

        Raises:
            ReplicaLost: it does not answer, or its engine is dead.
        """
        ...

    async def reset_prefix_cache(self) -> None:
        """As `EngineClient.reset_prefix_cache`. Raises ReplicaLost."""
        ...

    def state(self) -> ReplicaState | None:
        """Its last report, always a new object for a new report; None before the first. Callable from any thread."""
        ...


class Replicas(Protocol):
    """The replicas that take requests now."""

    def present(self) -> Mapping[str, Replica]:
        """Name -> link. A replica that comes back after it was lost has another name. Callable from any thread."""
        ...


class Ranking(Protocol):
    """Says which replica a prompt is best sent to: `penstock.routing.Router`. Never waits, never raises."""

    def set_replicas(self, names: Sequence[str]) -> None:
        """Say which replicas exist now."""
        ...

    def report(self, name: str, load: ReplicaLoad, now: float) -> None:
        """Take the report that `name` gave of itself at `now`, in seconds."""
        ...

    def rank(
        self, keys: Sequence[bytes], tokens: int, now: float, among: Sequence[str] | None = None
    ) -> tuple[str, ...]:
        """The names in `among`, the best first, for a prompt of `tokens` tokens whose full blocks have `keys`."""
        ...

    def sent(self, name: str, keys: Sequence[bytes], tokens: int, now: float) -> None:
        """Note that a prompt was sent to `name`."""
        ...

    def ended(self, name: str, tokens: int, now: float) -> None:
        """Note that a request that was sent to `name` is over, in whatever way."""
        ...

    def lost(self, name: str) -> None:
        """Note that `name` is gone, with everything that it held."""
        ...
