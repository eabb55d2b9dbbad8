"""`penstock serve`: its runner is killed while streams run, and no stream differs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from served import PATIENCE, runner_of, runners_of, serve

from penstock.core.replaying import replay

GREEDY = {"temperature": 0}
SEEDED = {"temperature": 1.2, "top_p": 0.9, "seed": 11}
ASKED = [
    {"prompt": "Once upon a time", "max_tokens": 40, **GREEDY},
    {"prompt": "The sea", "max_tokens": 40, **SEEDED},
    {"prompt": "Three names:", "max_tokens": 30, **SEEDED, "n": 2, "presence_penalty": 0.7},
    {"prompt": "In the beginning", "max_tokens": 30, **SEEDED, "stop": [" the"], "frequency_penalty": 0.4},
    {"prompt": "A list of", "max_tokens": 30, **GREEDY, "logprobs": 3},
    {"prompt": "Yes or no?", "max_tokens": 30, **SEEDED, "structured_outputs": {"regex": "(yes|no)(, (yes|no)){9}"}},
]


def streamed(url: str, body: dict) -> list[tuple[int, str, object]]:
    """What came: index, text and log probabilities of each event with text, put together by choice."""
    texts: dict[int, str] = {}
    scores: dict[int, list] = {}
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=PATIENCE) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                index = choice["index"]
                texts[index] = texts.get(index, "") + choice["text"]
                scores.setdefault(index, []).extend((choice.get("logprobs") or {}).get("token_logprobs") or [])
    return [(index, texts[index], scores[index]) for index in sorted(texts)]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the runner's process is found through /proc")
def test_streams_go_on_to_the_bit_while_the_runner_is_killed(tmp_path):
    trace = tmp_path / "trace"
    with (
        serve(trace, "--kv-cache-memory", "256MiB", standby=True) as served,
        ThreadPoolExecutor(len(ASKED)) as pool,
    ):
        model = httpx.get(f"{served.url}/v1/models").json()["data"][0]["id"]
        bodies = [{"model": model, **body} for body in ASKED]
        want = [streamed(served.url, body) for body in bodies]
        httpx.post(f"{served.url}/reset_prefix_cache")
        zygotes = set(runners_of(served.process.pid)) - {runner_of(served.process.pid)}
        assert [len(list(Path(f"/proc/{zygote}/task").iterdir())) for zygote in zygotes] == [1]
        streams = [pool.submit(streamed, served.url, body) for body in bodies]
        killed = []
        for _ in range(3):
            served.wait_running(1)
            killed.append(runner_of(served.process.pid))
            time.sleep(0.05)
            os.kill(killed[-1], signal.SIGKILL)
            wait_for_another(served, killed[-1])
        assert [stream.result(PATIENCE) for stream in streams] == want
        assert httpx.get(f"{served.url}/health").status_code == 200
        lost = re.search(r"penstock:runners_lost_total{[^}]*} (\d+)", httpx.get(f"{served.url}/metrics").text)
        assert 1 <= int(lost[1]) <= 3
        last = runners_of(served.process.pid)
        assert not set(last) & set(killed)
        assert zygotes < set(last)
    assert not [pid for pid in last if Path(f"/proc/{pid}").exists()], "they end with the server"
    report = replay(trace.read_text(encoding="utf-8").splitlines(keepends=True))
    assert report.same, report.explain()


def wait_for_another(served, before: int) -> None:
    """Wait until another process has taken its place, or all requests have been answered."""
    last = time.monotonic() + PATIENCE
    while time.monotonic() < last:
        try:
            if runner_of(served.process.pid) != before:
                return
        except (AssertionError, FileNotFoundError):
            pass
        if not served.health()["running"] + served.health()["waiting"]:
            return
        time.sleep(0.02)
    raise AssertionError("no other process was started")


@pytest.mark.deep
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the runner's process is found through /proc")
def test_a_server_whose_runners_all_die_ends_with_1_and_says_why(tmp_path):
    command = [
        sys.executable,
        "-m",
        "penstock",
        "serve",
        "--port",
        "0",
        "--kv-cache-memory",
        "64MiB",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        url = next(found[0] for line in process.stdout if (found := re.search(r"http://\S+", line)))
        with ThreadPoolExecutor(1) as pool:
            body = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "temperature": 0}
            answer = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=PATIENCE)
            killed = set()
            while process.poll() is None:
                try:
                    runner = runner_of(process.pid)
                except (AssertionError, FileNotFoundError):
                    time.sleep(0.01)
                    continue
                if runner not in killed:
                    killed.add(runner)
                    os.kill(runner, signal.SIGKILL)
            assert answer.result(PATIENCE).status_code == 500
        assert process.returncode == 1
        assert "ended 5 times in a row" in process.stderr.read()
    assert len(killed) == 6
