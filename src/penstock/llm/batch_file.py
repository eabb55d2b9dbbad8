"""OpenAI batch files: each line of one file is a request, each line of another its answer.

A line's body is sent as an HTTP request through the `send` given to `run_lines`, so it means the same as over HTTP.
Decides what a valid line is, which lines are answered already, and how many are in flight at once.
Invariants: at most `most_in_flight` lines are in memory; every line of the input has exactly one line in the results or
the errors when a run ends; an interrupted run resumes where it stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from penstock.api_fields.fields import OBJECT, TEXT, Field, read_fields
from penstock.api_fields.strict_json import JsonObject, decode, encode, printable
from penstock.contract.errors import ConfigError, EngineDead, InvalidParameter, PenstockError, RequestError

__all__ = ["URLS", "BatchCounts", "BatchFiles", "count_lines", "read_answered", "run_lines"]

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")

LINE_FIELDS = (
    Field("custom_id", TEXT, "The caller's name of the request, unique in the file."),
    Field("method", TEXT, "Always POST."),
    Field("url", TEXT, "One of the endpoints that a batch may use."),
    Field("body", OBJECT, "The request, as the endpoint takes it."),
)
MAX_ID_CHARS = 512
MAX_LINE_BYTES = 16 * 1024 * 1024
"""More than any body that the server takes, so that the server itself refuses a body slightly too large."""

BEGINNING = b'{"id":"batch_req_'
"""The beginning of every line that is written here."""

NOT_OURS = "is no answer of this command; give another file"

TOO_MANY = 429
UNAVAILABLE = 503
BAD = 400


class HttpAnswer(Protocol):
    """A complete HTTP answer, from any transport."""

    @property
    def status(self) -> int:
        """The status code."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """By lower-case name."""
        ...

    @property
    def body(self) -> bytes:
        """The complete body."""
        ...


Send = Callable[[str, bytes], Awaitable[HttpAnswer]]
"""Path and JSON of a request -> its answer."""


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """Where lines come from and go to; `errors` may be the same file as `results`.

    Raises:
        ConfigError: a file would be written over the input.
    """

    source: Path
    results: Path
    errors: Path

    def __post_init__(self) -> None:
        for option, target in (("--output", self.results), ("--errors", self.errors)):
            if target.resolve() == self.source.resolve():
                raise ConfigError(option, f"{target} is the input file")


@dataclass(slots=True)
class BatchCounts:
    """How many lines a run has finished, and how. Owned by the run."""

    answered: int = 0
    failed: int = 0
    skipped: int = 0


@dataclass(slots=True)
class Answered:
    """Which lines have an answer: by custom id, or by line number where the id is missing or not unique."""

    ids: set[str] = field(default_factory=set)
    lines: set[int] = field(default_factory=set)


def count_lines(source: Path) -> int:
    """Count the lines that are not blank, without keeping them in memory.

    Raises:
        ConfigError: the file cannot be read.
    """
    return sum(1 for _ in _numbered(source))


def read_answered(files: BatchFiles) -> Answered:
    """The lines that earlier runs answered; a last line that was cut off by an interruption is removed from its file.

    Raises:
        ConfigError: a file holds something other than answers, or cannot be read and written.
    """
    found = Answered()
    for path in {files.results, files.errors}:
        try:
            if path.exists():
                _note_file(found, path)
        except OSError as error:
            raise ConfigError(str(path), f"cannot be read and written: {error.strerror}") from error
    return found


def _note_file(found: Answered, path: Path) -> None:
    whole = 0  # bytes of complete lines
    with path.open("rb+") as file:
        for number, raw in enumerate(file, start=1):
            if raw.endswith(b"\n"):
                _note_answer(found, raw, f"{path}:{number}")
                whole += len(raw)
            elif raw[: len(BEGINNING)] != BEGINNING[: len(raw)]:  # not written here: it must not be cut
                raise ConfigError(f"{path}:{number}", NOT_OURS)
        file.truncate(whole)


def _note_answer(found: Answered, raw: bytes, place: str) -> None:
    try:
        answer = json.loads(raw)
        custom_id, error = answer["custom_id"], answer["error"]
        if custom_id is not None:
            found.ids.add(str(custom_id))
        else:
            found.lines.add(int(error["line"]))
    except (ValueError, KeyError, TypeError) as error_found:
        raise ConfigError(place, NOT_OURS) from error_found


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, line) of every line that is not blank.

    A line that is too long is cut, so that it is not JSON any more; its rest is dropped.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while raw := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                rest = raw
                while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
                    rest = file.readline(MAX_LINE_BYTES + 1)
                if raw.strip():
                    yield number, raw
    except OSError as error:
        raise ConfigError("--input", f"{path} cannot be read: {error.strerror}") from error


async def run_lines(
    files: BatchFiles, send: Send, most_in_flight: int, on_line: Callable[[], None] = lambda: None
) -> BatchCounts:
    """Answer every line that has no answer yet; results are appended in the order in which they arrive.

    Args:
        files: see `BatchFiles`.
        send: sends one request and returns its answer.
        most_in_flight: most lines in flight at once, at least 1.
        on_line: called once per line, skipped lines included.

    Raises:
        ConfigError: a file cannot be used.
        EngineDead: nothing can be served any more; the remaining lines can be run again.
    """
    answered = read_answered(files)
    with contextlib.ExitStack() as open_files:
        results = open_files.enter_context(_appending(files.results, "--output"))
        same = files.errors.resolve() == files.results.resolve()
        errors = results if same else open_files.enter_context(_appending(files.errors, "--errors"))
        run = _Run(send, answered, results, errors, on_line)
        await run.all(files.source, most_in_flight)
        return run.counts


def _appending(path: Path, option: str) -> IO[bytes]:
    try:
        return path.open("ab")
    except OSError as error:
        raise ConfigError(option, f"{path} cannot be written: {error.strerror}") from error


class _Run:
    """One pass over the input. Owned by one task."""

    def __init__(
        self, send: Send, answered: Answered, results: IO[bytes], errors: IO[bytes], on_line: Callable[[], None]
    ) -> None:
        self.counts = BatchCounts()
        self._send = send
        self._answered = answered
        self._results = results
        self._errors = errors
        self._on_line = on_line
        self._seen: set[str] = set()
        self._working = 0

    async def all(self, source: Path, most_in_flight: int) -> None:
        """Run every line, at most `most_in_flight` at once."""
        room = asyncio.Semaphore(most_in_flight)
        try:
            async with asyncio.TaskGroup() as tasks:
                for number, raw in _numbered(source):
                    await room.acquire()
                    task = tasks.create_task(self._one(number, raw))
                    task.add_done_callback(lambda _: room.release())
        except ExceptionGroup as group:  # not `except*`: some versions of Python wrap what it raises in a group again
            ours, others = group.split(PenstockError)
            if ours is None or others is not None:
                raise
            raise ours.exceptions[0] from None

    async def _one(self, number: int, raw: bytes) -> None:
        if number in self._answered.lines:  # an earlier run reported what is wrong with it
            self._skip()
            return
        custom_id: str | None = None
        try:
            given = read_fields(decode(raw), LINE_FIELDS, {})
            custom_id = self._claim_id(given)
            if custom_id in self._answered.ids:
                self._skip()
                return
            record = await self._answer(custom_id, *_request(given))
        except RequestError as error:
            record = _refusal(custom_id, number, error)
        self._write(record)
        self._on_line()

    def _skip(self) -> None:
        self.counts.skipped += 1
        self._on_line()

    def _claim_id(self, given: JsonObject) -> str:
        """The line's id, which no later line may have.

        Raises:
            RequestError: the id is missing, empty, too long, or an earlier line's.
        """
        custom_id = _text(given, "custom_id")
        if not 0 < len(custom_id) <= MAX_ID_CHARS:
            raise InvalidParameter("custom_id", f"custom_id must have 1 to {MAX_ID_CHARS} characters.")
        if custom_id in self._seen:
            message = f"An earlier line has the custom_id {printable(custom_id)!r}."
            raise InvalidParameter("custom_id", message, code="duplicate_custom_id")
        self._seen.add(custom_id)
        return custom_id

    async def _answer(self, custom_id: str, url: str, body: JsonObject) -> JsonObject:
        answer = await self._until_taken(url, encode(body))
        if answer.status == UNAVAILABLE:
            raise EngineDead(f"the engine stopped: {answer.body.decode()[:500]}")
        response = {
            "status_code": answer.status,
            "request_id": answer.headers.get("x-request-id", ""),
            "body": json.loads(answer.body),
        }
        return _record(custom_id, response, None)

    async def _until_taken(self, url: str, body: bytes) -> HttpAnswer:
        """Send, and retry while the queue is full. A request refused while nothing else is in flight never fits."""
        alone = False
        while True:
            self._working += 1
            try:
                answer = await self._send(url, body)
            finally:
                self._working -= 1
            if answer.status != TOO_MANY or alone:
                return answer
            alone = not self._working
            await asyncio.sleep(0 if alone else float(answer.headers.get("retry-after", "1")))

    def _write(self, record: JsonObject) -> None:
        """Append one answer, and flush it before the line counts as done."""
        response = record["response"]
        good = response is not None and response["status_code"] < BAD
        file = self._results if good else self._errors
        try:
            file.write(encode(record) + b"\n")
            file.flush()
        except OSError as error:
            raise ConfigError("--output" if good else "--errors", f"cannot be written: {error.strerror}") from error
        if good:
            self.counts.answered += 1
        else:
            self.counts.failed += 1


def _request(given: JsonObject) -> tuple[str, JsonObject]:
    """Path and body of a line's request.

    Raises:
        RequestError: the line is not a request that a batch can make.
    """
    if _text(given, "method") != "POST":
        raise InvalidParameter("method", "method must be POST.")
    url = _text(given, "url")
    if url not in URLS:
        raise InvalidParameter("url", f"url must be one of {', '.join(URLS)}.", code="invalid_url")
    if "body" not in given:
        raise InvalidParameter("body", "body is missing.", code="missing_value")
    body: JsonObject = given["body"]
    for name in ("stream", "background"):
        if body.get(name):
            message = f"body.{name}: the answers of a batch are whole; leave {name} out."
            raise InvalidParameter(f"body.{name}", message, code="unsupported_parameter")
    return url, body


def _text(given: JsonObject, name: str) -> str:
    if name not in given:
        raise InvalidParameter(name, f"{name} is missing.", code="missing_value")
    text: str = given[name]
    return text


def _refusal(custom_id: str | None, number: int, error: RequestError) -> JsonObject:
    """The record of an invalid line. It has the line number, because the id may be missing or not unique."""
    what = {"code": error.code, "message": error.message, "param": error.param or None, "line": number}
    return _record(custom_id, None, what)


def _record(custom_id: str | None, response: JsonObject | None, error: JsonObject | None) -> dict[str, Any]:
    return {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
