"""R27: clients that ask for megabytes and read a byte a second."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from harness.canary import Canary, singing
from harness.client import head_of, now
from harness.processes import own_bytes, wait_until
from harness.requests import COMPLETIONS, Request
from harness.row import Depth, Measured, Progress, judge
from harness.server import Server, serving
from harness.tiny import tiny_model

__all__ = ["slow_readers"]

CLIENTS = 200
MIB = 1 << 20
NEW_TOKENS = 2500
LOGPROBS = 20
"""With this many log probabilities, a token of an answer takes two kilobytes, and the answer five megabytes."""
SONGS = 5
PATIENCE_SECONDS = 400.0
"""For a canary request that waits until every reader had a slot: writing their log probabilities takes minutes."""


def slow_readers(depth: Depth, progress: Progress) -> Measured:
    """Compare the server's memory with slow readers and without, and the speed of another stream beside them."""
    clients = depth.of(CLIENTS)
    with tiny_model() as model, serving(str(model), "--max-num-seqs", "64") as server:
        progress.expect(clients)
        return asyncio.run(_measure(server, clients, progress))


async def _measure(server: Server, clients: int, progress: Progress) -> Measured:
    body = {"prompt": "canary", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    canary = Canary(Request("canary", COMPLETIONS, body), seconds=PATIENCE_SECONDS)
    alone = [await _seconds_of_a_song(canary, server) for _ in range(SONGS)]
    before = own_bytes(server.pid)
    readers = [await _slow_reader(server) for _ in range(clients)]
    peak = before
    async with singing(canary, server.url, pause=0.5):
        while not await asyncio.to_thread(_generated, server):
            peak = max(peak, own_bytes(server.pid))
            await asyncio.sleep(0.2)
    progress.update(clients)
    # The readers' answers are complete, but they have read next to nothing of them.
    beside = [await _seconds_of_a_song(canary, server) for _ in range(SONGS)]
    peak = max(peak, own_bytes(server.pid))
    for _, writer in readers:
        writer.close()
    back = await asyncio.to_thread(wait_until, server.idle, 60.0)
    each, slower = (peak - before) / clients / MIB, sorted(beside)[SONGS // 2] / sorted(alone)[SONGS // 2]
    misses = list(canary.wrong)
    if each > 1.0:
        misses.append(f"{each:.2f} MiB a reader")
    if back > 10.0:
        misses.append(f"blocks came back after {back:.1f} s")
    figure = f"{clients} readers: {each:.2f} MiB each; another stream takes {slower:.2f} of its time alone"
    return judge(figure, misses, mib_each=each, time_ratio=slower, alone=alone, beside=beside)


async def _seconds_of_a_song(canary: Canary, server: Server) -> float:
    began = now()
    await canary.sing(server.url)
    return now() - began


def _generated(server: Server) -> bool:
    """Whether nothing is generated for slow readers any more: all is on its way, or they were cut off."""
    state = server.health()
    return int(state["running"]) + int(state["waiting"]) <= 1


async def _slow_reader(server: Server) -> tuple[asyncio.Task[None], asyncio.StreamWriter]:
    """Start a client with a small receive buffer that reads a byte a second."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", server.port))
    reader, writer = await asyncio.open_connection(sock=raw, limit=1)
    body: dict[str, Any] = {"prompt": "slow", "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    sent = json.dumps(body | {"logprobs": LOGPROBS, "stream": True}).encode()
    writer.write(head_of(COMPLETIONS, len(sent)) + sent)
    return asyncio.ensure_future(_drip(reader)), writer


async def _drip(reader: asyncio.StreamReader) -> None:
    try:
        while await reader.read(1):
            await asyncio.sleep(1.0)
    except OSError:
        return  # the server gave up on this client
