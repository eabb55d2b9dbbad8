"""The worker's side: takes orders until nobody is there to give any, and holds itself to its budgets.

The system enforces them, so that no C code between two bytecodes can put them off: a timer of processor time kills the
process, and memory beyond the limit is not given. What ends this process says nothing of the engine's.

A line each: first what the worker begins with, as JSON; then orders, each the seconds of processor time that it may
take, a space, and JSON. An answer is a line of JSON.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.thread_turns import NICENESS

__all__ = ["OUT_OF_MEMORY", "address_space", "limit_time", "serve_orders"]

OUT_OF_MEMORY = 70
"""Exit status of a worker that was not given the memory it asked for."""


def serve_orders(begin: Callable[[Any], Callable[[Any], Any]], memory_bytes: int) -> None:
    """Answer what comes on standard input, until it ends.

    Args:
        begin: makes of the first line what answers the others.
        memory_bytes: address space that answering may take, beyond what there is once `begin` is done.
    """
    threading.Thread(target=_end_with_parent, name="penstock-parent", daemon=True).start()
    os.nice(NICENESS)
    threading.Thread(target=_lower_session, name="penstock-session", daemon=True).start()
    try:
        answer = begin(json.loads(sys.stdin.buffer.readline()))
        _limit_memory(memory_bytes)
        for line in sys.stdin.buffer:
            sys.stdout.buffer.write(_answered(answer, line))
            sys.stdout.buffer.flush()
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BrokenPipeError:  # nobody waits for the answer any more
        os._exit(0)


def limit_time(seconds: float) -> None:
    """Have this process killed (SIGPROF) when it has used so many more seconds of processor time; 0 for no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def address_space() -> int:
    """Bytes of this process's address space; 0 where the system does not tell."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[0]) * resource.getpagesize() if statm.exists() else 0


def _answered(answer: Callable[[Any], Any], line: bytes) -> bytes:
    seconds, _, order = line.partition(b" ")
    limit_time(float(seconds))
    written = json.dumps(answer(json.loads(order))).encode() + b"\n"
    limit_time(0)
    return written


def _limit_memory(memory_bytes: int) -> None:
    used = address_space()
    if used:
        resource.setrlimit(resource.RLIMIT_AS, (used + memory_bytes, used + memory_bytes))


def _lower_session() -> None:
    """Lower the priority of this process's session too.

    Linux may share processors equally among sessions (autogroup); niceness then decides only within one.
    """
    while True:
        try:
            Path("/proc/self/autogroup").write_text(str(NICENESS))
        except BlockingIOError:  # an ordinary user may change one in a tenth of a second, and workers start together
            time.sleep(0.1)
        except OSError:  # this system does not share by session, or does not allow the change
            return
        else:
            return


def _end_with_parent() -> None:
    """End this process when the other end of its connection is closed: it may be at work for long."""
    poller = select.poll()
    poller.register(sys.stdin.fileno(), 0)  # errors and hang-ups are always told
    poller.poll()
    os._exit(0)
