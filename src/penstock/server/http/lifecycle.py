"""What whoever runs an application must know of it: how it hears of the end, and what its probes say."""

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
    """One application's.

    Attributes:
        stopping: set when the server begins to stop: from then on new work is refused, and streams that would never
            end by themselves do.
        probes: the application on the port for probes.
        stuck: says why the engine does not answer; "" while it does, which it may while the server stops too.
        refused: counts what was refused before the application heard of it.
        known_refusals: what can be refused without it.
    """

    stopping: asyncio.Event
    probes: ASGIApp
    stuck: Callable[[], Awaitable[str]]
    refused: Callable[[RefusalCause], None]
    known_refusals: KnownRefusals


def set_lifecycle(app: Starlette, lifecycle: Lifecycle) -> None:
    """Attach it to `app`."""
    app.state.lifecycle = lifecycle


def lifecycle_of(app: ASGIApp) -> Lifecycle | None:
    """What is attached to `app`; None for an application that needs to know nothing."""
    return getattr(app.state, "lifecycle", None) if isinstance(app, Starlette) else None
