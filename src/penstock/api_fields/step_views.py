"""The engine's steps as JSON: their times in milliseconds, and what each computed."""

from __future__ import annotations

from penstock.api_fields.strict_json import JsonObject
from penstock.contract.engine_views import StepView

__all__ = ["STEP_TIMES", "step_object"]

STEP_TIMES = ("decode", "prompts", "drafting", "restored", "engine", "foreseen")
"""Fields of a `StepView` that are seconds; JSON has each as `NAME_ms`."""

_COUNTS = ("decoding", "drafted", "chunk", "read", "waiting")


def step_object(view: StepView) -> JsonObject:
    """A step as JSON; with `own_decode_ms`, `own_prompts_ms` and `own_positions` if a request was asked about."""
    body: JsonObject = {"step": view.step, "at": round(view.at, 6)}
    body |= {f"{name}_ms": _ms(getattr(view, name)) for name in STEP_TIMES}
    body |= {name: getattr(view, name) for name in _COUNTS}
    body["stall"] = None if view.stall is None else view.stall._asdict()
    if view.own is not None:
        body |= {"own_decode_ms": _ms(view.own.decode), "own_prompts_ms": _ms(view.own.prompts)}
        body["own_positions"] = view.own.positions
    return body


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3) + 0.0  # + 0.0 turns a rounded -0.0 into 0.0
