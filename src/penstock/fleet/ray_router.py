"""Tells Ray which replica gets a call: the one that the caller named. The fleet's client has chosen it.

If the named replica is gone, Ray chooses one, which then answers that the call was not for it; no call waits for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from penstock.fleet import ray_names

__all__ = ["NamedRouter"]


class NamedRouter(RequestRouter):  # type: ignore[misc] # Ray has no types where its extra is not installed
    """Sends a call to the replica whose name is its argument `to`."""

    async def choose_replicas(
        self, candidate_replicas: Sequence[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """See `RequestRouter`; never raises."""
        to: Any = None if pending_request is None else (pending_request.kwargs or {}).get("to")
        named = [each for each in candidate_replicas if each.replica_id.unique_id == to]
        return [named or list(candidate_replicas)]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """See `RequestRouter`."""
        super().update_replicas(replicas)
        names = {each.replica_id.unique_id for each in replicas}
        ray_names.in_service.intersection_update(names)
        ray_names.in_service.update(names)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """See `RequestRouter`."""
        super().on_replica_actor_died(replica_id)
        ray_names.in_service.discard(replica_id.unique_id)
