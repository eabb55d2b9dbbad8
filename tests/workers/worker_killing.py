"""Workers that are killed again and again, as by a system that is short of memory."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

__all__ = ["killed_again_and_again"]


@contextmanager
def killed_again_and_again(pids: Callable[[], tuple[int, ...]]) -> Iterator[None]:
    """Inside, every process that `pids` names is killed within a millisecond or two."""
    over = threading.Event()

    def kill() -> None:
        while not over.is_set():
            for pid in pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)

    with ThreadPoolExecutor(1) as threads:
        killer = threads.submit(kill)
        try:
            yield
        finally:
            over.set()
        killer.result()
