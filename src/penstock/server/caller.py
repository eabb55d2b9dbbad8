"""On whose behalf a request comes: which API key, and what follows from it for the engine.

Decides the tenant and the prefix-cache salt of every ask. A salt is an HMAC (RFC 2104) of what the caller gave as
`cache_salt`, keyed by the digest of the API key: callers with different keys never share cached KV, and what reaches
the engine tells neither the key nor the caller's salt. Knows no routes.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, replace

from starlette.types import Scope

from penstock.contract.request import EngineRequest
from penstock.server.exchange import Exchange

__all__ = ["Caller", "caller_of"]

SCOPE_KEY = "penstock.caller"
NAME_CHARS = 16


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks.

    Attributes:
        digest: SHA-256 of the API key; empty where the server has no keys.
        admin: whether the admin routes are open to it.
    """

    digest: bytes = b""
    admin: bool = True

    @property
    def name(self) -> str:
        """Stands for the key where one caller must be told from another; says nothing of the key itself."""
        return hmac.new(self.digest, b"name", hashlib.sha256).hexdigest()[:NAME_CHARS] if self.digest else ""

    def bind(self, exchange: Exchange) -> Exchange:
        """The exchange on this caller's behalf."""
        if not self.digest:
            return exchange
        return replace(exchange, asks=tuple(map(self._bind, exchange.asks)))

    def _bind(self, ask: EngineRequest) -> EngineRequest:
        salt = hmac.new(self.digest, b"salt:" + ask.cache_salt.encode(), hashlib.sha256).hexdigest()
        return replace(ask, tenant=self.name, cache_salt=salt)


def caller_of(scope: Scope) -> Caller:
    """The caller of a request that the guard has let through."""
    caller: Caller = scope.get(SCOPE_KEY, Caller())
    return caller
