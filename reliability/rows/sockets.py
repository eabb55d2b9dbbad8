"""R25: bytes that are no request, two requests or half of one, over many connections: no crash, no way past the key."""

from __future__ import annotations

import asyncio
import random
import re
import resource
from contextlib import suppress

from harness.client import ask, now
from harness.processes import wait_until
from harness.row import Depth, Measured, Progress, judge
from harness.server import Server, serving
from harness.tiny import tiny_model

__all__ = ["mutated", "passed_the_guard", "raw_bytes"]

TRIALS = 20_000
AT_ONCE = 100
KEY = "reliability-key-0123456789"
HEADERS = {"Authorization": f"Bearer {KEY}"}
CANARY_SECONDS = 0.1
SILENT_SECONDS = 0.5
IDLE_CONNECTIONS = 900
"""Silent connections that the server holds beside its other clients: it takes 1,024 at once."""
TOO_MANY = 10_000
"""Silent connections far beyond that (or as many as this process may open): others are refused, but not for long."""
AGAIN_SECONDS = 10.0

_POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_BODY = b'{"prompt":"x","max_tokens":2}'
_WHOLE = _POST + b"Content-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
_HEAD = b"Host: localhost\r\n\r\n"
SEEDS = (
    b"GET /v1/models HTTP/1.1\r\n" + _HEAD,
    _WHOLE,
    _WHOLE * 3,
    _POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(_BODY), _BODY),
    _POST + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
    _POST + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\nGET /metrics HTTP/1.1\r\n" + _HEAD,
    _POST + b"Content-Length: -1\r\n\r\n",
    _POST + b"Content-Length: 99999999999999999999\r\n\r\nx",
    _POST + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n",
    b"GET /health HTTP/1.0\r\n\r\n",
    b"GET http://127.0.0.1/metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET http://evil/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost/health/live?x=\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: @evil\r\n\r\n",
    b"GET //v1/models HTTP/1.1\r\n" + _HEAD,
    b"GET /%76%31/models HTTP/1.1\r\n" + _HEAD,
    b"GET /V1/models HTTP/1.1\r\n" + _HEAD,
    b"GET /v1/models/ HTTP/1.1\r\n" + _HEAD,
    b"GET /health/live/../../metrics HTTP/1.1\r\n" + _HEAD,
    b"GET /health/live%2f..%2f..%2fmetrics HTTP/1.1\r\n" + _HEAD,
    b"GET /page/../metrics HTTP/1.1\r\n" + _HEAD,
    b"GET /page/%2e%2e/metrics HTTP/1.1\r\n" + _HEAD,
    b"GET /health/live;/../metrics HTTP/1.1\r\n" + _HEAD,
    b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-Path: /health/live\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX-Original-URL: /health/live\r\nX-HTTP-Method-Override: HEAD\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer null\r\nx-api-key: \x00\r\n\r\n",
    b"HEAD /metrics HTTP/1.1\r\n" + _HEAD,
    b"OPTIONS * HTTP/1.1\r\n" + _HEAD,
    b"CONNECT 127.0.0.1:80 HTTP/1.1\r\n" + _HEAD,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % index for index in range(2000)) + _HEAD,
    b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 200_000 + b"\r\n" + _HEAD,
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n" + _HEAD,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\r\n" * 5000,
    b"",
)
"""Valid and invalid requests: sent as they are, and with changes."""

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3})[^\r]*\r\n(.*?)\r\n\r\n(.*?)(?=HTTP/1\.1 \d{3}|\Z)", re.DOTALL)
_GUARDED_TYPES = (b"application/json", b"text/event-stream", b"text/plain")


def raw_bytes(depth: Depth, progress: Progress) -> Measured:
    """Send each seed as it is, then changed ones, beside a canary with a key; then idle and dripping connections."""
    trials = depth.of(TRIALS)
    progress.expect(trials)
    with tiny_model() as model, serving(str(model), environment={"PENSTOCK_API_KEY": KEY}) as server:
        misses, latencies = asyncio.run(_everything(server, trials, progress))
        again = asyncio.run(_beyond_the_limit(server))
        if again > AGAIN_SECONDS:
            misses.append(f"nobody is answered for {again:.0f} s after {TOO_MANY} silent connections")
        if not wait_until(lambda: server.idle(HEADERS), 30) < 30:
            misses.append("blocks are missing when all is over")
    latencies.sort()
    worst, p99 = latencies[-1], latencies[int(len(latencies) * 0.99)]
    if p99 > CANARY_SECONDS:
        misses.append(f"the canary's 99th percentile is {p99 * 1000:.0f} ms")
    canary = f"canary {p99 * 1000:.0f} ms (p99), {worst * 1000:.0f} ms at most"
    figure = f"{trials} connections, {len(misses) or 'no'} misses; {canary};"
    figure += f" answers {again:.1f} s after more silent connections than it takes"
    return judge(figure, misses, canary_p99=p99, canary_worst=worst, again=again)


async def _everything(server: Server, trials: int, progress: Progress) -> tuple[list[str], list[float]]:
    misses: list[str] = []
    latencies: list[float] = []
    ended = asyncio.Event()
    canary = asyncio.ensure_future(_canary(server, ended, misses, latencies))
    chance, room = random.Random(13), asyncio.Semaphore(AT_ONCE)

    async def one(sent: bytes) -> None:
        async with room:
            if found := await _trial(server, sent):
                misses.append(found)
            progress.update()

    await asyncio.gather(*(one(sent) for sent in _sent(chance, trials)))
    misses += await _idle_and_dripping(server)
    ended.set()
    await canary
    return misses, latencies


def _sent(chance: random.Random, trials: int) -> list[bytes]:
    return [*SEEDS, *(mutated(chance.choice(SEEDS), chance) for _ in range(trials - len(SEEDS)))]


def mutated(sent: bytes, chance: random.Random) -> bytes:
    """Return a request with some bytes changed, left out, doubled or inserted."""
    changed = bytearray(sent)
    for _ in range(chance.randint(1, 6)):
        at = chance.randint(0, max(0, min(len(changed) - 1, 400)))
        match chance.randrange(5):
            case 0 if changed:
                changed[at] = chance.randrange(256)
            case 1:
                changed[at:at] = chance.choice(
                    (b"\r\n", b"\0", b"\n", b" ", b"\r", b"%00", b"\xff", b"Host: a\r\n", b"/..")
                )
            case 2:
                del changed[at : at + chance.randint(1, 40)]
            case 3:
                changed[at:at] = changed[at : at + chance.randint(1, 60)]
            case _:
                del changed[len(changed) - chance.randint(0, len(changed) // 2) :]
    return bytes(changed)


async def _trial(server: Server, sent: bytes) -> str:
    """Send bytes without a key; returns what is wrong with what comes back."""
    received = b""
    try:
        async with asyncio.timeout(45):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            try:
                writer.write(sent)
                with suppress(OSError):
                    await writer.drain()
                while piece := await _more(reader, bool(received)):
                    received += piece
            finally:
                writer.close()
    except TimeoutError:
        return f"neither answered nor closed within 45 s: {sent[:60]!r}"
    except OSError:
        pass  # cut off: the server may do that
    if server.process.poll() is not None:
        return f"the server ended: {sent[:60]!r}"
    return passed_the_guard(sent, received)


async def _more(reader: asyncio.StreamReader, answered: bool) -> bytes:
    """Read the next bytes; none at the end, or if nothing follows an answer, because the connection is kept alive."""
    try:
        return await asyncio.wait_for(reader.read(1 << 16), SILENT_SECONDS if answered else None)
    except TimeoutError:
        if not answered:
            raise
        return b""


def passed_the_guard(sent: bytes, received: bytes) -> str:
    """Say what a caller without a key got that needs a key, or that the answer is a 5xx; "" if neither."""
    for status, head, body in _STATUS.findall(received):
        if status.startswith(b"5") and status != b"503":
            return f"HTTP {status.decode()} to {sent[:80]!r}"
        kind = re.search(rb"content-type: *([^;\r\n]*)", head, re.IGNORECASE)
        guarded = kind is not None and kind[1].lower() in _GUARDED_TYPES
        if status.startswith(b"2") and guarded and b'"status":"live"' not in body:
            return f"answered without a key: {sent[:80]!r}"
    return ""


async def _canary(server: Server, ended: asyncio.Event, misses: list[str], latencies: list[float]) -> None:
    """Send a request with a key five times a second."""
    while not ended.is_set():
        began = now()
        answer = await ask(server.url, "/v1/models", headers=HEADERS, seconds=30)
        latencies.append(now() - began)
        if answer.status not in (200, 429):
            misses.append(f"the canary got {answer.describe()}")
        await asyncio.sleep(max(0.0, 0.2 - (now() - began)))


async def _beyond_the_limit(server: Server) -> float:
    """Open more silent connections than the server takes; returns the seconds until the next answer."""
    silent = await _silent(server, min(TOO_MANY, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200))
    began = now()
    while (await ask(server.url, "/v1/models", headers=HEADERS, seconds=5)).status != 200 and now() - began < 60:
        await asyncio.sleep(0.1)
    for _, writer in silent:
        writer.close()
    return now() - began


async def _idle_and_dripping(server: Server) -> list[str]:
    """Open silent connections, and some that send a byte a second: the server must end all of them in time."""
    silent = await _silent(server, IDLE_CONNECTIONS)
    dripping = [asyncio.ensure_future(_drip(server)) for _ in range(20)]
    began = now()
    while any(not reader.at_eof() for reader, _ in silent) and now() - began < 30:
        await asyncio.gather(*(_end_of(reader) for reader, _ in silent))
    wrong = [] if now() - began < 20 else [f"silent connections were held for {now() - began:.0f} s"]
    for _, writer in silent:
        writer.close()
    slow = [seconds for seconds in await asyncio.gather(*dripping) if seconds > 20]
    return wrong + [f"a head that dripped was waited for, {seconds:.0f} s" for seconds in slow]


async def _silent(server: Server, most: int) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open connections that nothing is sent over; fewer than `most` if no more can be made."""
    found: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    with suppress(OSError):
        while len(found) < most:
            found += [await asyncio.open_connection("127.0.0.1", server.port)]
    return found


async def _end_of(reader: asyncio.StreamReader) -> None:
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(10):
            while await reader.read(1 << 12):
                continue


async def _drip(server: Server) -> float:
    """Return the seconds for which the server reads a head of one byte a second."""
    began = now()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    except OSError:
        return 0.0
    with suppress(OSError):
        for byte in SEEDS[0] * 2:
            writer.write(bytes((byte,)))
            await writer.drain()
            await asyncio.sleep(1.0)
            if reader.at_eof() or now() - began > 30:
                break
            with suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    if not await reader.read(1 << 12):
                        break
    writer.close()
    return now() - began
