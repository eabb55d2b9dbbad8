"""The program of a runner's process: `python -m penstock.runner_process DESCRIPTOR`, started by `remote.ProcessRunner`.

Names concrete classes of several rooms, as `app`, `building` and `loading` do, and no other file.
"""

from __future__ import annotations

import faulthandler
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from penstock.contract.memory import RunnerFacts
from penstock.contract.ports import Runner
from penstock.remote import Connection, serve_orders
from penstock.remote.messages import Load, Order

__all__ = ["RUNNER_PROGRAM", "main"]

RUNNER_PROGRAM = (sys.executable, "-m", "penstock.runner_process")


def main() -> None:
    """Take orders from the engine at the other end of a socket."""
    faulthandler.enable()  # where it was when it crashed, or when it was ended because it hung
    from penstock.exec.profiler import (
        TorchProfiler,
    )  # not above: the engine's process reads this file for its name alone

    connection: Connection[Order] = Connection(socket.socket(fileno=int(sys.argv[1])), Order)
    serve_orders(connection, _build, TorchProfiler())


def _build(order: Load, announce: Callable[[str], None]) -> tuple[Runner, RunnerFacts]:
    from penstock.building import load_runner, open_model_text
    from penstock.loading import find_model

    cache_dir = Path(order.cache_dir)
    files = find_model(order.config, cache_dir)
    text = open_model_text(order.config, files, cache_dir)
    runner, facts, _, _ = load_runner(order.config, files, text, announce, order.like)
    return runner, facts


if __name__ == "__main__":
    main()
