"""R7: clients leave at any moment, and all that they held is freed."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from typing import Any

from harness.batches import answers_to, difference
from harness.client import Answer, ask, head_of, said
from harness.processes import descriptors, threads, wait_until
from harness.requests import COMPLETIONS, Request, mixed_requests, random_request
from harness.row import Depth, Measured, Progress, judge
from harness.server import APART, Server, serving

__all__ = ["disconnects"]

AT_ONCE = 10
MOST_SECONDS = 1.0
POOL = 6
"""Threads that a pool may still start later: pools are bounded, so any more threads are a leak."""
OPTIONS = (*APART, "--kv-cache-memory", "128MiB", "--max-num-seqs", "6")
MOMENTS = ("half a head", "no body", "half a body", "at once", "soon", "later", "first bytes", "end")
CANARY = Request(
    "canary", COMPLETIONS, {"prompt": "The canary", "max_tokens": 60, "temperature": 1.1, "seed": 5, "ignore_eos": True}
)


def disconnects(depth: Depth, progress: Progress) -> Measured:
    """Run batches of clients that leave; beside every second batch one client stays."""
    count = depth.of(1000)
    progress.expect(count)
    chance, misses, returned = random.Random(7), [], []
    with serving(*OPTIONS) as server:
        want = said(answers_to(server, [CANARY])[0])
        answers_to(server, mixed_requests(40, 8))  # from here on its grammar worker and all its threads exist
        asyncio.run(_leave_together(server, chance, AT_ONCE))
        wait_until(server.idle, 30)
        held = (descriptors(server.pid), threads(server.pid))
        for batch in range(count // AT_ONCE):
            canary = asyncio.run(_batch(server, chance, stays=batch % 2 == 1))
            if canary is None:
                returned.append(wait_until(server.idle, 30))
            elif wrong := difference(CANARY, want, canary):
                misses.append(wrong)
            progress.update(AT_ONCE)
        wait_until(server.idle, 30)
        wait_until(lambda: descriptors(server.pid) <= held[0], 10)
        after = (descriptors(server.pid), threads(server.pid))
    misses += [f"blocks came back after {each:.2f} s" for each in returned if each > MOST_SECONDS]
    if after[0] > held[0] or after[1] > held[1] + POOL:
        misses.append(f"descriptors and threads went from {held} to {after}")
    figure = f"{count} clients left; all blocks back within {max(returned):.2f} s; descriptors {held[0]} to {after[0]}"
    return judge(figure, misses, seconds=returned, held=held, after=after)


async def _batch(server: Server, chance: random.Random, stays: bool) -> Answer | None:
    """Run some clients that leave; returns the answer of the client that stays, if one does."""
    if not stays:
        await _leave_together(server, chance, AT_ONCE)
        return None
    canary = asyncio.ensure_future(ask(server.url, CANARY.path, CANARY.streamed(), seconds=120))
    await _leave_together(server, chance, AT_ONCE)
    return await canary


async def _leave_together(server: Server, chance: random.Random, count: int) -> None:
    await asyncio.gather(*(_leave(server, random.Random(chance.random())) for _ in range(count)))


async def _leave(server: Server, chance: random.Random) -> None:
    """Run one client: it sends a request, or part of one, and leaves, orderly or by a reset."""
    moment, reset = chance.choice(MOMENTS), chance.random() < 0.5
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head, body = _sent(chance)
    pieces = {"half a head": head[: len(head) // 2], "no body": head, "half a body": head + body[: len(body) // 2]}
    writer.write(pieces.get(moment, head + body))
    try:
        await writer.drain()
        if moment in ("soon", "later"):
            await asyncio.sleep(chance.uniform(0.0, 0.05 if moment == "soon" else 1.5))
        elif moment == "first bytes":
            await asyncio.wait_for(reader.read(1), 60)
        elif moment == "end":
            await asyncio.wait_for(_last(reader), 60)
    except OSError:
        return
    finally:
        _close(writer, reset)


async def _last(reader: asyncio.StreamReader) -> None:
    """Read until the answer's last event, or its end."""
    seen = b""
    while b"[DONE]" not in seen and (piece := await reader.read(1 << 16)):
        seen = (seen + piece)[-256:]  # the event's id and the end of the body follow it
        if b"[DONE]" not in seen and piece.endswith(b"}"):
            return


def _sent(chance: random.Random) -> tuple[bytes, bytes]:
    """Make a request: short or long, whole or streamed, now and then with a form that was never compiled before."""
    request = random_request(chance, 60)
    body: dict[str, Any] = request.streamed() if chance.random() < 0.6 else dict(request.body)
    if "prompt" in body and chance.random() < 0.3:
        body["prompt"] = [chance.randrange(100, 10_000) for _ in range(chance.randint(300, 900))]
    if chance.random() < 0.15:
        body["structured_outputs"] = {"regex": f"[a-z]{{{chance.randint(1, 9)},{chance.randint(10, 40)}}}"}
        body.pop("response_format", None)
        body.pop("tools", None)
        body.pop("tool_choice", None)
    sent = json.dumps(body).encode()
    return head_of(request.path, len(sent)), sent


def _close(writer: asyncio.StreamWriter, reset: bool) -> None:
    if reset:
        raw: socket.socket = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    else:
        writer.close()
