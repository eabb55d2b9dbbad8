"""systemd is told when the server is ready, that it lives, and when it stops."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from scripted_engine import ScriptedEngine
from server_harness import start

from penstock.contract.limits import ServerLimits
from penstock.server import open_notifier
from penstock.server.http.access import Access
from penstock.server.http.systemd import NOBODY

PATIENCE = 30.0


class Manager:
    """A service manager's end of the socket."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        self.socket.settimeout(PATIENCE)
        self.environ = {"NOTIFY_SOCKET": address}

    def hear(self) -> list[str]:
        """The lines of the next message."""
        return self.socket.recv(4096).decode().split("\n")

    def hear_until(self, wanted: Callable[[str], bool]) -> list[str]:
        """Every line up to one that is wanted."""
        last, lines = time.monotonic() + PATIENCE, []
        while not (lines and wanted(lines[-1])):
            assert time.monotonic() < last, lines
            lines += self.hear()
        return lines


ADDRESSES = ["path", *(["abstract"] if sys.platform == "linux" else [])]


@pytest.fixture(params=ADDRESSES)
def manager(request) -> Iterator[Manager]:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is too long a name for a socket
        path = str(Path(folder) / "notify")
        manager = Manager(path if request.param == "path" else f"@penstock-test-{os.getpid()}{path}")
        with manager.socket:
            yield manager


def test_it_is_told_of_the_beginning_and_the_end(manager):
    url, server, thread = start(ScriptedEngine(), notifier=open_notifier(manager.environ))
    assert manager.hear() == ["READY=1", f"STATUS=serving at {url}"]
    server.stop()
    thread.join(PATIENCE)
    assert manager.hear() == ["STOPPING=1", "STATUS=finishing 0 answers"]
    manager.socket.settimeout(0.01)
    with pytest.raises(TimeoutError):  # no signs of life: the unit wants none
        manager.hear()


def test_signs_of_life_come_while_the_engine_answers(manager):
    engine = ScriptedEngine()
    environ = manager.environ | {"WATCHDOG_USEC": "40000", "WATCHDOG_PID": str(os.getpid())}
    access = Access(limits=ServerLimits(heartbeat_seconds=0.01))
    url, server, thread = start(engine, access=access, notifier=open_notifier(environ))
    for _ in range(3):
        manager.hear_until(lambda line: line == "WATCHDOG=1")
    engine.stuck = True
    manager.hear_until(lambda line: line.startswith("STATUS=not ready: the engine has taken no message"))
    manager.socket.settimeout(0.3)
    with pytest.raises(TimeoutError):
        manager.hear()
    server.stop()
    thread.join(PATIENCE)
    assert manager.hear()[0] == "STOPPING=1"
    assert url


def test_an_engine_that_answers_again_is_said_to_serve(manager):
    engine = ScriptedEngine(state=ScriptedEngine().state)
    environ = manager.environ | {"WATCHDOG_USEC": "40000"}
    watch = _Watch()
    url, server, thread = start(engine, watch=watch, notifier=open_notifier(environ))
    watch.late = "step 3 has taken 7 s"
    manager.hear_until(lambda line: line == "STATUS=not ready: step 3 has taken 7 s")
    watch.late = ""
    manager.hear_until(lambda line: line == f"STATUS=serving at {url}")
    server.stop()
    thread.join(PATIENCE)


class _Watch:
    late = ""

    def overdue(self) -> str:
        return self.late

    def lost(self) -> str:
        return ""

    def began(self) -> float:
        return float("inf")


def test_signs_that_another_process_is_to_give_are_not_given(manager):
    environ = manager.environ | {"WATCHDOG_USEC": "20000", "WATCHDOG_PID": "1"}
    _, server, thread = start(ScriptedEngine(), notifier=open_notifier(environ))
    assert manager.hear()[0] == "READY=1"
    manager.socket.settimeout(0.2)
    with pytest.raises(TimeoutError):
        manager.hear()
    server.stop()
    thread.join(PATIENCE)


def test_without_a_manager_nobody_is_told(caplog):
    assert open_notifier({}) is NOBODY
    assert open_notifier({"NOTIFY_SOCKET": "vsock:2:1234"}) is NOBODY
    assert "vsock:2:1234" in caplog.text
    NOBODY.ready("nothing")


def test_a_manager_that_is_gone_is_no_reason_to_fail(caplog):
    open_notifier({"NOTIFY_SOCKET": "/nowhere/at/all"}).ready("serving")
    assert "systemd could not be told READY=1" in caplog.text


def test_a_status_is_one_line(manager):
    open_notifier(manager.environ).status("two\nlines\nREADY=1")
    assert manager.hear() == ["STATUS=two lines READY=1"]
