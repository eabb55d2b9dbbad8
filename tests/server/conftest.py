"""The fixtures of the server's tests; what they are made of is in `server_harness`."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from browser import chromium, expect, open_page  # noqa: F401  (fixtures for the tests of the page)
from scripted_engine import ScriptedEngine
from server_harness import Served, start


@pytest.fixture(scope="session")
def _server() -> Iterator[tuple[str, ScriptedEngine]]:
    engine = ScriptedEngine()
    url, server, thread = start(engine)
    yield url, engine
    server.stop()
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def served(_server: tuple[str, ScriptedEngine]) -> Iterator[Served]:
    url, engine = _server
    engine.reset()
    with httpx.Client(base_url=url, timeout=10) as http:
        yield Served(url, engine, http)
    engine.wait_until(lambda: not engine.live)
