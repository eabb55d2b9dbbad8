"""The process that computes, or forks processes that do: it carries out orders one by one until its connection closes.

Knows neither models nor kernels: a function that it is given builds the runner. A step that raises is reported, and the
process goes on. When the engine's process ends, this one ends at once, even in the middle of imports or of a step.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from penstock.contract.adapter import AdapterFacts
from penstock.contract.errors import ConfigError, SetupError
from penstock.contract.memory import RunnerFacts
from penstock.contract.model import ModelFacts
from penstock.contract.ports import Profiler, Runner
from penstock.freed_memory import REST_SECONDS, give_back
from penstock.remote import messages
from penstock.remote.connection import Closed, Connection

__all__ = ["Build", "ClosableRunner", "Prepare", "ending_with", "serve_orders"]


class ClosableRunner(Runner, Protocol):
    """A runner that may have something to save when it ends, and whose model may be adapted."""

    def load_adapter(self, name: str, path: str, digest: str = "") -> AdapterFacts:
        """As `AdaptingRunner.load_adapter`; refuses an adapter with a digest other than `digest`, unless that is ""."""
        ...

    def unload_adapter(self, name: str) -> None:
        """As `AdaptingRunner.unload_adapter`."""
        ...

    def close(self) -> None:
        """Save what must outlive the process, in a bounded time."""
        ...


Build = Callable[
    [messages.Load, Callable[[str], None], Callable[[ModelFacts], None]], tuple[ClosableRunner, RunnerFacts]
]
"""Loads a model; reports each line of the start report, and, once, what the model's files say. Raises SetupError."""


Prepare = Callable[[], tuple[Build, Profiler]]
"""Imports what computing needs, which takes seconds."""


def serve_orders(connection: Connection[messages.Order], prepare: Prepare) -> None:
    """Import everything, then carry out orders until the connection closes.

    The first order decides what this process is: a runner, which loads a model, or a zygote, which forks runners.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the engine, which ends this process itself
        signal.signal(number, signal.SIG_IGN)
    with ending_with(connection):
        build, profiler = prepare()
    try:
        order = connection.receive()
        if isinstance(order, messages.Fork):
            connection = _fork_as_told(connection, order)
            order = connection.receive()
        _call_itself("penstock-runner")
        with ending_with(connection):
            runner = _load(connection, order, build)
            if runner is not None:
                child = _Child(runner, profiler)
                while True:
                    connection.send(child.carry_out(_next_order(connection)))
    except Closed:
        os._exit(0)  # as the watcher does: a regular exit would take half a second, and memory


def _fork_as_told(connection: Connection[messages.Order], order: messages.Order) -> Connection[messages.Order]:
    """Act as a zygote: returns in each forked process, with that process's connection to the engine.

    Call only while this process has no other thread: a lock held by one would never be released in the forked process.
    """
    _call_itself("penstock-zygote")
    while True:
        match order:
            case messages.Fork():
                with connection.take_socket() as stream:
                    pid = _fork(connection)
                    if pid == 0:
                        os.setsid()
                        connection.close()
                        return Connection(socket.socket(fileno=stream.detach()), messages.Order)
            case messages.Reap(pid):
                connection.send(messages.Ended(_status_of(pid)))
            case _:
                raise Closed("a zygote was told to compute")
        order = connection.receive()


def _fork(connection: Connection[messages.Order]) -> int | None:
    """Fork: 0 in the new process; its id in this one, which reports it to the engine. None if it failed."""
    try:
        pid = os.fork()
    except OSError as error:
        connection.send(messages.Failed(str(error)))
        return None
    if pid:
        connection.send(messages.Forked(pid))
    return pid


def _status_of(pid: int) -> int | None:
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if ended else None


def _call_itself(name: str) -> None:
    """Set the name of this process in process lists, where the system can (Linux; 15 characters)."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name, encoding="ascii")


def _load(connection: Connection[messages.Order], order: messages.Order, build: Build) -> ClosableRunner | None:
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
    """Wait for the next order; after a while without one, give freed memory back to the system."""
    with suppress(TimeoutError):
        return connection.receive(REST_SECONDS)
    give_back()
    return connection.receive()


class _Child:
    """Carries out orders on one runner. Owned by `serve_orders`."""

    def __init__(self, runner: ClosableRunner, profiler: Profiler) -> None:
        self._runner = runner
        self._profiler = profiler
        self._profiling = False

    def carry_out(self, order: messages.Order) -> msgspec.Struct:
        """Carry out an order, and return the answer: `Failed` if it raises."""
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
            case messages.LoadAdapter(name, path, digest):
                try:
                    return messages.AdapterLoaded(self._runner.load_adapter(name, path, digest))
                except SetupError as error:
                    return messages.Refused("", str(error))
            case messages.UnloadAdapter(name):
                self._runner.unload_adapter(name)
            case messages.StartProfile():
                self._profiler.start()
                self._profiling = True
            case messages.StopProfile(path):
                self._profiling = False
                self._profiler.stop()(Path(path))
            case messages.Load() | messages.Fork() | messages.Reap():
                raise ValueError("a model is loaded already")
        return messages.Done()


@contextmanager
def ending_with(connection: Connection[Any]) -> Iterator[None]:
    """While in this context, end the process when its connection is closed, even in the middle of long work."""
    waits, stops = os.pipe()
    watcher = threading.Thread(target=_end_with, args=(connection.fileno(), waits), name="penstock-parent", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        os.close(stops)
        watcher.join()
        os.close(waits)


def _end_with(descriptor: int, unless: int) -> None:
    """End this process when `descriptor` hangs up; return when `unless` does."""
    poller = select.poll()
    for each in (descriptor, unless):
        poller.register(each, 0)  # errors and hang-ups are always reported
    if any(each == descriptor for each, _ in poller.poll()):
        os._exit(0)
