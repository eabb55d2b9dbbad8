"""How streams that would never end by themselves learn that the server is about to stop.

Decides nothing. Without it, one open page would hold up an orderly stop until the drain's time limit: the web server
waits for every answer to finish, and a stream of events has no last one.
"""

from __future__ import annotations

import asyncio

from starlette.applications import Starlette
from starlette.types import ASGIApp

__all__ = ["announce_stop", "stopping_event"]


def stopping_event(app: Starlette) -> asyncio.Event:
    """The event that is set when `app`'s server begins to stop; always the same one for an application."""
    if not hasattr(app.state, "stopping"):
        app.state.stopping = asyncio.Event()
    event: asyncio.Event = app.state.stopping
    return event


def announce_stop(app: ASGIApp) -> None:
    """Set the event. Called on the event loop that serves `app`; other applications than ours have none."""
    if isinstance(app, Starlette):
        stopping_event(app).set()
