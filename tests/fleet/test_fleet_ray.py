"""`penstock fleet` on a Ray cluster of its own: replicas that are killed, added, ended and replaced under load."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from served import PATIENCE, below, listening_url, process_file

pytestmark = [pytest.mark.ray, pytest.mark.model]

if importlib.util.find_spec("ray") is None and os.environ.get("PENSTOCK_RAY_TESTS") != "required":
    pytest.skip("Ray is not installed: make test-ray", allow_module_level=True)

STREAMS = 16
OPTIONS = ("--max-model-len", "512", "--kv-cache-memory", "64MB", "--no-standby")
PROMPTS = ["Once upon a time", "The sea is", "def main():", "A list of fruits:"]


@dataclass(frozen=True)
class Fleet:
    """A running fleet."""

    url: str
    ray: str
    process: subprocess.Popen[str]

    def health(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/health", timeout=PATIENCE).json()

    def replicas(self) -> list[int]:
        """The processes of its replicas."""
        return [
            each for each in below(self.process.pid) if process_file(each, "cmdline").startswith(b"ray::ServeReplica")
        ]


@contextmanager
def fleet(*arguments: str) -> Iterator[Fleet]:
    began, said = time.monotonic(), []
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "fleet", "--port", "0", *OPTIONS, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: said.extend(process.stdout))  # a full pipe would block logging
    try:
        url = listening_url(process, began, said)
        (ray,) = [line.split()[-1] for line in said if line.startswith("Ray ")]
        reader.start()
        yield Fleet(url, ray, process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # it prints where every thread is
            process.wait(timeout=PATIENCE)
            print("".join(said))
            raise
        finally:
            if reader.ident is not None:
                reader.join(PATIENCE)
            process.stdout.close()
    assert code == 0
    assert not list(below(process.pid))


def body(index: int, tokens: int = 48) -> dict[str, Any]:
    return {
        "prompt": PROMPTS[index % len(PROMPTS)],
        "max_tokens": tokens,
        "temperature": 0 if index % 2 else 1.2,
        "seed": index,
        "logprobs": 1,
        "ignore_eos": True,
        "n": 2 if index % 5 == 0 else 1,
    }


async def streamed(http: httpx.AsyncClient, asked: dict[str, Any]) -> list[tuple[str, list, list, str]]:
    """What a stream says of each choice: text, tokens, scores, and why it ended."""
    found: dict[int, list] = {}
    done = False
    async with http.stream("POST", "/v1/completions", json={**asked, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    said = found.setdefault(choice["index"], ["", [], [], ""])
                    said[0] += choice["text"]
                    if choice["logprobs"]:
                        said[1] += choice["logprobs"]["tokens"]
                        said[2] += choice["logprobs"]["token_logprobs"]
                    said[3] = choice["finish_reason"] or said[3]
    assert done
    return [tuple(found[index]) for index in sorted(found)]


async def load(url: str, until, streams: int = STREAMS, tokens: int = 48) -> list[tuple[int, list]]:
    """Keep `streams` streams going until `until` is done; (index, what was said) of each."""
    finished: list[tuple[int, list]] = []
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE * 3, limits=httpx.Limits(max_connections=64)) as http:

        async def one(lane: int) -> None:
            while not until.done():
                finished.append((lane, await streamed(http, body(lane, tokens))))

        await asyncio.gather(*(one(lane) for lane in range(streams)))
    await until
    return finished


async def expected(url: str, streams: int = STREAMS, tokens: int = 48) -> list[list]:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE * 3) as http:
        return [await streamed(http, body(lane, tokens)) for lane in range(streams)]


async def happens(condition, seconds: float = 120.0) -> None:
    last = time.monotonic() + seconds
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < last, "it did not happen in time"
        await asyncio.sleep(0.1)


def blocks(served: Fleet) -> int:
    return served.health()["total_blocks"]


@pytest.mark.parametrize("kills", [3, *(pytest.param(kills, marks=pytest.mark.deep) for kills in (20, 50))])
def test_streams_survive_their_replicas_token_for_token(kills):
    draw = random.Random(kills)

    async def kill(served: Fleet, whole: int) -> None:
        for _ in range(kills):
            await asyncio.sleep(draw.random() * 2)
            os.kill(draw.choice(served.replicas()), signal.SIGKILL)
            await happens(lambda: blocks(served) < whole)
            await happens(lambda: blocks(served) == whole)

    async def episode(served: Fleet) -> tuple[list[list], list[tuple[int, list]]]:
        await happens(lambda: len(served.replicas()) == 2)
        one = blocks(served)
        await happens(lambda: blocks(served) in (one, 2 * one))
        right = await expected(served.url)
        whole = blocks(served)
        return right, await load(served.url, asyncio.ensure_future(kill(served, whole)))

    with fleet("--replicas", "2") as served:
        right, finished = asyncio.run(episode(served))
        print(f"{kills} kills under {STREAMS} streams: {len(finished)} streams finished")
    assert len(finished) >= STREAMS
    for lane, said in finished:
        assert said == right[lane]


def test_a_second_replica_comes_with_the_load_and_goes_with_it():
    async def grown(served: Fleet, alone: int) -> None:
        await happens(lambda: blocks(served) == 2 * alone)
        await asyncio.sleep(2)

    async def episode(served: Fleet) -> None:
        alone, right = blocks(served), await expected(served.url, 8)
        finished = await load(served.url, asyncio.ensure_future(grown(served, alone)), 8)
        await happens(lambda: blocks(served) == alone)
        for lane, said in finished:
            assert said == right[lane]
        assert await expected(served.url, 2) == right[:2]

    scaling = ("--scale-up-wait", "0.05", "--scale-up-delay", "1", "--scale-down-delay", "3")
    with fleet("--replicas", "1-2", "--max-num-seqs", "2", *scaling) as served:
        asyncio.run(episode(served))


@asynccontextmanager
async def another(ray: str, *options: str) -> AsyncIterator[str]:
    """The URL of a second server in a fleet's cluster."""
    command = [sys.executable, "-m", "penstock", "fleet", "--address", ray, "--port", "0", *OPTIONS, *options]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    said = []
    try:
        async for line in process.stdout:
            said.append(line.decode())
            if found := re.search(r"http://\S+", said[-1]):
                break
        else:
            pytest.fail("".join(said))
        yield found[0]
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.communicate()
    assert process.returncode == 0


def test_replicas_are_replaced_under_load_and_nothing_fails():
    async def replace(served: Fleet) -> None:
        before = set(served.replicas())
        async with another(served.ray, "--max-num-seqs", "32"):
            await happens(lambda: len(served.replicas()) == 2 and before.isdisjoint(served.replicas()))

    async def episode(served: Fleet) -> None:
        right = await expected(served.url)
        finished = await load(served.url, asyncio.ensure_future(replace(served)))
        assert len(finished) >= STREAMS
        for lane, said in finished:
            assert said == right[lane]
        await happens(lambda: not served.health()["running"])

    with fleet("--replicas", "2") as served:
        asyncio.run(episode(served))


def test_another_model_runs_beside_and_is_ended_by_its_name():
    async def come_and_go(served: Fleet) -> None:
        before = set(served.replicas())
        other = ("--name", "other", "--quantization", "int8", "--replicas", "1", "--replica-cpus", "0.5")
        async with another(served.ray, *other) as url:
            beside = set(served.replicas())
            assert before < beside
            [said] = await expected(url, 1)
        assert set(served.replicas()) == beside, "replicas stay when their server ends"
        async with another(served.ray, *other) as url:
            assert set(served.replicas()) == beside, "and the next server finds them"
            assert await expected(url, 1) == [said]
        for name, code, told in (("other", 0, "of other have ended"), ("other", 2, "no replicas of 'other'")):
            end = ("--address", served.ray, "--name", name, "--replicas", "0")
            ended = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-m", "penstock", "fleet", *end],
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
            assert (ended.returncode, told in ended.stdout + ended.stderr) == (code, True), ended
        await happens(lambda: set(served.replicas()) == before)

    async def episode(served: Fleet) -> None:
        right = await expected(served.url, 4)
        finished = await load(served.url, asyncio.ensure_future(come_and_go(served)), 4)
        for lane, said in finished:
            assert said == right[lane]

    with fleet("--replicas", "1", "--replica-cpus", "0.5") as served:
        asyncio.run(episode(served))


def test_who_leaves_and_who_finds_no_room():
    with fleet("--replicas", "2", "--max-num-seqs", "1", "--max-queued-requests", "1") as served:

        async def crowd() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=served.url, timeout=PATIENCE) as http:
                asked = [http.post("/v1/completions", json=body(1, 100)) for _ in range(12)]
                return await asyncio.gather(*asked)

        answers = asyncio.run(crowd())
        refused = [each for each in answers if each.status_code == 429]
        assert {each.status_code for each in answers} == {200, 429}
        assert all(1 <= int(each.headers["retry-after"]) <= 120 for each in refused)
        with httpx.stream("POST", f"{served.url}/v1/completions", json={**body(1, 400), "stream": True}) as response:
            next(response.iter_lines())
        last = time.monotonic() + 5
        while (health := served.health())["running"] or health["free_blocks"] < health["total_blocks"]:
            assert time.monotonic() < last, health
            time.sleep(0.1)
