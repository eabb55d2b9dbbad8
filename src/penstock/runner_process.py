"""The program of a runner's process, and of its zygote: `python -m penstock.runner_process DESCRIPTOR`.

Names concrete classes of several rooms, as `app`, `building` and `loading` do, and no other file.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from penstock.contract.memory import RunnerFacts
from penstock.contract.model import ModelFacts
from penstock.contract.ports import Profiler
from penstock.remote import Build, ClosableRunner, Connection, serve_orders
from penstock.remote.messages import Load, Order
from penstock.thread_turns import take_short_turns

__all__ = ["main"]


def main() -> None:
    """Take orders from the engine at the other end of a socket."""
    take_short_turns()
    faulthandler.enable()  # where it was when it crashed, or when it was ended because it hung
    connection: Connection[Order] = Connection(socket.socket(fileno=int(sys.argv[1])), Order)
    serve_orders(connection, _prepare)


def _prepare() -> tuple[Build, Profiler]:
    """Import torch, here and not above: meanwhile this process ends already if the engine's does.

    Nothing that is imported may start a thread: a zygote forks behind it.
    """
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # which numpy has, and nothing here multiplies with
    import penstock.building  # noqa: F401 - which `_build` imports when it is called
    from penstock.exec.profiler import TorchProfiler

    gc.freeze()  # what was imported stays as long as the process: nothing to be gone through again and again
    return _build, TorchProfiler()


def _build(
    order: Load, announce: Callable[[str], None], found: Callable[[ModelFacts], None]
) -> tuple[ClosableRunner, RunnerFacts]:
    from penstock.building import load_runner, read_facts
    from penstock.draft_loading import find_draft_model
    from penstock.loading import find_model
    from penstock.model_text import open_model_text

    cache_dir = Path(order.cache_dir)
    files = find_model(order.config, cache_dir)
    facts = read_facts(order.config, files, cache_dir)
    found(facts)
    runner, runner_facts, _, grammars = load_runner(
        order.config,
        files,
        open_model_text(order.config, facts.text),
        announce,
        order.like,
        find_draft_model(order.config, cache_dir),
    )
    if not runner_facts.looks_ahead:
        grammars.prepare()  # in the first step with a grammar, all streams would wait for it
    return runner, runner_facts


if __name__ == "__main__":
    main()
