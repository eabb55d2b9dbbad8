"""A worker for tests: does what its order names."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from penstock.workers.child import serve_orders

MEMORY_BYTES = 64 * 1024 * 1024


def begin(hello: Any):
    deeds = {
        "echo": lambda value: [hello, value],
        "pid": lambda _: os.getpid(),
        "spin": spin,
        "power": lambda exponent: len(str(bool(9**exponent))),
        "burn": burn,
        "eat": lambda size: len(bytearray(size)),
        "abort": lambda _: os.abort(),
        "signal": lambda number: os.kill(os.getpid(), number) or time.sleep(60),
        "sleep": time.sleep,
        "niceness": lambda _: os.getpriority(os.PRIO_PROCESS, 0),
    }
    return lambda order: deeds[order[0]](order[1])


def burn(seconds: float) -> None:
    before = time.process_time()
    while time.process_time() - before < seconds:
        pass


def spin(_: Any) -> None:
    while True:
        pass


if __name__ == "__main__":
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
    sys.setrecursionlimit(200)
    serve_orders(begin, MEMORY_BYTES)
