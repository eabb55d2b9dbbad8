"""What ends a server besides signals, what clients that connect last get, and what it needs from the system."""

from __future__ import annotations

import os
import resource
import socket
import threading

import pytest

from penstock.contract.errors import ConfigError
from penstock.server import LastResort, unread_is_fine
from penstock.server.http import open_files
from penstock.server.http.listening import connections_that_wait, listen


def test_a_process_that_does_not_end_in_time_is_ended():
    ended, codes = threading.Event(), []

    def leave(code: int) -> None:
        codes.append(code)
        ended.set()

    LastResort(leave).within(0.01)
    assert ended.wait(30)
    assert codes == [1]


def test_one_that_has_ended_is_left_alone():
    codes: list[int] = []
    last_resort = LastResort(codes.append)
    last_resort.within(0.05)
    last_resort.cancel()
    sign = threading.Event()
    later = LastResort(lambda _: sign.set())
    later.within(0.2)
    assert sign.wait(30)
    assert codes == []


def test_connections_that_nobody_has_taken_are_found():
    with listen("127.0.0.1", 0) as listening:
        clients = [socket.create_connection(listening.getsockname()) for _ in range(5)]
        taken = list(connections_that_wait(listening))
        assert [each.getpeername() for each in taken] == [each.getsockname() for each in clients]
        assert list(connections_that_wait(listening)) == []
    for each in (*taken, *clients):
        each.close()


def test_a_stream_that_nobody_reads_is_silent_from_then_on():
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        os.close(reading)
        with unread_is_fine(stream):
            print("nobody reads this", file=stream, flush=True)
            pytest.fail("the pipe has a reader")
        print("nor this", file=stream, flush=True)


def test_more_open_files_are_asked_for_where_connections_need_them():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = len(os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 50, hard))
    try:
        assert open_files.connections_within_limits(100) == 100
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= taken + 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_that_may_open_hardly_any_files_says_which_limit_to_raise(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (16, 16))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: pytest.fail("there is no more to be had"))
    with pytest.raises(ConfigError, match=r"max_connections: this process may open 16 files.*ulimit -n"):
        open_files.connections_within_limits(100)
