"""Counts the tokens computed for each tenant since the start, when a sequence ends. Owned by the engine.

Decides how many tenants are remembered: callers of the Python API also name tenants, and may make up any number.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from penstock.contract.engine_views import TenantShare
from penstock.contract.request import SequenceRequest
from penstock.core.waiting import TenantLoad

__all__ = ["MOST_TENANTS", "TenantBook"]

MOST_TENANTS = 2048
"""More than a server may have keys."""


class _Served(NamedTuple):
    """A tenant's share, as its last request has it, and the tokens that were computed for it."""

    share: float
    tokens: int


class TenantBook:
    """See the module.

    Args:
        most: tenants that are remembered; beyond that, those with the fewest tokens are forgotten.
    """

    def __init__(self, most: int = MOST_TENANTS) -> None:
        self._most = most
        self._served: dict[str, _Served] = {}

    def ended(self, sequence: SequenceRequest, tokens: int) -> None:
        """Count a sequence that has ended, for which `tokens` tokens were computed."""
        before = self._served.get(sequence.tenant)
        self._served[sequence.tenant] = _Served(sequence.share, tokens + (0 if before is None else before.tokens))
        if len(self._served) > self._most:
            others = (tenant for tenant in self._served if tenant != sequence.tenant)
            del self._served[min(others, key=lambda tenant: self._served[tenant].tokens)]

    def shares(
        self, loads: dict[str, TenantLoad], live: Iterable[tuple[SequenceRequest, int]]
    ) -> tuple[TenantShare, ...]:
        """Every tenant that is remembered or has live sequences.

        Args:
            loads: how much runs and waits now, by tenant.
            live: live sequences, each with the number of tokens computed for it.
        """
        served = dict(self._served)
        for sequence, tokens in live:
            before = served.get(sequence.tenant, _Served(sequence.share, 0))
            served[sequence.tenant] = _Served(sequence.share, before.tokens + tokens)
        return tuple(
            TenantShare(tenant, served[tenant].share, *loads.get(tenant, TenantLoad()), served[tenant].tokens)
            for tenant in sorted(served)
        )
