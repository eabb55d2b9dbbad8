"""Over HTTP: the parts of a mixed load sum to its wall time, and a planted delay of each kind is in its own part."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import httpx
import pytest
from latency_http import LATE_DRAWS, Told, load, read, send, serving

from penstock.contract.measurements import PARTS
from penstock.latency.recorded import lives_of
from penstock.server.http import run

EXACT = 0.001 * len(PARTS)
"""Milliseconds; each part is rounded to a thousandth."""


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.deep)])
def test_the_parts_of_a_mixed_load_sum_to_its_wall_time(tmp_path, count):
    record = tmp_path / "run.trace"
    with serving(record, step=0.001, num_blocks=300) as url:
        told = asyncio.run(load(url, count, at_once=12))
        walls = [httpx.get(f"{url}/v1/requests/{one.id}/latency").json() for one in told]
    assert len({one.id for one in told}) == count
    for one, wall in zip(told, walls, strict=True):
        total = one.timings["parts_ms"]["total"]
        assert sum(one.parts.values()) == pytest.approx(total, abs=EXACT)
        assert all(ms >= 0.0 for ms in one.parts.values()), one.parts
        assert sum(one.timings["parts_ms"]["queue_for"].values()) == pytest.approx(one.parts["queue"], abs=EXACT)
        assert wall["parts_ms"]["total"] == pytest.approx(wall["wall_ms"], rel=0.01)
        assert total <= wall["wall_ms"] + EXACT
        assert total / 1000 <= one.seconds
    # By its own clock a client waits longer: for the connection, and here for the interpreter that it shares.
    beside = sorted(1 - one.timings["parts_ms"]["total"] / 1000 / one.seconds for one in told)
    assert beside[count // 2] < 0.1
    found = {name: sum(one.parts[name] for one in told) for name in PARTS}
    for name in ("intake", "queue", "prompt", "other_prompts", "decode", "other_decodes", "engine", "text"):
        assert found[name] > 0.0, found
    lines = record.read_text(encoding="utf-8").splitlines(keepends=True)
    for one in told[:: count // 3]:
        parts = lives_of(one.id, lines).parts
        for name in PARTS:
            if name not in ("intake", "text", "reader"):  # which the engine does not see
                assert 1000 * getattr(parts, name) == pytest.approx(one.parts[name], abs=0.05), name


def asked(url: str, path: str, **body) -> Told:
    began = time.monotonic()
    answer = httpx.post(url + path, json={"timings": True, "ignore_eos": True} | body, timeout=60)
    return read(answer.content, time.monotonic() - began)


def test_a_late_grammar_is_grammar(tmp_path):
    with serving(tmp_path / "run.trace") as url:
        plain = asked(url, "/v1/completions", prompt="hello", max_tokens=10)
        form = {"structured_outputs": {"regex": "[a-z]+"}, "ignore_eos": False}
        guided = asked(url, "/v1/completions", prompt="hello", max_tokens=10, **form)
    assert plain.parts["grammar"] == 0.0
    assert guided.parts["grammar"] > (LATE_DRAWS - 1) * 2.0
    assert max(guided.parts, key=guided.parts.__getitem__) == "grammar"


def test_a_long_neighbour_and_lost_blocks_are_what_they_are(tmp_path):
    async def both(url: str, first: dict, second: dict) -> tuple[Told, Told]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            common = {"timings": True, "ignore_eos": True}
            begun = asyncio.create_task(send(http, "/v1/completions", common | first))
            await asyncio.sleep(0.02)
            other = await send(http, "/v1/completions", common | second)
            return await begun, other

    with serving(tmp_path / "neighbour.trace") as url:
        short, long = asyncio.run(
            both(url, {"prompt": "hi", "max_tokens": 150}, {"prompt": "n" * 900, "max_tokens": 1})
        )
    assert long.parts["prompt"] > 0.8 * 900 * 0.2
    assert short.parts["other_prompts"] == pytest.approx(long.parts["prompt"], rel=0.2)
    with serving(tmp_path / "preempted.trace", num_blocks=40, prefix_caching=False) as url:
        elder, younger = asyncio.run(
            both(url, {"prompt": "a" * 20, "max_tokens": 120}, {"prompt": "b" * 20, "max_tokens": 100})
        )
    assert elder.parts["preempted"] == 0.0
    assert younger.parts["preempted"] > 20 * 2.0


def test_a_slow_reader_is_the_reader(tmp_path, monkeypatch):
    listen = run.listen

    def with_small_buffers(*arguments, **named):
        made = listen(*arguments, **named)
        for each in made if isinstance(made, list | tuple) else [made]:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return made

    monkeypatch.setattr(run, "listen", with_small_buffers)
    with serving(tmp_path / "run.trace", step=0.0005) as url:
        body = {"prompt": "hello", "max_tokens": 600, "stream": True, "timings": True, "ignore_eos": True}
        data = json.dumps(body).encode()
        target, began = httpx.URL(url), time.monotonic()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((target.host, target.port))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {target.host}\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
            client.sendall(head.encode() + data)
            computing = began  # the last time when something was still to be computed
            while (asked := time.monotonic()) < began + 0.2 or httpx.get(f"{url}/health").json()["running"]:
                computing = asked
                time.sleep(0.01)
            time.sleep(1.0)  # it is all computed, and waits
            received = b"".join(iter(lambda: client.recv(65536), b""))
            waited_ms = 1000 * (time.monotonic() - computing)
        events = [line[6:] for line in received.split(b"\n") if line.startswith(b"data: {")]
        last = json.loads(events[-1])
        told = httpx.get(f"{url}/v1/requests/{last['id']}/latency").json()
    assert 1000.0 <= last["timings"]["parts_ms"]["reader"] <= told["parts_ms"]["reader"]
    assert told["parts_ms"]["reader"] < waited_ms
    assert told["parts_ms"]["total"] == pytest.approx(told["wall_ms"], rel=0.01)
