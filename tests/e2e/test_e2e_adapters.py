"""`penstock serve` with adapters: loaded while it runs, kept when its runner is killed, unloaded when they are done."""

from __future__ import annotations

import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from served import PATIENCE, runner_of, serve
from tiny_adapters import linear_modules, load_with_adapters, write_adapter
from tiny_checkpoints import write_lettered

from needs import COMPILED
from penstock.core.replaying import replay
from penstock.kernels import native

pytestmark = [
    pytest.mark.skipif(not native.available(), reason=COMPILED),
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the runner's process is found through /proc"),
]


def ask(url: str, model: str, tokens: int = 12, **fields) -> tuple[list[str], list[float]]:
    body = {"model": model, "prompt": "the sea and the land and", "max_tokens": tokens, "ignore_eos": True}
    body |= {"temperature": 0, "logprobs": 1, **fields}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    scores = answer.json()["choices"][0]["logprobs"]
    return scores["tokens"], scores["token_logprobs"]


def order(url: str, what: str, name: str, **fields) -> httpx.Response:
    return httpx.post(f"{url}/v1/{what}_lora_adapter", json={"lora_name": name, **fields}, timeout=PATIENCE)


def test_adapters_come_and_go_and_outlive_the_runner(tmp_path):
    model, folder = tmp_path / "model", tmp_path / "adapters"
    model.mkdir()
    write_lettered(model, "llama", "wide_heads_untied", intermediate_size=96)
    modules = linear_modules(load_with_adapters(model).program)
    for seed, name in enumerate(("first", "second", "third")):
        write_adapter(folder / name, modules, 4, seed=seed)
    trace = tmp_path / "trace"
    options = ("--lora", f"first={folder / 'first'}", "--lora-dir", str(folder), "--kv-cache-memory", "4MiB")
    with serve(trace, str(model), "--dtype", "float32", "--max-loras", "2", *options, standby=True) as served:
        url = served.url
        name = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        assert order(url, "load", "second", lora_path="second").status_code == 200
        full = order(url, "load", "third", lora_path="third").json()["error"]
        assert full["code"] == "too_many_adapters"
        listed = httpx.get(f"{url}/v1/models").json()["data"]
        assert [(each["id"], each["parent"]) for each in listed] == [(name, None), ("first", name), ("second", name)]
        names = (name, "first", "second")
        want = {each: ask(url, each) for each in names}
        assert len({json.dumps(each) for each in want.values()}) == 3
        with ThreadPoolExecutor(9) as pool:
            answers = {each: [pool.submit(ask, url, each) for _ in range(3)] for each in names}
            assert all(one.result() == want[each] for each, made in answers.items() for one in made)

        before = runner_of(served.process.pid)
        with ThreadPoolExecutor(3) as pool:
            long = {each: ask(url, each, 400) for each in names}
            httpx.post(f"{url}/reset_prefix_cache")
            answers = {each: pool.submit(ask, url, each, 400) for each in names}
            served.wait_running(1)
            os.kill(before, signal.SIGKILL)
            assert {each: made.result(PATIENCE) for each, made in answers.items()} == long
        assert runner_of(served.process.pid) != before

        with ThreadPoolExecutor(2) as pool:
            answer = pool.submit(ask, url, "second", 400)
            served.wait_running(1)
            assert order(url, "unload", "second").json() == {"unloaded": "second"}
            assert len(answer.result()[0]) == 400
        gone = httpx.post(f"{url}/v1/completions", json={"model": "second", "prompt": "a"})
        assert gone.status_code == 404
        assert order(url, "load", "third", lora_path=str(folder / "third")).status_code == 200
        assert ask(url, "third") not in want.values()

        # Changed files do not change what was loaded from them, and the next runner does not take the new ones.
        shutil.copytree(folder / "second", folder / "third", dirs_exist_ok=True)
        third = ask(url, "third")
        os.kill(runner_of(served.process.pid), signal.SIGKILL)
        body = {"model": "third", "prompt": "the sea", "max_tokens": 3}
        broken = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)
        assert broken.status_code == 500
        assert "its files have changed" in broken.json()["error"]["message"]
        assert ask(url, "first") == want["first"]
        assert third != want["second"]
    report = replay(trace.read_text(encoding="utf-8").splitlines(keepends=True))
    assert report.same, report.explain()
