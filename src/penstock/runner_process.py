"""The program of a runner's process, and of its zygote: `python -m penstock.runner_process DESCRIPTOR`.

Names concrete classes of several rooms, as `app`, `building` and `loading` do.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from penstock.contract.memory import RunnerFacts
from penstock.contract.model import ModelFacts
from penstock.contract.ports import Profiler
from penstock.imports import lasting_imports
from penstock.remote import Build, ClosableRunner, Connection, serve_orders
from penstock.remote.messages import Load, Order
from penstock.thread_turns import take_short_turns

__all__ = ["main"]


def main() -> None:
    """Carry out orders from the engine at the other end of a socket."""
    take_short_turns()
    faulthandler.enable()  # dump stacks after a crash, or when the process is ended because it hung
    connection: Connection[Order] = Connection(socket.socket(fileno=int(sys.argv[1])), Order)
    serve_orders(connection, _prepare)


def _prepare() -> tuple[Build, Profiler]:
    """Import torch here, not at the top, so that this process ends with the engine's even during the import.

    No import may start a thread, because a zygote forks afterwards.
    """
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy brings OpenBLAS, which nothing here uses
    with lasting_imports():
        import penstock.building  # noqa: F401 - `_build` imports from it when called
        from penstock.exec.profiler import TorchProfiler
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
    runner, runner_facts, loaded, grammars = load_runner(
        order.config,
        files,
        open_model_text(order.config, facts.text),
        announce,
        order.like,
        find_draft_model(order.config, cache_dir),
    )
    if loaded.ranks is not None:
        loaded.ranks.ends_process = True
    if not runner_facts.looks_ahead:
        grammars.prepare()  # otherwise the first grammar would stall all streams
    return runner, runner_facts


if __name__ == "__main__":
    main()
