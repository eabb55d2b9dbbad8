"""The worker's side: answers orders within their budgets until its owner is gone.

The operating system enforces the budgets, so that no long call of C code can evade them: a CPU timer kills the process,
and memory beyond the limit is refused. The engine's process survives the end of this one.

Each message is one line. The first is the value for `begin`, as JSON. Then come orders: the seconds of CPU time that
the order may take, a space, and JSON. Each answer is a line of JSON.
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
"""Exit status of a worker that was refused memory."""


def serve_orders(begin: Callable[[Any], Callable[[Any], Any]], memory_bytes: int) -> None:
    """Answer orders from standard input until its end.

    Args:
        begin: takes the value of the first line and returns the function that answers orders.
        memory_bytes: how much the address space may grow after `begin` has returned.
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
    except BrokenPipeError:  # the owner does not read answers any more
        os._exit(0)


def limit_time(seconds: float) -> None:
    """Have this process killed (SIGPROF) when it has used `seconds` more of CPU time; 0 for no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def address_space() -> int:
    """Bytes of this process's address space; 0 if the system does not report it."""
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

    Linux may share processors equally among sessions (autogroup); niceness then counts only within a session.
    """
    while True:
        try:
            Path("/proc/self/autogroup").write_text(str(NICENESS))
        except BlockingIOError:  # unprivileged users may change one per 0.1 s, and workers start together
            time.sleep(0.1)
        except OSError:  # this system does not share by session, or does not allow the change
            return
        else:
            return


def _end_with_parent() -> None:
    """End this process when its owner closes the connection, even in the middle of a long order."""
    poller = select.poll()
    poller.register(sys.stdin.fileno(), 0)  # errors and hang-ups are always reported
    poller.poll()
    os._exit(0)
