"""Listening, draining, ending."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time

import httpx
import pytest
from scripted_engine import ScriptedEngine, Wait, always, delta
from server_harness import CARD, LIMITS, start
from sse_reader import read_events

from penstock.contract.errors import ConfigError
from penstock.contract.server_config import ServerConfig
from penstock.server import End, create_app, run
from penstock.server.http import run as run_module
from penstock.server.http.listening import listen
from penstock.server.http.run import Server


def test_what_outlasts_the_drain_gets_an_error_and_is_aborted():
    engine = ScriptedEngine(script=lambda request: (delta("x"), Wait()) if request.n == 1 else (Wait(),))
    url, server, thread = start(engine, drain_seconds=1)
    body = {"prompt": "a", "stream": True}
    whole: list[httpx.Response] = []
    plain = threading.Thread(
        target=lambda: whole.append(httpx.post(f"{url}/v1/completions", json={"prompt": "a", "n": 2}, timeout=10))
    )
    plain.start()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=10) as response:
        pieces = response.iter_raw()
        content = next(pieces)
        engine.wait_until(lambda: len(engine.live) == 2)
        server.stop()
        content += b"".join(pieces)
    plain.join(10)
    thread.join(10)
    assert not thread.is_alive()
    events = [event.data for event in read_events(content)]
    assert json.loads(events[-2])["error"]["code"] == "shutting_down"
    assert events[-1] == "[DONE]"
    assert whole[0].status_code == 503
    assert whole[0].headers["retry-after"] == "5"
    assert len(engine.left) == 2
    assert not engine.live


def test_a_port_in_use_is_said_in_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port: cannot listen on 127.0.0.1, port {port}: Address already in use"):
            run(lambda scope, receive, send: None, ServerConfig(port=port), print)


def test_a_host_that_is_none_is_said_in_one_line():
    with pytest.raises(ConfigError, match="host"):
        run(lambda scope, receive, send: None, ServerConfig(host="no such host", port=0), print)


def test_answers_of_two_writes_do_not_wait_for_acknowledgements():
    nodelay: list[int] = []

    class Recorder(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            nodelay.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            transport.close()

    async def accept_one() -> None:
        listening = listen("127.0.0.1", 0)
        accepting = await asyncio.get_running_loop().create_server(Recorder, sock=listening)
        async with accepting:
            _, writer = await asyncio.open_connection(*listening.getsockname())
            writer.close()
            await writer.wait_closed()
            while not nodelay:
                await asyncio.sleep(0.005)

    asyncio.run(accept_one())
    assert nodelay[0] != 0


def test_the_default_address_is_this_machine_only():
    url, server, thread = start(ScriptedEngine(script=always()))
    assert url.startswith("http://127.0.0.1:")
    server.stop()
    thread.join(10)


@pytest.mark.parametrize("early", [True, False])
def test_a_server_ends_by_itself_when_it_is_told_to(early):
    end = End()
    ready = threading.Event()
    running = threading.Thread(
        target=lambda: run(lambda scope, receive, send: None, ServerConfig(port=0), lambda url: ready.set(), end=end)
    )
    if early:
        end.now()
    running.start()
    if not early:
        assert ready.wait(10)
        end.now()
    running.join(10)
    assert not running.is_alive()


def test_a_request_on_its_way_when_the_last_answer_ends_is_answered(monkeypatch):
    monkeypatch.setattr(run_module, "GOODBYE_SECONDS", 60.0)
    url, server, thread = start(ScriptedEngine(), drain_seconds=60)
    address = ("127.0.0.1", httpx.URL(url).port)
    with socket.create_connection(address) as silent, httpx.Client(base_url=url, timeout=30) as other:
        assert other.get("/health/live").status_code == 200  # connected after `silent`, so that one is accepted too
        server.stop()
        until_refused(url)
        silent.settimeout(30)
        silent.sendall(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
        answer = b""
        while piece := silent.recv(4096):
            answer += piece
    thread.join(30)
    assert not thread.is_alive()
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 5" in answer
    assert answer.endswith(b"}}")


def until_refused(url: str) -> None:
    last = time.monotonic() + 30
    while time.monotonic() < last:
        try:
            httpx.get(f"{url}/health/live")
        except httpx.TransportError:
            return
        time.sleep(0.01)
    raise AssertionError("it still listens")


REQUEST = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize("turns", range(5))
async def test_a_connection_that_is_just_being_taken_is_answered(monkeypatch, turns):
    """`turns` turns of the event loop lie between the system's accepting it and the end of the server."""
    monkeypatch.setattr(run_module, "GOODBYE_SECONDS", 60.0)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = Server(create_app(ScriptedEngine(), CARD, LIMITS), ServerConfig(port=0), ready.set_result)
    ending = asyncio.Event()
    monkeypatch.setattr(server, "main_loop", ending.wait)
    serving = asyncio.create_task(server.listen())
    port = httpx.URL(await ready).port
    with socket.create_connection(("127.0.0.1", port), 30) as client:
        for _ in range(turns):
            await asyncio.sleep(0)
        ending.set()
        await asyncio.sleep(0.1)  # an answer that is missing would be missing at any time
        answer = await asyncio.to_thread(lambda: client.sendall(REQUEST) or client.recv(1000))
    assert answer.startswith(b"HTTP/1.1 503")
    await serving
