"""Several engines that serve one model, as one engine: a stream that loses its engine goes on at another.

`FleetClient` is an `EngineClient` over `Replica` links, which it knows by their protocol only. `wire` and
`replica_engine` are the two ends of a link that carries bytes. An answer follows from its request alone, so the replica
that continues a stream generates it again, quickly, and only what is new is sent (`Delivered`). Knows no HTTP or Ray.
"""

from __future__ import annotations

from penstock.fleet.client import FleetClient
from penstock.fleet.delivered import AnswerDiffers, Delivered
from penstock.fleet.replica import Ranking, Replica, ReplicaLost, Replicas, ReplicaState
from penstock.fleet.replica_engine import ReplicaEngine

__all__ = [
    "AnswerDiffers",
    "Delivered",
    "FleetClient",
    "Ranking",
    "Replica",
    "ReplicaEngine",
    "ReplicaLost",
    "ReplicaState",
    "Replicas",
]
