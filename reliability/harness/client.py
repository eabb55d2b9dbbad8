"""Sends one HTTP request over a connection of its own, and reads its answer with the time of each part.

Written on asyncio's streams and h11, because hundreds of requests run at once beside the server under test, and
because some of them must fail on purpose: the rows need what httpx hides, for example where a connection broke.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import h11

from penstock.bench.event_stream import EventReader, Target

__all__ = ["Answer", "AnswerReader", "Event", "ask", "head_of", "now", "said"]

_READ_BYTES = 1 << 16
_DONE = "[DONE]"

now = time.monotonic


@dataclass(frozen=True, slots=True)
class Event:
    """The data of a server-sent event, and the moment when its last byte was read."""

    moment: float
    data: str


@dataclass(slots=True)
class Answer:
    """Holds the answer to a request.

    Attributes:
        status: the HTTP status; 0 if no head came.
        broken: why the answer is incomplete; "" if it is complete.
        sent, began, ended: the moments when the request was begun, the head had come, and the end had come.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    events: list[Event] = field(default_factory=list)
    broken: str = ""
    sent: float = 0.0
    began: float = 0.0
    ended: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether the answer is complete and reports no error; a stream's last event is `[DONE]`."""
        if self.broken or self.status != 200:
            return False
        if self.events:
            return self.events[-1].data == _DONE and not any('"error":' in each.data[:12] for each in self.events)
        return bool(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object of the body, or of an event; {} if there is none."""
        texts = [each.data for each in self.events] if self.events else [self.body.decode(errors="replace")]
        for text in texts:
            try:
                value = json.loads(text)
            except ValueError:
                continue
            if isinstance(value, dict) and isinstance(value.get("error"), dict):
                return dict(value["error"])
        return {}

    @property
    def first_token(self) -> float:
        """Seconds from the request to its first event with text; infinity if there was none."""
        for event in self.events:
            if event.data != _DONE and _has_text(json.loads(event.data)):
                return event.moment - self.sent
        return float("inf")

    def describe(self) -> str:
        """Describe the answer for a miss: status, error and where it broke."""
        code = self.error.get("code", "")
        return " ".join(filter(None, (f"HTTP {self.status}", str(code or ""), self.broken)))


def head_of(path: str, length: int, headers: Mapping[str, str] | None = None, method: str = "POST") -> bytes:
    """Return the bytes of a request's head."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    lines += [f"Content-Length: {length}", *(f"{name}: {value}" for name, value in (headers or {}).items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def ask(
    url: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    on_event: Callable[[Event], None] = lambda _: None,
    seconds: float = 600.0,
    leaves_after: float = math.inf,
) -> Answer:
    """Send a request (a POST with a JSON body; a GET without) and read its answer to the end; never raises for it.

    Args:
        url: the server's URL.
        path: the endpoint's path.
        body: a JSON value, or the bytes of one.
        headers: headers besides those that every request has.
        on_event: called with each event of a stream as it comes.
        seconds: seconds after which an answer that has not ended counts as hung.
        leaves_after: seconds after the first event of a stream at which the client leaves.
    """
    answer = Answer(sent=now())

    def hear(event: Event) -> None:
        if len(answer.events) == 1 and leaves_after < math.inf:
            limit.reschedule(asyncio.get_running_loop().time() + leaves_after)
        on_event(event)

    try:
        async with asyncio.timeout(seconds) as limit:
            await _exchange(url, path, body, headers, hear, answer)
    except TimeoutError:
        answer.broken = f"no end within {now() - answer.sent:.0f} s"
    except (OSError, h11.RemoteProtocolError) as error:
        answer.broken = f"{type(error).__name__}: {error}"
    answer.ended = now()
    return answer


async def _exchange(
    url: str,
    path: str,
    body: Any,
    headers: Mapping[str, str] | None,
    on_event: Callable[[Event], None],
    answer: Answer,
) -> None:
    target = Target.parse(url)
    sent = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(target.host, target.port)
    try:
        given = {"Connection": "close", **(headers or {})}
        writer.write(head_of(path, len(sent), given, "GET" if body is None else "POST") + sent)
        await _read(reader, answer, on_event, "GET" if body is None else "POST")
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader, answer: Answer, on_event: Callable[[Event], None], method: str) -> None:
    taking = AnswerReader(answer, method, on_event)
    while not taking.take(await reader.read(_READ_BYTES), now()):
        pass


class AnswerReader:
    """Reads an answer from the bytes of its connection, as they arrive.

    Args:
        answer: filled with what is read.
        method: the request's method: the answer to a HEAD has no body.
        on_event: called with each event of a stream.
    """

    def __init__(self, answer: Answer, method: str, on_event: Callable[[Event], None] = lambda _: None) -> None:
        self._answer = answer
        self._on_event = on_event
        self._events = EventReader()
        self._connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
        # h11 must believe that it wrote the request; the bytes have been sent already.
        self._connection.send(h11.Request(method=method, target="/", headers=[("Host", "127.0.0.1")]))
        self._connection.send(h11.EndOfMessage())

    def take(self, data: bytes, moment: float) -> bool:
        """Take bytes that came at a moment, b"" for the end of the connection; returns whether the answer has ended.

        Raises:
            h11.RemoteProtocolError: the bytes are no valid part of an answer.
        """
        answer = self._answer
        self._connection.receive_data(data)
        while True:
            event = self._connection.next_event()
            if event is h11.NEED_DATA:
                return False
            if isinstance(event, h11.Response):
                answer.status, answer.began = event.status_code, moment
                answer.headers = {name.decode(): value.decode("latin-1") for name, value in event.headers}
            elif isinstance(event, h11.Data):
                self._take_body(bytes(event.data), moment)
            elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                return True

    def _take_body(self, piece: bytes, moment: float) -> None:
        if not self._answer.headers.get("content-type", "").startswith("text/event-stream"):
            self._answer.body += piece
            return
        for data in self._events.push(piece):
            event = Event(moment, data)
            self._answer.events.append(event)
            self._on_event(event)


def _has_text(chunk: dict[str, Any]) -> bool:
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or delta.get("content") or delta.get("tool_calls") or delta.get("reasoning_content"):
            return True
    return False


def said(answer: Answer) -> dict[str, Any]:
    """Return what an answer of completions or chat completions says, its pieces joined, without ids.

    Two answers to one request say the same to the byte exactly if these values are equal: text, calls, log
    probabilities, how each choice ended, and how many tokens were counted.
    """
    chunks = [json.loads(each.data) for each in answer.events if each.data != _DONE]
    chunks = chunks or [json.loads(answer.body)]
    choices: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] = {}
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices") or ():
            _join(choices.setdefault(choice["index"], _nothing()), choice)
    counted = {name: usage.get(name) for name in ("prompt_tokens", "completion_tokens")}
    return {"choices": {str(index): choices[index] for index in sorted(choices)}, "usage": counted}


def _nothing() -> dict[str, Any]:
    return {"text": "", "reasoning": "", "calls": {}, "logprobs": [], "finish": None, "stop": None}


def _join(into: dict[str, Any], choice: dict[str, Any]) -> None:
    part = choice.get("delta") or choice.get("message") or {}
    into["text"] += choice.get("text") or part.get("content") or ""
    into["reasoning"] += part.get("reasoning_content") or ""
    for position, call in enumerate(part.get("tool_calls") or ()):
        joined = into["calls"].setdefault(str(call.get("index", position)), {"name": "", "arguments": ""})
        for name in joined:
            joined[name] += (call.get("function") or {}).get(name) or ""
    scores = choice.get("logprobs") or {}
    into["logprobs"] += scores.get("content") or scores.get("token_logprobs") or []
    into["finish"] = choice.get("finish_reason") or into["finish"]
    into["stop"] = choice.get("stop_reason") or into["stop"]
