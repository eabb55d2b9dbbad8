"""A step that hangs, under a real engine and a real server: readiness falls, and the log says where it is."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import engine_harness
import httpx
import pytest
from served import PATIENCE, runner_of, serve
from server_harness import running

from penstock import watchdog as module
from penstock.contract.plan import Row, StepPlan, StepResult
from penstock.contract.ports import Runner
from penstock.engine import EngineLoop, LocalClient
from penstock.engine.admission import QueueLimits
from penstock.remote import hang_limit
from penstock.watchdog import Watchdog


class Hanging:
    """A runner whose steps wait for the test from some moment on."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.go = threading.Event()
        self.go.set()

    def run(self, plan: StepPlan) -> StepResult:
        self.go.wait(PATIENCE)
        return self._runner.run(plan)

    def reset(self) -> bool:
        return self._runner.reset()


@pytest.fixture
def hasty(monkeypatch) -> None:
    monkeypatch.setattr(hang_limit, "_LEAST", 0.1)
    monkeypatch.setattr(hang_limit, "_FIRST", 0.2)
    monkeypatch.setattr(module, "LOST_SECONDS", 0.3)


@pytest.fixture
def hanging(hasty) -> Iterator[tuple[str, Hanging]]:
    """A server's URL, and what its steps wait for."""
    runners: list[Hanging] = []
    watchdog = Watchdog(turn_seconds=0.02)

    def around(runner: Runner) -> Runner:
        runners.append(Hanging(runner))
        return watchdog.watch(runners[0], recovers=False)

    harness = engine_harness.build(around=around)
    loop = EngineLoop(harness.engine, harness.clock, QueueLimits(100))
    loop.start()
    client = LocalClient(harness.intake, loop)
    try:
        with watchdog.looking(), running(client, card=harness.card, watch=watchdog) as url:
            yield url, runners[0]
    finally:
        runners[0].go.set()
        client.close()


def until(condition: Callable[[], object]) -> None:
    last = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < last
        time.sleep(0.01)


def complete(url: str) -> str:
    body = {"prompt": "hello", "max_tokens": 5, "ignore_eos": True, "temperature": 0}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).json()["choices"][0]["text"]


def test_a_step_that_hangs_is_reported_and_readiness_comes_back_with_its_end(hanging, caplog):
    caplog.set_level(logging.INFO, "penstock")
    url, runner = hanging
    want = complete(url)
    assert httpx.get(f"{url}/health/ready").status_code == 200
    runner.go.clear()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(complete, url)
        until(lambda: httpx.get(f"{url}/health/ready").status_code == 503)
        assert "has taken" in httpx.get(f"{url}/health/ready").json()["reason"]
        until(lambda: httpx.get(f"{url}/health/live").status_code == 503)
        assert "is not expected to end" in httpx.get(f"{url}/health/live").json()["reason"]
        runner.go.set()
        assert answer.result(PATIENCE) == want
    until(lambda: httpx.get(f"{url}/health/ready").status_code == 200)
    assert httpx.get(f"{url}/health/live").status_code == 200
    said = [record.getMessage() for record in caplog.records if record.name == "penstock.watchdog"]
    assert sum("would be long" in line for line in said) == 1
    assert any(line.startswith("before it: step ") for line in said)
    (engine,) = [line for line in said if line.startswith("thread penstock-engine is in ")]
    assert f"run ({__file__}:" in engine
    assert any(line.startswith("step ") and "ended, after" in line for line in said)


PLAN = StepPlan(0, (), (), (Row(0, 0, 4, (), sample=False),))


class Looked:
    """A watchdog without its thread: a test says when a turn is over."""

    def __init__(self, *, recovers: bool = False) -> None:
        self.watchdog = Watchdog(turn_seconds=1.0)
        self.watchdog.watch(Hanging(None), recovers=recovers)

    def turns(self, count: int) -> None:
        self.watchdog._turn += count


def test_while_the_process_stands_still_no_step_is_late(monkeypatch):
    looked, hours = Looked(), iter([0.0, 7200.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(hours)))
    looked.watchdog.begin_step(PLAN)
    assert looked.watchdog.overdue() == ""
    looked.watchdog.end()  # two hours later, but no turn was over: it says little about later steps
    monkeypatch.undo()
    looked.watchdog.begin_step(PLAN)
    looked.turns(7)
    assert looked.watchdog.overdue() == "step 0 has taken 6 s"


def test_a_runner_that_recovers_is_never_lost():
    for recovers in (True, False):
        looked = Looked(recovers=recovers)
        looked.watchdog.begin_step(PLAN)
        assert looked.watchdog.began() < float("inf")
        looked.turns(100_000)
        assert looked.watchdog.overdue()
        assert bool(looked.watchdog.lost()) is not recovers
        looked.watchdog.end()
        assert looked.watchdog.overdue() == looked.watchdog.lost() == ""
        assert looked.watchdog.began() == float("inf")


def test_nothing_is_taken_while_what_computes_is_started_anew():
    looked = Looked(recovers=True)
    looked.watchdog.begin_reset()
    assert looked.watchdog.overdue() == "what computes is being started anew"
    looked.watchdog.end()
    assert looked.watchdog.overdue() == ""


NEEDS_PROC = pytest.mark.skipif(
    not Path("/proc/self/task").is_dir(), reason="the runner's process is found through /proc"
)


@pytest.mark.deep
@NEEDS_PROC
def test_a_process_that_stands_still_is_replaced_and_the_server_is_unready_meanwhile(tmp_path):
    body = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "temperature": 0}

    def ready(url: str) -> int:
        return httpx.get(f"{url}/health/ready", timeout=PATIENCE).status_code

    with (
        serve(tmp_path / "trace", "--runner", "process", "--kv-cache-memory", "64MiB", forked=False) as served,
        ThreadPoolExecutor(1) as pool,
    ):
        want = httpx.post(f"{served.url}/v1/completions", json=body, timeout=PATIENCE).json()["choices"]
        answer = pool.submit(httpx.post, f"{served.url}/v1/completions", json=body, timeout=PATIENCE)
        served.wait_running(1)
        os.kill(runner_of(served.process.pid), signal.SIGSTOP)
        until(lambda: ready(served.url) == 503)
        assert httpx.get(f"{served.url}/health/live").status_code == 200
        until(lambda: ready(served.url) == 200)
        assert answer.result(PATIENCE).json()["choices"] == want


HANGS = """
import sys, threading
from penstock import app, watchdog
from penstock.cli import penstock
from penstock.exec.runner import TorchRunner
from penstock.remote import hang_limit

watchdog.LOST_SECONDS = hang_limit._FIRST = hang_limit._LEAST = app.CLOSE_SECONDS = 2.0

compute = TorchRunner.run

def run(self, plan):
    if threading.current_thread() is threading.main_thread():  # warms up
        return compute(self, plan)
    threading.Event().wait()

TorchRunner.run = run
sys.argv = ["penstock", "serve", "--runner", "in-process", "--port", "0", "--drain-timeout", "0"]
penstock()
"""


@pytest.mark.deep
def test_a_server_whose_step_hangs_is_neither_ready_nor_live_and_ends_when_it_is_told_to(default_model):
    with (
        subprocess.Popen(
            [sys.executable, "-c", HANGS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process,
        ThreadPoolExecutor(1) as pool,
    ):
        url = next(found[0] for line in process.stdout if (found := re.search(r"http://\S+", line)))
        body = {"prompt": "x", "max_tokens": 5}
        answer = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=PATIENCE)
        until(lambda: httpx.get(f"{url}/health/ready").status_code == 503)
        until(lambda: httpx.get(f"{url}/health/live").status_code == 503)
        process.send_signal(signal.SIGTERM)
        assert answer.result(PATIENCE).json()["error"]["code"] == "shutting_down"
        said = process.stderr.read()
        assert process.wait(PATIENCE) == 1
    assert "step 0 has taken" in said
    assert "run (<string>:" in said
    assert "the server did not end within 2 seconds, so it is ended by force" in said
