"""Writes a request's life as Chrome trace events, for https://ui.perfetto.dev: the steps, and its part of each.

The format is the same as in `engine.profile`. Each sequence has a track with the intervals of its life, which are steps
or the time between steps, and a track below it with the parts of each interval, coloured by part. The order of the
parts within an interval is not known: they are drawn one after the other.
"""

from __future__ import annotations

from typing import Any

from penstock.latency.recorded import Life, Lives

__all__ = ["trace_events"]

PROCESS = 1
Event = dict[str, Any]

_COLOURS = {
    "queue": "grey",
    "prompt": "thread_state_running",
    "other_prompts": "bad",
    "decode": "good",
    "other_decodes": "yellow",
    "preempted": "terrible",
    "recovery": "terrible",
    "grammar": "olive",
    "left_out": "black",
}


def trace_events(lives: Lives) -> Event:
    """The file's contents; times count from the first arrival."""
    began = min(life.arrived for life in lives.all)
    events: list[Event] = [_named("process_name", 0, "Penstock")]
    for number, life in enumerate(lives.all):
        events += _tracks(life, 2 * number, began)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _tracks(life: Life, track: int, began: float) -> list[Event]:
    """The two tracks of a sequence."""
    events = [_named("thread_name", track, life.id), _named("thread_name", track + 1, f"{life.id}: parts")]
    for tile in life.tiles:
        since = tile.began - began
        args = {"plan": tile.told, "ms": {name: round(1000 * seconds, 3) for name, seconds in tile.parts}}
        events.append(_span(tile.name, track, since, tile.ended - tile.began, args))
        for name, seconds in tile.parts:
            event = _span(name, track + 1, since, seconds, {"interval": tile.name})
            events.append(event | {"cname": _COLOURS[name]} if name in _COLOURS else event)
            since += seconds
    return events


def _span(name: str, track: int, since: float, seconds: float, args: Event) -> Event:
    of_time = {"ts": round(1e6 * since, 3), "dur": round(1e6 * seconds, 3)}
    return {"name": name, "ph": "X", "pid": PROCESS, "tid": track, **of_time, "args": args}


def _named(kind: str, track: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": PROCESS, "tid": track, "args": {"name": name}}
