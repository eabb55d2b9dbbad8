"""Adds up the health and measurements of several engines, as if they were one engine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import reduce
from operator import add
from typing import Any

from penstock.contract.measurements import AdaptersInUse, DraftCount, Histogram, Measurements
from penstock.contract.ports import Health
from penstock.fleet.replica import Replicas, ReplicaState

__all__ = ["FleetTotals"]

_MOST_DEPARTED = 64
"""How many replicas that are gone are still remembered one by one."""


class FleetTotals:
    """The replicas of a fleet as one engine. Usable from any thread.

    Args:
        replicas: the replicas that exist now.
        like: the measurements of any engine of the same kind, for their shape.
    """

    def __init__(self, replicas: Replicas, like: Measurements) -> None:
        self._replicas = replicas
        self._lock = threading.Lock()
        self._latest: dict[str, Measurements] = {}  # of present replicas, and of the last that left
        self._earlier = _nothing(like)  # the sum over all that left before these

    def states(self) -> dict[str, ReplicaState | None]:
        """Name -> last report, for the replicas that exist now."""
        return {name: replica.state() for name, replica in self._replicas.present().items()}

    def health(self) -> Health:
        """See `FleetClient.health`."""
        return _added_health([state.health for state in self.states().values() if state is not None])

    def measurements(self) -> Measurements:
        """See `FleetClient.measurements`."""
        states = self.states()
        with self._lock:
            for name, state in states.items():
                if state is not None:
                    self._latest.pop(name, None)
                    self._latest[name] = state.measurements  # the latest comes last
            gone = [name for name in self._latest if name not in states]
            for name in gone:
                self._latest[name] = _departed(self._latest[name])
            for name in gone[:-_MOST_DEPARTED]:
                self._earlier = _added(self._earlier, self._latest.pop(name))
            return reduce(_added, self._latest.values(), self._earlier)


def _added_health(healths: Sequence[Health]) -> Health:
    """One engine as large as all of these; always alive, since lost replicas are replaced."""
    numbers = {each.name: sum(getattr(one, each.name) for one in healths) for each in fields(Health)[:-5]}
    return Health(
        **numbers,
        alive=True,
        reason="",
        slots=sum(one.slots for one in healths),
        computed_tokens=sum(one.computed_tokens for one in healths),
        generated_tokens=sum(one.generated_tokens for one in healths),
    )


def _nothing(like: Measurements) -> Measurements:
    """The measurements of such an engine before it has done anything."""
    values: dict[str, Any] = {}
    for each in fields(Measurements):
        match value := getattr(like, each.name):
            case bool():
                values[each.name] = value
            case int():
                values[each.name] = value if each.name == "block_size" else 0
            case Histogram(edges):
                values[each.name] = Histogram(edges, (0,) * (len(edges) + 1), 0.0)
            case AdaptersInUse() | None:
                values[each.name] = None
            case tuple():
                values[each.name] = ()
    return Measurements(**values)


def _departed(measurements: Measurements) -> Measurements:
    """The measurements of an engine that is gone: its counts stay, but it holds nothing any more."""
    return replace(
        measurements,
        running=0,
        waiting=0,
        total_blocks=0,
        free_blocks=0,
        cached_blocks=0,
        store_bytes=0,
        adapters=None,
    )


def _added(one: Measurements, other: Measurements) -> Measurements:
    values: dict[str, Any] = {}
    for each in fields(Measurements):
        mine, theirs = getattr(one, each.name), getattr(other, each.name)
        match mine:
            case bool():
                values[each.name] = mine
            case int():
                values[each.name] = mine if each.name == "block_size" else mine + theirs
            case Histogram():
                values[each.name] = _added_histograms(mine, theirs)
    values["drafts"] = _added_drafts(one.drafts, other.drafts)
    values["finished"] = _added_pairs(one.finished, other.finished)
    values["adapters"] = _added_adapters(one.adapters, other.adapters)
    return Measurements(**values)


def _added_histograms(one: Histogram, other: Histogram) -> Histogram:
    if one.edges != other.edges:  # from a replica of another version, while replicas are upgraded
        return one
    return Histogram(one.edges, tuple(map(add, one.counts, other.counts)), one.total + other.total)


def _added_drafts(
    one: tuple[tuple[str, DraftCount], ...], other: tuple[tuple[str, DraftCount], ...]
) -> tuple[tuple[str, DraftCount], ...]:
    found = dict(one)
    for drafter, count in other:
        found[drafter] = DraftCount(*map(add, found.get(drafter, DraftCount()), count))
    return tuple(found.items())


def _added_pairs(one: tuple[tuple[str, int], ...], other: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    found = dict(one)
    for name, count in other:
        found[name] = found.get(name, 0) + count
    return tuple(found.items())


def _added_adapters(one: AdaptersInUse | None, other: AdaptersInUse | None) -> AdaptersInUse | None:
    if one is None or other is None:
        return one or other
    running, waiting = {*one.running, *other.running}, {*one.waiting, *other.waiting}
    return AdaptersInUse(max(one.most, other.most), tuple(sorted(running)), tuple(sorted(waiting)))
