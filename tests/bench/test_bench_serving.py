"""The load test's client: framing against scripted bytes, moments and failures against scripted servers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine, always, delta, finished, length
from sse_reader import read_events

from penstock.bench.event_stream import EventReader, HttpFailure, Target, stream_events
from penstock.bench.serving import RequestOptions, drive, has_content
from penstock.bench.workload import Call
from penstock.contract.errors import ConfigError
from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.contract.server_config import ServerConfig
from penstock.server import create_app
from penstock.server.http.run import Server

Play = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]
EVENTS = 'data: {"a": 1}\n\ndata: é\n\n'.encode()
TYPE = b"Content-Type: text/event-stream\r\n"


@asynccontextmanager
async def playing(play: Play):
    """A server that reads one request and lets `play` answer with bytes; yields its target."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        try:
            await play(await reader.readexactly(size), writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield Target("127.0.0.1", port, secure=False, path="/v1")


def saying(answer: bytes) -> Play:
    async def play(body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()

    return play


async def events_of(answer: bytes) -> list[str]:
    async with playing(saying(answer)) as target:
        return [data async for _, data in stream_events(target, "/x", {}, b"{}", lambda: 0.0)]


def chunked(*pieces: bytes) -> bytes:
    return b"".join(f"{len(piece):x};note=1\r\n".encode() + piece + b"\r\n" for piece in pieces) + b"0\r\n\r\n"


@given(st.text(alphabet="ab:\n\r \ufeffdat", max_size=60), st.lists(st.integers(0, 60), max_size=4))
def test_events_are_those_of_the_standard_wherever_the_bytes_are_cut(text, cuts):
    text = text.replace("a", "data: x\n").replace("b", "\n\n")
    stream = text.encode() + b"\n"  # so that no carriage return waits for what follows
    edges = sorted({0, len(stream), *(min(cut, len(stream)) for cut in cuts)})
    reader = EventReader()
    found = [each for start, end in pairwise(edges) for each in reader.push(stream[start:end])]
    assert found == [event.data for event in read_events(stream) if event.data]


def test_a_line_ending_may_be_cut_in_two():
    reader = EventReader()
    raw = b"data: x\r\ndata: y\r\n\r\ndata: z\n\n"
    assert [event for byte in raw for event in reader.push(bytes([byte]))] == ["x\ny", "z"]


def test_a_character_may_be_cut_in_two():
    reader = EventReader()
    raw = "data: é\r\n\r\n".encode()
    assert [event for byte in raw for event in reader.push(bytes([byte]))] == ["é"]


@pytest.mark.parametrize(
    "rest",
    [
        b"Transfer-Encoding: chunked\r\n\r\n" + chunked(EVENTS[:5], EVENTS[5:20], EVENTS[20:]),
        b"Content-Length: " + str(len(EVENTS)).encode() + b"\r\n\r\n" + EVENTS,
        b"\r\n" + EVENTS,
    ],
)
async def test_bodies_are_chunked_counted_or_unbounded(rest):
    assert await events_of(b"HTTP/1.1 200 OK\r\n" + TYPE + rest) == ['{"a": 1}', "é"]


async def test_interim_answers_are_skipped():
    assert await events_of(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\n" + TYPE + b"\r\n" + EVENTS)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 429 Busy\r\nContent-Length: 10\r\n\r\ntry\nlater!", "HTTP 429: try later!"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<p>", "text/html, not an event stream"),
        (b"SSH-2.0-OpenSSH\r\n", "not HTTP"),
        (b"", "closed early"),
        (b"HTTP/1.1 200 OK\r\nConte", "closed early"),
        (b"HTTP/1.1 200 OK\r\n" + TYPE + b"Content-Length: 99\r\n\r\ndata: x\n\n", "closed early"),
        (b"HTTP/1.1 200 OK\r\n" + TYPE + b"Transfer-Encoding: chunked\r\n\r\n9\r\ndata", "closed early"),
        (b"HTTP/1.1 200 OK\r\n" + TYPE + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", "without a size"),
        (b"HTTP/1.1 200 OK\r\n" + TYPE + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n", "a chunk of -5"),
    ],
)
async def test_what_is_no_event_stream_is_a_failure_with_its_reason(answer, said):
    with pytest.raises(HttpFailure, match=said):
        await events_of(answer)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://localhost:8000/v1", Target("localhost", 8000, False, "/v1")),
        ("https://example.org/", Target("example.org", 443, True, "")),
        ("http://[::1]/v1/", Target("::1", 80, False, "/v1")),
    ],
)
def test_base_urls(url, target):
    assert Target.parse(url) == target


@pytest.mark.parametrize(
    "url",
    ["", "localhost:8000", "ftp://x/", "http://", "http://x:99999/", "http://x/?a=1", "http://a b/", "http://a..b/"],
)
def test_what_is_no_base_url_is_refused(url):
    with pytest.raises(ConfigError, match="base_url"):
        Target.parse(url)


def test_content_is_what_can_be_read():
    assert has_content({"text": "x"})
    assert has_content({"delta": {"content": "x"}})
    assert has_content({"delta": {"reasoning_content": "x"}})
    assert has_content({"delta": {"tool_calls": [{}]}})
    for nothing in (
        {"text": ""},
        {"delta": {"role": "assistant", "content": ""}},
        {"delta": {}, "finish_reason": "stop"},
    ):
        assert not has_content(nothing)


def event(**chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def text_chunk(text: str) -> bytes:
    return event(choices=[{"delta": {"content": text}}])


ROLE = event(choices=[{"delta": {"role": "assistant", "content": ""}}])
END = event(choices=[{"delta": {}, "finish_reason": "length"}])
USAGE = event(
    choices=[], usage={"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 6}}
)
DONE = b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\n" + TYPE + b"\r\n"
CALL = Call(0.0, (1, 2, 3), 4)


async def outcome_of(*events: bytes, **options):
    async with playing(saying(HEAD + b"".join(events))) as target:
        (outcome,) = await drive([CALL], RequestOptions(target, "m", **options))
        return outcome


async def test_the_opening_chunk_and_the_finish_are_no_content():
    outcome = await outcome_of(ROLE, text_chunk("a"), text_chunk("b"), END, USAGE, DONE)
    assert outcome.error == ""
    assert len(outcome.content) == 2
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.counted) == (9, 4, True)
    assert outcome.cached_tokens == 6
    assert outcome.sent <= outcome.content[0] <= outcome.content[1] <= outcome.ended


async def test_time_to_first_token_does_not_end_with_the_opening_chunk():
    """The server sends the role, and content only when the test's clock has moved on."""
    clock, opened = [0.0], asyncio.Event()

    async def play(body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + ROLE)
        await writer.drain()
        await opened.wait()
        writer.write(text_chunk("a") + DONE)

    async def advance() -> None:
        await asyncio.sleep(0.05)  # the role is on its way; whether it has arrived changes nothing
        clock[0] = 7.0
        opened.set()

    async with playing(play) as target:
        (outcome,), _ = await asyncio.gather(
            drive([CALL], RequestOptions(target, "m"), now=lambda: clock[0]), advance()
        )
    assert (outcome.sent, outcome.content, outcome.ended) == (0.0, (7.0,), 7.0)


async def test_without_usage_events_and_prompt_are_counted():
    outcome = await outcome_of(text_chunk("a"), text_chunk("b"), DONE)
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.counted) == (3, 2, False)
    assert outcome.cached_tokens is None


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ((text_chunk("a"), event(error={"message": "out of\nmemory"})), "failed: out of memory"),
        ((ROLE, END, DONE), "no content"),
        ((b"data: {\n\n",), "not JSON"),
        ((b"data: 1\n\n",), "not an object"),
    ],
)
async def test_answers_that_fail_after_their_start(events, said):
    assert said in (await outcome_of(*events)).error


async def test_no_connection_and_no_end_are_outcomes():
    (outcome,) = await drive([CALL], RequestOptions(Target("127.0.0.1", 1, False, ""), "m"))
    assert outcome.error.startswith("no connection")

    async def play(body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + text_chunk("a"))
        await writer.drain()
        await asyncio.sleep(1)

    async with playing(play) as target:
        (outcome,) = await drive([CALL], RequestOptions(target, "m", timeout=0.2))
    assert outcome.error == "no end within 0.2 s"
    assert len(outcome.content) == 1


async def test_a_request_says_what_was_asked_and_carries_the_headers():
    seen: list[bytes] = []

    async def play(body: bytes, writer: asyncio.StreamWriter) -> None:
        seen.append(body)
        writer.write(HEAD + text_chunk("a") + DONE)

    async with playing(play) as target:
        await drive([CALL], RequestOptions(target, "m"))
        await drive([CALL], RequestOptions(target, "m", "chat", ignore_eos=False))
    completion, chat = map(json.loads, seen)
    assert completion == {
        "model": "m", "max_tokens": 4, "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
        "ignore_eos": True, "prompt": [1, 2, 3],
    }  # fmt: skip
    assert chat["messages"] == [{"role": "user", "content": "b c d"}]
    assert "ignore_eos" not in chat


@pytest.mark.parametrize(("concurrency", "most"), [(0, 6), (2, 2), (1, 1)])
async def test_concurrency_limits_what_is_under_way_and_nothing_else_does(concurrency, most):
    """Answers end only once as many are in flight as allowed, so a client that sends fewer would hang."""
    live, peak, turn = 0, 0, asyncio.Condition()

    async def play(body: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal live, peak
        async with turn:
            live += 1
            peak = max(peak, live)
            turn.notify_all()
            await turn.wait_for(lambda: peak >= most)
        await asyncio.sleep(0.05)  # time enough for a client to send more than it may
        live -= 1
        writer.write(HEAD + text_chunk("a") + DONE)

    ended = []
    async with playing(play) as target:
        calls = [CALL] * 6
        outcomes = await asyncio.wait_for(drive(calls, RequestOptions(target, "m"), concurrency, ended.append), 10)
    assert peak == most
    assert [outcome.error for outcome in outcomes] == [""] * 6
    assert len(ended) == 6


async def test_outcomes_keep_the_order_of_calls_and_leave_when_due():
    async with playing(saying(HEAD + text_chunk("a") + DONE)) as target:
        outcomes = await drive([Call(0.2, (1,), 1), Call(0.0, (1, 2), 1)], RequestOptions(target, "m"))
    assert [outcome.prompt_tokens for outcome in outcomes] == [1, 2]
    assert outcomes[0].sent >= outcomes[0].due == 0.2
    assert outcomes[1].sent < outcomes[0].sent


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_our_own_server_is_understood(endpoint):
    engine = ScriptedEngine(always(delta("a"), delta("b"), delta("c"), length(), finished(prompt=7, completion=3)))
    card = ModelCard(name="m", created=1, max_model_len=64, vocab_size=100, has_chat_template=True)
    limits = RequestLimits(max_body_bytes=1 << 16, max_prompts=8, max_sequences=12)
    ready, urls = threading.Event(), []
    server = Server(
        create_app(engine, card, limits), ServerConfig(port=0), lambda url: (urls.append(url), ready.set()), 1
    )
    thread = threading.Thread(target=lambda: asyncio.run(server.listen()))
    thread.start()
    try:
        assert ready.wait(10)
        options = RequestOptions(Target.parse(f"{urls[0]}/v1"), "m", endpoint)
        outcomes = asyncio.run(drive([CALL, CALL], options))
    finally:
        server.stop()
        thread.join(10)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    assert [(len(each.content), each.prompt_tokens, each.output_tokens) for each in outcomes] == [(3, 7, 3)] * 2
    assert {request.stop.max_tokens for request in engine.requests} == {4}
