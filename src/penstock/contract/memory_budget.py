"""A ceiling on what the stores of a serving process take together, handed out to them in fixed shares.

Fixed, so that none can starve another, and no store has to know what the others hold. What only caches something
(compiled grammars, streams that could be resumed, stored answers) drops the oldest of it to stay within its share; what
somebody waits for is refused (requests) or ended where it can be had again (streams that nobody reads).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from penstock.contract.limits import ServerLimits

__all__ = ["DEFAULT_BYTES", "LEAST_BYTES", "STREAM_BYTES", "MemoryBudget"]

MIB = 1024 * 1024
DEFAULT_BYTES = 512 * MIB
LEAST_BYTES = 64 * MIB
"""A share of requests that takes one of the largest bodies."""
STREAM_BYTES = 512
"""What is remembered of a stream, so that it can be resumed."""


class MemoryBudget:
    """The shares of one server, and what is taken of them.

    Args:
        limit: bytes in all; 0 takes `DEFAULT_BYTES`.
        on_rest: called in some thread when large requests are over and nobody sends another.
    """

    def __init__(self, limit: int = 0, on_rest: Callable[[], None] = lambda: None) -> None:
        self.limit = limit or DEFAULT_BYTES
        self.on_rest = on_rest
        self._stores: dict[str, Callable[[], int]] = {}

    @property
    def requests(self) -> int:
        """Bytes for the bodies of requests that are being read or answered, and what is made of them."""
        return self.limit // 4

    @property
    def outputs(self) -> int:
        """Bytes for outputs that wait for readers."""
        return self.limit // 4

    @property
    def stored(self) -> int:
        """Bytes for stored responses, and as many for stored chat completions."""
        return self.limit // 8

    @property
    def grammars(self) -> int:
        """Bytes for compiled grammars, wherever they are compiled, and what is known of others."""
        return self.limit // 8

    @property
    def streams(self) -> int:
        """Bytes for the streams that may be resumed."""
        return self.limit // 64

    def applied(self, limits: ServerLimits) -> ServerLimits:
        """`limits` with the shares of the stores that they bound."""
        most = max(1, self.streams // STREAM_BYTES)
        return replace(limits, max_stored_bytes=self.stored, max_resumable_streams=most)

    def watch(self, store: str, taken: Callable[[], int]) -> None:
        """Have `taken` say, from any thread, how many bytes a store takes now."""
        self._stores[store] = taken

    def taken(self) -> Iterator[tuple[str, int]]:
        """(store, bytes) of each that is watched."""
        for store, taken in self._stores.items():
            yield store, taken()
