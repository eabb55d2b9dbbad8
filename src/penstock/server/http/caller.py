"""The caller of a request, identified by API key, and its tenant and prefix-cache salt.

The salt that reaches the engine is an HMAC (RFC 2104) of the caller's `cache_salt`, keyed by the digest of the API key.
So callers with different keys never share cached KV, and the engine learns neither the key nor the caller's salt. Only
a gateway's salts are passed on unchanged: it separates its own callers by them, and recognises them in KV events.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, replace

from starlette.types import Scope

from penstock.contract.request import EngineRequest

__all__ = ["Caller", "caller_of"]

SCOPE_KEY = "penstock.caller"
NAME_CHARS = 16


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request.

    Attributes:
        digest: SHA-256 of the API key; empty if the server has no keys.
        admin: whether it may use the admin routes.
        share: its share of the machine under the `fair` policy, relative to callers with 1.
        concurrent: how many of its requests may run at once; 0 for no limit.
        gateway: whether it sends requests for callers of its own, which it separates by `cache_salt`.
    """

    digest: bytes = b""
    admin: bool = True
    share: float = 1.0
    concurrent: int = 0
    gateway: bool = False

    @property
    def name(self) -> str:
        """An id that tells callers apart without revealing their keys; "" if the server has no keys."""
        return hmac.new(self.digest, b"name", hashlib.sha256).hexdigest()[:NAME_CHARS] if self.digest else ""

    def bind(self, request: EngineRequest) -> EngineRequest:
        """`request` with this caller's tenant, share and salt; unchanged if the server has no keys."""
        if not self.digest:
            return request
        salt = request.cache_salt
        if not self.gateway:
            salt = hmac.new(self.digest, b"salt:" + salt.encode(), hashlib.sha256).hexdigest()
        return replace(request, tenant=self.name, share=self.share, cache_salt=salt)


def caller_of(scope: Scope) -> Caller:
    """The caller of a request that the guard has let through."""
    caller: Caller = scope.get(SCOPE_KEY, Caller())
    return caller
