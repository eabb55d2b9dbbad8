"""The process that computes: it takes orders, one after the other, until nobody is there to give any.

Knows neither models nor kernels: what it runs is made by the function that it is given. A step that raises is reported,
and the process goes on; when the engine's process ends, it ends at once, in the middle of a step too.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Protocol

import msgspec

from penstock.contract.errors import ConfigError, SetupError
from penstock.contract.memory import RunnerFacts
from penstock.contract.model import ModelFacts
from penstock.contract.ports import Profiler, Runner
from penstock.freed_memory import REST_SECONDS, give_back
from penstock.remote import messages
from penstock.remote.connection import Closed, Connection

__all__ = ["Build", "ClosableRunner", "Prepare", "serve_orders"]


class ClosableRunner(Runner, Protocol):
    """A runner that may have something to save when it ends."""

    def close(self) -> None:
        """Save what is to be kept beyond the process, in a bounded time."""
        ...


Build = Callable[
    [messages.Load, Callable[[str], None], Callable[[ModelFacts], None]], tuple[ClosableRunner, RunnerFacts]
]
"""Loads what is ordered; says each line of the start report, and once what the model's files say. Raises SetupError."""


Prepare = Callable[[], tuple[Build, Profiler]]
"""Imports what computing needs, which takes seconds."""


def serve_orders(connection: Connection[messages.Order], prepare: Prepare) -> None:
    """Load what the first order says, then carry out orders until the connection ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the engine, which ends this process by the connection
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(connection.fileno(),), name="penstock-parent", daemon=True).start()
    build, profiler = prepare()
    try:
        runner = _load(connection, build)
        if runner is not None:
            child = _Child(runner, profiler)
            while True:
                connection.send(child.carry_out(_next_order(connection)))
    except Closed:
        return


def _load(connection: Connection[messages.Order], build: Build) -> ClosableRunner | None:
    order = connection.receive()
    if not isinstance(order, messages.Load):
        raise Closed("the first order was not to load a model")
    try:
        runner, facts = build(
            order,
            lambda line: connection.send(messages.Said(line)),
            lambda found: connection.send(messages.Found.of(found)),
        )
    except SetupError as error:
        option = error.option if isinstance(error, ConfigError) else ""
        connection.send(messages.Refused(option, str(error).removeprefix(f"{option}: ")))
        return None
    connection.send(messages.Ready(facts))
    return runner


def _next_order(connection: Connection[messages.Order]) -> messages.Order:
    """Wait for it, and use the time if it is long."""
    with suppress(TimeoutError):
        return connection.receive(REST_SECONDS)
    give_back()
    return connection.receive()


class _Child:
    """Carries out orders to one runner. Owned by `serve_orders`."""

    def __init__(self, runner: ClosableRunner, profiler: Profiler) -> None:
        self._runner = runner
        self._profiler = profiler
        self._profiling = False

    def carry_out(self, order: messages.Order) -> msgspec.Struct:
        """The answer; what an order raises is one."""
        try:
            return self._answer(order)
        except Exception:
            return messages.Failed(traceback.format_exc())

    def _answer(self, order: messages.Order) -> messages.Answer:
        match order:
            case messages.Run(plan):
                with self._profiler.span("run") if self._profiling else nullcontext():
                    return messages.Ran(self._runner.run(plan))
            case messages.Reset():
                self._runner.reset()
            case messages.Close():
                self._runner.close()
            case messages.StartProfile():
                self._profiler.start()
                self._profiling = True
            case messages.StopProfile(path):
                self._profiling = False
                self._profiler.stop()(Path(path))
            case messages.Load():
                raise ValueError("a model is loaded already")
        return messages.Done()


def _end_with(descriptor: int) -> None:
    """End this process when the other end of its connection is closed: a kernel may be at work for long."""
    poller = select.poll()
    poller.register(descriptor, 0)  # errors and hang-ups are always told
    poller.poll()
    os._exit(0)
