"""Probes: ready while work is accepted, live while it ever can be; also on a port of their own."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import httpx
import pytest
from scripted_engine import HEALTHY, ScriptedEngine, Wait, always, delta, finished, stop
from server_harness import CARD, LIMITS, free_port, running

from penstock.contract.errors import ConfigError
from penstock.contract.limits import ServerLimits
from penstock.contract.server_config import ServerConfig
from penstock.server import create_app, open_access, run
from penstock.server.http.access import Access

HASTY = Access(limits=ServerLimits(heartbeat_seconds=0.05))
KEY = {"PENSTOCK_API_KEY": "sk-user-0123456789"}


@dataclass
class Watch:
    """A `StepWatch` that says what a test sets."""

    late: str = ""
    hopeless: str = ""
    since: float = math.inf

    def overdue(self) -> str:
        return self.late

    def lost(self) -> str:
        return self.hopeless

    def began(self) -> float:
        return self.since


def get(url: str, path: str = "/health/ready", **options) -> tuple[int, str]:
    """Its status and its reason."""
    answer = httpx.get(url + path, timeout=30, **options)
    return answer.status_code, answer.json()["reason"]


def test_an_engine_that_takes_messages_is_ready(served):
    assert served.http.get("/health/ready").json() == {"status": "ready", "reason": ""}
    assert served.http.get("/health/live").json() == {"status": "live", "reason": ""}


def test_a_dead_engine_is_neither_ready_nor_live(served):
    served.engine.state = replace(HEALTHY, alive=False, reason="it broke")
    for path in ("/health/ready", "/health/live", "/health"):
        answer = served.http.get(path)
        assert (answer.status_code, answer.json()["reason"]) == (503, "it broke")
        assert answer.json()["error"]["code"] == "engine_dead"
        assert served.http.head(path).status_code == 503


def test_an_engine_that_takes_no_messages_is_not_ready_but_live(served):
    served.engine.stuck = True
    with running(served.engine, access=HASTY) as url:
        assert get(url) == (503, "the engine has taken no message for 0.05 seconds")
        assert get(url, "/health/live") == (200, "")


def test_a_probe_does_not_wait_for_the_engine_until_it_counts_as_stuck(served):
    served.engine.stuck = True
    with running(served.engine, access=Access(limits=ServerLimits(heartbeat_seconds=1e6))) as url:
        assert get(url) == (200, "")


def test_a_step_that_was_begun_before_may_keep_a_message_waiting(served):
    served.engine.stuck = True
    watch = Watch(since=time.monotonic())
    with running(served.engine, access=HASTY, watch=watch) as url:
        assert get(url) == (200, "")
        watch.since = time.monotonic() + 1e6  # steps go on, and none of them lets the message in
        assert get(url)[0] == 503


def test_an_overdue_step_makes_the_server_unready_and_a_lost_one_dead(served):
    watch = Watch()
    with running(served.engine, watch=watch) as url:
        assert get(url)[0] == 200
        watch.late = "step 7 has taken 9 s"
        assert get(url) == (503, "step 7 has taken 9 s")
        assert get(url, "/health") == (200, "step 7 has taken 9 s")
        assert httpx.get(f"{url}/health").json()["engine_ready"] is False
        assert get(url, "/health/live")[0] == 200
        watch.hopeless = "step 7 has taken 90 s and is not expected to end"
        assert get(url, "/health/live") == (503, watch.hopeless)
        watch.late = watch.hopeless = ""
        assert get(url)[0] == get(url, "/health/live")[0] == 200


@pytest.fixture
def probed() -> Iterator[tuple[str, str]]:
    """The URLs of a server with a key, and of its port for probes."""
    config = ServerConfig(port=0, probe_port=free_port(), max_connections=4)
    with running(ScriptedEngine(), config=config, access=open_access(config, KEY)) as url:
        yield url, f"http://127.0.0.1:{config.probe_port}"


def test_the_port_for_probes_needs_no_key_and_has_nothing_else(probed):
    url, probes = probed
    for path in ("/health", "/health/live", "/health/ready", "/metrics", "/v1/models"):
        assert httpx.get(probes + path).status_code == 200
        head = httpx.head(probes + path)
        assert (head.status_code, head.content) == (200, b"")
    for path in ("/v1/models/m", "/stats", "/openapi.json", "/docs", "/", "/engine/events"):
        missing = httpx.get(probes + path)
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_url")
    assert httpx.post(f"{probes}/health/ready").status_code == 405
    assert httpx.post(f"{probes}/v1/completions", json={"prompt": "x"}).status_code == 404
    assert httpx.get(f"{url}/health/ready").status_code == httpx.get(f"{url}/metrics").status_code == 401


def test_it_shows_the_requests_of_the_other_port(probed):
    url, probes = probed
    httpx.get(f"{url}/health/live")
    counted = 'http_requests_total{handler="/health/live",method="GET",status="2xx"} 1.0'
    assert counted in httpx.get(f"{probes}/metrics").text


def test_it_answers_when_clients_have_all_connections(probed):
    url, probes = probed
    clients = [httpx.Client() for _ in range(4)]
    try:
        assert [client.get(f"{url}/health/live").status_code for client in clients] == [200] * 4
        assert httpx.get(f"{url}/health/live").status_code == 429
        assert httpx.get(f"{probes}/health/live").status_code == 200
    finally:
        for client in clients:
            client.close()


def test_on_this_machine_alone_it_answers_to_this_machines_names(probed):
    _, probes = probed
    assert httpx.get(f"{probes}/health/live", headers={"host": "evil.example"}).status_code == 403


def test_on_every_address_it_answers_to_any_name():
    config = ServerConfig(port=0, probe_host="0.0.0.0", probe_port=free_port())
    with running(ScriptedEngine(), config=config, access=open_access(config, {})) as url:
        probes = f"http://127.0.0.1:{config.probe_port}"
        assert httpx.get(f"{probes}/health/ready", headers={"host": "10.1.2.3:9"}).status_code == 200
        assert httpx.get(f"{url}/health/live", headers={"host": "10.1.2.3:9"}).status_code == 403


def test_a_port_for_probes_that_cannot_be_had_is_named():
    with pytest.raises(ConfigError, match="probe_port: must be another one"):
        ServerConfig(port=9000, probe_port=9000)
    with pytest.raises(ConfigError, match=r"probe_port: must lie in 0..65535"):
        ServerConfig(probe_port=-1)
    with running(ScriptedEngine()) as url:
        app = create_app(ScriptedEngine(), CARD, LIMITS)
        port = httpx.URL(url).port
        with pytest.raises(ConfigError, match=f"probe_port: cannot listen on 127.0.0.1, port {port}"):
            run(app, ServerConfig(port=0, probe_port=port), print)


def test_a_clock_that_jumps_ends_nothing(served, monkeypatch):
    jumps, real = itertools.cycle((3600.0, -7200.0, 1800.0)), time.time
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    with running(served.engine, access=Access(request_seconds=60)) as url, httpx.Client(base_url=url) as http:
        served.engine.script = always(delta("a"), Wait(0.2), delta("b"), stop(), finished())
        for _ in range(3):
            assert http.get("/health/ready").status_code == 200
            assert http.post("/v1/completions", json={"prompt": "x"}).json()["choices"][0]["text"] == "ab"
