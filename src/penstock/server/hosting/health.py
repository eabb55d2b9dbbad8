"""Whether a server of several models works.

The process can serve as long as it answers: a model that is lost is loaded again. It is not ready while it stops, or
while the engine of a loaded model does not respond.
"""

from __future__ import annotations

import asyncio

from penstock.contract.ports import Health
from penstock.server.admin.readiness import STOPPING
from penstock.server.hosting.dispatch import Parts

__all__ = ["HostingReadiness", "health_of"]


class HostingReadiness:
    """See `probes.Condition`; `stopping` is set when the server begins to stop."""

    def __init__(self, parts: Parts, stopping: asyncio.Event) -> None:
        self._parts = parts
        self._stopping = stopping

    async def unready(self) -> str:
        """Why the server takes no work; "" if it does."""
        return self.known_unready() or await self.stuck()

    def known_unready(self) -> str:
        """As `unready`, without asking an engine."""
        return STOPPING if self._stopping.is_set() else ""

    def dead(self) -> str:
        """Never: a model whose engine has ended is loaded again."""
        return ""

    async def stuck(self) -> str:
        """Why an engine of a loaded model does not respond; "" while all do."""
        for part in self._parts.present():
            name = part.serving.card.name
            if self._parts.models.present(name) is not None and (reason := await part.stuck()):
                return f"{name}: {reason}"
        return ""


def health_of(parts: Parts) -> Health:
    """The sums over all models that have been loaded so far."""
    each = [part.serving.client.health() for part in parts.present()]
    counts = {
        name: sum(getattr(one, name) for one in each) for name in Health.__dataclass_fields__ if name not in _STATE
    }
    return Health(alive=True, reason="", **counts)


_STATE = {"alive", "reason"}
