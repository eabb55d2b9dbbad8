"""How streams that would never end by themselves learn that the server is about to stop.

The web server waits for every answer to finish before it stops, and a stream of engine events has no last one: without
this, one open page would hold up an orderly stop until the drain's time limit.
"""

from __future__ import annotations

import asyncio

from starlette.applications import Starlette
from starlette.types import ASGIApp

__all__ = ["announce_stop", "set_stopping_event"]


def set_stopping_event(app: Starlette, stopping: asyncio.Event) -> None:
    """Say which event `app`'s endless streams wait for."""
    app.state.stopping = stopping


def announce_stop(app: ASGIApp) -> None:
    """Set the event of `app`, if it has one. Called on the event loop that serves `app`."""
    if isinstance(app, Starlette) and hasattr(app.state, "stopping"):
        stopping: asyncio.Event = app.state.stopping
        stopping.set()
