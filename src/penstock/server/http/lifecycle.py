"""What the server needs from the application that it runs: a stop event, its probes, and how to count refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.types import ASGIApp

from penstock.contract.errors import RefusalCause
from penstock.server.http.known_refusals import KnownRefusals

__all__ = ["Lifecycle", "lifecycle_of", "set_lifecycle"]


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """The hooks of one application.

    Attributes:
        stopping: set when the server begins to stop: from then on new work is refused, and endless streams end.
        probes: the application on the probe port.
        stuck: returns why the engine does not respond; "" while it does, even if the server is stopping.
        refused: counts a refusal that the application does not see.
        known_refusals: refusals that can be repeated without the application.
    """

    stopping: asyncio.Event
    probes: ASGIApp
    stuck: Callable[[], Awaitable[str]]
    refused: Callable[[RefusalCause], None]
    known_refusals: KnownRefusals


def set_lifecycle(app: Starlette, lifecycle: Lifecycle) -> None:
    """Attach a lifecycle to `app`."""
    app.state.lifecycle = lifecycle


def lifecycle_of(app: ASGIApp) -> Lifecycle | None:
    """The lifecycle attached to `app`; None if there is none."""
    return getattr(app.state, "lifecycle", None) if isinstance(app, Starlette) else None
