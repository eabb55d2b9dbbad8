"""Servers of tests without their imports: processes forked from one that has imported what a server and a runner need.

Importing torch, FastAPI and what belongs to them takes a server and its runner three seconds of a processor, and tests
start dozens of servers. Here one process a worker imports it all and starts no thread. It forks a process for each
command line that it gets through a socket, with the standard streams, environment and folder of whoever asked; a forked
server has its runner forked in the same way. Everything else is what `python -m` would do.

The zygote of `penstock.remote` forks runners only, and multiprocessing's fork server would import anew for processes
that a forked one starts, as a server does its runner.

Only for servers whose processes nobody looks for by name, and whose environment says nothing that is read at import.
`popen` is used as `subprocess.Popen` is.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

PENSTOCK, RUNNER = "penstock", "penstock.runner_process"


class Forked:
    """A forked process: the part of `subprocess.Popen` that tests and `penstock.remote` use."""

    def __init__(self, connection: socket.socket, pid: int, stdout: IO[str] | None) -> None:
        self._connection = connection  # says the exit status when there is one
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.returncode = int(_received(self._connection))
            self._connection.close()
        return self.returncode

    def send_signal(self, sig: int, /) -> None:
        if self.poll() is None:  # it is not reaped before it is asked about, so this is the process that was forked
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.stdout is not None:
            self.stdout.close()
        self.wait()


def popen(arguments: Sequence[str], **environment: str) -> Forked:
    """`python -m penstock ARGUMENTS` with more in its environment; its output, errors too, is `stdout`."""
    reads, writes = os.pipe()
    forked = _fork(_address(), PENSTOCK, arguments, [writes, writes], {**os.environ, **environment})
    os.close(writes)
    return Forked(*forked, os.fdopen(reads, encoding="utf-8"))


@functools.cache
def _address() -> str:
    """Start the process that imports; where it listens. It ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="preloaded-")
    address = str(Path(folder.name) / "socket")
    process = subprocess.Popen(
        [sys.executable, __file__, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )

    def end() -> None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        folder.cleanup()

    atexit.register(end)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return address


def _fork(
    address: str, program: str, arguments: Sequence[str], descriptors: Sequence[int], environment: dict[str, str]
) -> tuple[socket.socket, int]:
    """Have a process forked.

    Args:
        address: where to ask for it.
        program: what it runs: `PENSTOCK` or `RUNNER`.
        arguments: the program's.
        descriptors: its standard output and errors, and any others; the program gets the number of these.
        environment: its own, all of it.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    order = {"program": program, "arguments": list(arguments), "environment": environment, "folder": str(Path.cwd())}
    socket.send_fds(connection, [json.dumps(order).encode()], list(descriptors))
    return connection, int(_received(connection))


def _received(connection: socket.socket) -> str:
    said = connection.recv(64).decode()
    assert said, "the process that forks is gone"
    return said


class _Parent:
    """The process that has imported everything. `forever` returns only in forked processes, with what they shall do."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(address)
        self._listener.listen(64)
        self._running: dict[int, socket.socket] = {}

    def forever(self) -> Callable[[], Any]:
        wakes, woken = os.pipe()
        os.set_blocking(woken, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("ready", flush=True)
        while True:
            ready = select.select([self._listener, wakes, sys.stdin], [], [])[0]
            if sys.stdin in ready:
                os._exit(0)
            if wakes in ready:
                os.read(wakes, 4096)
                self._report()
            if self._listener in ready and (task := self._fork()) is not None:
                return task

    def _report(self) -> None:
        for pid in list(self._running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with self._running.pop(pid) as connection, suppress(OSError):
                    connection.send(str(os.waitstatus_to_exitcode(status)).encode())

    def _fork(self) -> Callable[[], Any] | None:
        connection, _ = self._listener.accept()
        said, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 8)
        pid = os.fork()
        if pid:
            self._running[pid] = connection
            for each in descriptors:
                os.close(each)
            with suppress(OSError):
                connection.send(str(pid).encode())
            return None
        for each in (connection, self._listener, *self._running.values()):
            each.close()
        return functools.partial(_begin, self._address, json.loads(said), descriptors)


def _begin(address: str, order: dict[str, Any], descriptors: list[int]) -> None:
    """Be the program of an order, in a process that was forked for it."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, each in enumerate((nothing, *descriptors[:2])):
        os.dup2(each, number)
    for each in {nothing, *descriptors[:2]}:
        os.close(each)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    sys.argv = [order["program"], *order["arguments"], *map(str, descriptors[2:])]
    if order["program"] == RUNNER:
        from penstock.runner_process import main

        os.setsid()
    else:
        from penstock.cli import main

        _fork_runners_too(address)
    main()


def _fork_runners_too(address: str) -> None:
    from penstock.remote import runner, zygote
    from penstock.remote.process import RunnerProcess

    def start_program(program: Sequence[str]) -> RunnerProcess:
        assert tuple(program[1:]) == ("-m", RUNNER)
        ours, theirs = socket.socketpair()
        with theirs:
            forked = _fork(address, RUNNER, (), [1, 2, theirs.fileno()], dict(os.environ))
        return RunnerProcess(Forked(*forked, None), ours)

    runner.start_program = zygote.start_program = start_program


def _import_all() -> None:
    import gc

    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # as a runner does, for the same reason: forks follow
    gc.disable()
    import penstock.app
    import penstock.building
    import penstock.cli.serve
    import penstock.exec.profiler
    import penstock.runner_process
    import penstock.server_process  # noqa: F401

    gc.freeze()
    gc.enable()
    assert len(os.listdir("/proc/self/task")) == 1, "an import started a thread"


if __name__ == "__main__":
    _import_all()
    _Parent(sys.argv[1]).forever()()
