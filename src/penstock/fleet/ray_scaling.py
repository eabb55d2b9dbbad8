"""Decides how many replicas there should be, by how long a new request would wait. Runs in Ray's controller."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["WaitingPolicy", "replicas_wanted"]

LEAST_USED = 0.7
"""A replica is removed only if at most this part of the remaining slots would be in use."""


def replicas_wanted(waits: Sequence[float], busy: Sequence[float], most_wait: float) -> int:
    """The number of replicas that there should be.

    Args:
        waits: seconds that a new request would wait, by replica.
        busy: the part of each replica's slots that is in use or wanted; above 1 if sequences wait.
        most_wait: seconds that a new request may wait.
    """
    present = max(1, len(waits))
    if not waits:
        return present
    if min(waits) > most_wait:  # it would wait too long at every replica
        return max(present + 1, min(2 * present, math.ceil(present * min(waits) / max(most_wait, 0.1))))
    if max(waits) == 0.0 and present > 1 and sum(busy) <= LEAST_USED * (present - 1):
        return present - 1
    return present


class WaitingPolicy:
    """`replicas_wanted` as Ray calls a policy.

    Args:
        most_wait: seconds that a new request may wait.
    """

    def __init__(self, most_wait: float) -> None:
        self._most_wait = most_wait

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas by their last reports; unchanged until every replica has reported."""
        said: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        waits, busy = list(said.get("waiting_seconds", {}).values()), list(said.get("busy", {}).values())
        if len(waits) < max(1, context.current_num_replicas):
            return context.target_num_replicas, {}
        return replicas_wanted(waits, busy, self._most_wait), {}
