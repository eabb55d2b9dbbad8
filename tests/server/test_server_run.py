"""Listening, draining, ending."""

from __future__ import annotations

import asyncio
import json
import socket
import threading

import httpx
import pytest
from scripted_engine import ScriptedEngine, Wait, always, delta
from server_harness import start
from sse_reader import read_events

from penstock.contract.config import ServerConfig
from penstock.contract.errors import ConfigError
from penstock.server import End, run
from penstock.server.http.listening import listen


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
