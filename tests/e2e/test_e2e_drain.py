"""SIGTERM under load, with a real model in a process of its own: every answer is finished, and nothing is left."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from served import PATIENCE, Served, runner_of, serve

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the runner's process is found through /proc"),
]

STREAMS = 32
LONG = {"ignore_eos": True, "temperature": 0.8}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serve(tmp_path / "trace", "--runner", "process", "--drain-timeout", "300", forked=False) as served:
        yield served


def until(condition: Callable[[], object]) -> None:
    last = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < last
        time.sleep(0.02)


def stream(http: httpx.Client, seed: int, max_tokens: int) -> str:
    body = {"prompt": f"Story {seed}:", "seed": seed, "max_tokens": max_tokens, "stream": True, **LONG}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        return "".join(answer.iter_text())


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_sigterm_finishes_every_stream(served):
    runner = runner_of(served.process.pid)
    limits = httpx.Limits(max_connections=STREAMS)
    with (
        httpx.Client(base_url=served.url, timeout=300, limits=limits) as http,
        ThreadPoolExecutor(STREAMS) as pool,
    ):
        answers = [pool.submit(stream, http, seed, 40) for seed in range(STREAMS)]
        served.wait_running(STREAMS)
        served.process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{served.url}/health/ready").status_code == 503)
        refused = httpx.post(f"{served.url}/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        ends = [answer.result(300) for answer in answers]
    assert all("\ndata: [DONE]\n" in end for end in ends)
    assert not any('"error"' in end for end in ends)
    assert all(end.count('"finish_reason":"length"') == 1 for end in ends)
    assert served.process.wait(PATIENCE) == 0
    until(lambda: gone(runner))


def test_a_second_signal_ends_both_processes(served):
    runner = runner_of(served.process.pid)
    with httpx.Client(base_url=served.url, timeout=300) as http, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(stream, http, 1, 5000)
        served.wait_running(1)
        served.process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{served.url}/health/ready").status_code == 503)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(PATIENCE) == 0
        assert '"code":"shutting_down"' in answer.result(PATIENCE)
    until(lambda: gone(runner))
