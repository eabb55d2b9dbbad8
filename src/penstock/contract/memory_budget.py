"""A memory limit for all stores of a serving process, divided into fixed shares.

Shares are fixed so that no store can starve another, and none needs to know how full the others are. To stay within
its share, a cache (compiled grammars, resumable streams, stored answers, answers to guess from) drops its oldest
entries; requests are refused, and streams that are not read are ended, since they can be resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from penstock.contract.limits import ServerLimits

__all__ = ["DEFAULT_BYTES", "LEAST_BYTES", "STREAM_BYTES", "MemoryBudget"]

MIB = 1024 * 1024
DEFAULT_BYTES = 512 * MIB
LEAST_BYTES = 64 * MIB
"""With this limit, the share of requests holds one body of the largest size."""
STREAM_BYTES = 512
"""Size of what is remembered about a stream so that it can be resumed."""


class MemoryBudget:
    """The shares of one server, and how much of them is in use.

    Args:
        limit: bytes in all; 0 for `DEFAULT_BYTES`.
        on_rest: called, in any thread, when large requests have ended and no other has come.
    """

    def __init__(self, limit: int = 0, on_rest: Callable[[], None] = lambda: None) -> None:
        self.limit = limit or DEFAULT_BYTES
        self.on_rest = on_rest
        self._stores: dict[str, Callable[[], int]] = {}

    @property
    def requests(self) -> int:
        """Bytes for requests that are being read or answered: their bodies, and what they are parsed into."""
        return self.limit // 4

    @property
    def outputs(self) -> int:
        """Bytes for outputs that clients have not read yet."""
        return self.limit // 4

    @property
    def stored(self) -> int:
        """Bytes for stored responses, and the same again for stored chat completions."""
        return self.limit // 8

    @property
    def grammars(self) -> int:
        """Bytes for compiled grammars in all processes, and for verdicts on grammars."""
        return self.limit // 8

    @property
    def streams(self) -> int:
        """Bytes for resumable streams."""
        return self.limit // 64

    @property
    def recent_answers(self) -> int:
        """Bytes for earlier answers that the next ones are guessed from."""
        return self.limit // 32

    def applied(self, limits: ServerLimits) -> ServerLimits:
        """`limits` with the shares of the stores that they limit."""
        most = max(1, self.streams // STREAM_BYTES)
        return replace(limits, max_stored_bytes=self.stored, max_resumable_streams=most)

    def watch(self, store: str, taken: Callable[[], int]) -> None:
        """Register a store; `taken`, called from any thread, returns how many bytes it takes now."""
        self._stores[store] = taken

    def taken(self) -> Iterator[tuple[str, int]]:
        """(name, bytes) of each registered store."""
        for store, taken in self._stores.items():
            yield store, taken()
