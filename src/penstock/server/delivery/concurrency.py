"""Limit how many requests of one API key are answered at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.contract.errors import Overloaded, RefusalCause

__all__ = ["Concurrency"]


class Concurrency:
    """Counts the requests of each tenant. Confined to one event loop."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    @contextmanager
    def one_more(self, tenant: str, most: int) -> Iterator[None]:
        """Count a request of `tenant` until the block ends; `most` is its limit (0 for none).

        Raises:
            Overloaded: the tenant is at its limit.
        """
        if most and self._counts[tenant] >= most:
            message = f"{most} requests with this API key are being answered already; it may have no more at once."
            raise Overloaded(message, cause=RefusalCause.CONCURRENCY)
        self._counts[tenant] += 1
        try:
            yield
        finally:
            self._counts[tenant] -= 1
            if not self._counts[tenant]:
                del self._counts[tenant]
