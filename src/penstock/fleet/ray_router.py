"""What Ray asks for each call: the replica that the caller named. Which one that is was decided by the client.

A name that is gone leaves the choice to Ray, whose replica then says that it was not meant; so no call waits for ever.
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
