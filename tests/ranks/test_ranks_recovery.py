"""`penstock serve --tp 2`: a rank is killed while streams run, and no stream differs for it."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest
from served import PATIENCE, below, process_file, runner_of, serve, wait_until
from tiny_checkpoints import write_lettered

from needs import COMPILED
from penstock.core.replaying import replay
from penstock.kernels import native

pytestmark = [
    pytest.mark.skipif(not native.available(), reason=COMPILED),
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="ranks are found through /proc"),
]

LONG = {"max_tokens": 120, "ignore_eos": True}
ASKED = [
    {"prompt": "once upon a time", **LONG, "temperature": 0},
    {"prompt": "the sea", **LONG, "temperature": 1.2, "top_p": 0.9, "seed": 11},
    {"prompt": "three names", **LONG, "temperature": 0.8, "seed": 7, "n": 2, "presence_penalty": 0.7},
]


def streamed(url: str, body: dict) -> dict[int, str]:
    """The text of each choice."""
    texts: dict[int, str] = {}
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=PATIENCE) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


def ranks_of(pid: int) -> list[int]:
    """The processes of a server that have shares of its model, the runner's first."""
    try:
        runner = runner_of(pid)
    except AssertionError:
        return []
    others = [each for each in below(runner) if b"penstock.rank_process" in process_file(each, "cmdline")]
    return [runner, *others]


@pytest.mark.deep  # 20 s, as ranks share a processor; test_ranks_exact ends one rank in make test
def test_streams_go_on_to_the_bit_while_ranks_are_killed(tmp_path):
    (tmp_path / "model").mkdir()
    model = write_lettered(tmp_path / "model", "llama", "wide_heads_untied")
    options = ("--tp", "2", "--threads", "1", "--kv-cache-memory", "8MiB")
    trace = tmp_path / "trace"
    with serve(trace, str(model), *options, standby=True) as served, ThreadPoolExecutor(len(ASKED)) as pool:
        want = [streamed(served.url, body) for body in ASKED]
        httpx.post(f"{served.url}/reset_prefix_cache")
        streams = [pool.submit(streamed, served.url, body) for body in ASKED]
        killed: set[int] = set()
        for which in (1, 0):  # another rank, then rank 0 itself
            served.wait_running(1)
            wait_until(lambda: len(ranks_of(served.process.pid)) == 2)
            ranks = ranks_of(served.process.pid)
            os.kill(ranks[which], signal.SIGKILL)
            killed |= set(ranks)
            wait_until(partial(are_followed, served, ranks))
        assert [stream.result(PATIENCE) for stream in streams] == want
        wait_until(lambda: len(ranks_of(served.process.pid)) == 2)
        last = ranks_of(served.process.pid)
        assert not set(last) & killed, "both ranks are others"
    wait_until(lambda: not any(map(computes, last)))  # they end with the server
    report = replay(trace.read_text(encoding="utf-8").splitlines(keepends=True))
    assert report.same, report.explain()


def computes(pid: int) -> bool:
    """Whether a process exists and has not ended: a zombie has."""
    state = process_file(pid, "stat")
    return bool(state) and b" Z " not in state


def are_followed(served, ranks: list[int]) -> bool:
    """Whether new ranks have replaced these, or every request has been answered."""
    health, there = served.health(), ranks_of(served.process.pid)
    return not health["running"] + health["waiting"] or (len(there) == 2 and not set(there) & set(ranks))
