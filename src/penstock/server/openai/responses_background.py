"""Background responses: each is generated in its own task, with no client waiting.

Decides what happens to a response that was unfinished when its server stopped or crashed: the next server generates it
again from its request, which was saved before its caller was told that it was accepted. Its seed derives from its id,
so it gets the same answer. It fails instead if the answer would differ, if its caller's API key is gone, or if it may
be what crashes the server. Confined to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing, asynccontextmanager, nullcontext
from dataclasses import replace

from penstock.api_fields.certificate import certificate_field
from penstock.api_fields.strict_json import JsonObject
from penstock.contract.errors import EngineDead, EngineFault, Overloaded, PenstockError, RequestError
from penstock.contract.events import ChoiceDelta, ChoiceFinished
from penstock.server.delivery.output_stream import OutputStream, Transcript
from penstock.server.delivery.parsed_request import ParsedRequest
from penstock.server.delivery.serving import Serving, bound
from penstock.server.delivery.streams import with_seed
from penstock.server.http.caller import Caller
from penstock.server.http.failures import error_object, log_failure
from penstock.server.openai.response_store import Asked, ResponseStore, StoredResponse
from penstock.server.openai.responses_answer import ResponsesFormatter
from penstock.server.openai.responses_keeping import Keeper
from penstock.server.openai.responses_request import ResponseRequest, parse_response

__all__ = ["BackgroundResponses"]

MOST_STARTS = 5
"""Most times that one response is started: one that is never finished may be what crashes the server."""

AGAIN_AT_ONCE = 16
"""Most responses generated again at the same time, besides new requests."""

PAUSE_SECONDS = 1.0
"""Pause between two attempts to generate a response again while the engine has no room for it."""

log = logging.getLogger("penstock.server")


class _NotAgain(Exception):
    """An unfinished response must not be generated again; the message tells its caller why."""


class BackgroundResponses:
    """The background responses of one application; see the module."""

    def __init__(self, serving: Serving, store: ResponseStore) -> None:
        self._serving = serving
        self._store = store
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._again = asyncio.Semaphore(AGAIN_AT_ONCE)
        serving.around.append(self._while_serving)

    async def begin(self, wanted: ResponseRequest, body: JsonObject, tenant: str) -> JsonObject:
        """Start a response, and return its response object once it would survive the end of the server.

        Args:
            wanted: the parsed request.
            body: the request's body, from which the response can be generated again.
            tenant: the caller's name.

        Raises:
            Overloaded: the caller is at its limit of requests at once.
        """
        outputs = OutputStream(self._serving.live, wanted.parsed)
        outputs.enter()
        with ExitStack() as undoing:
            undoing.callback(outputs.leave)
            asked = Asked(body, wanted.recalled) if self._store.durable else None
            formatter = Keeper(self._store, wanted, tenant, asked=asked).formatter()
            response = formatter.begin()
            await self._store.settled()
            self._start(wanted.parsed, formatter, outputs)
            undoing.pop_all()
        return response

    async def ended(self, response_id: str) -> None:
        """Wait until the response is not being generated."""
        making = self._tasks.get(response_id)
        if making is not None:
            await asyncio.wait([making])

    # --- what an earlier server left unfinished

    @asynccontextmanager
    async def _while_serving(self) -> AsyncGenerator[None, None]:
        again = [each for stored in self._store.unfinished() if (each := self._take_up(stored)) is not None]
        await self._store.settled()
        for parsed, formatter in again:
            self._start(parsed, formatter)
        if again:
            log.info("%d responses in the background were not finished; they are generated again", len(again))
        try:
            yield
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _take_up(self, stored: StoredResponse) -> tuple[ParsedRequest, ResponsesFormatter] | None:
        """Prepare to generate an unfinished response again; if it must not be, end it and return None."""
        if stored.asked is None:  # its client's connection ended with the server
            self._end(stored, {"status": "cancelled"})
            return None
        try:
            wanted = self._read_again(stored, stored.asked)
        except (_NotAgain, RequestError) as error:
            self._fail(stored, str(error))
            return None
        except Exception as error:  # an unreadable request must not hold up the others
            log_failure(error, stored.id)
            self._fail(
                stored, "The server ended before this response was finished, and its request cannot be read again."
            )
            return None
        asked = replace(stored.asked, starts=stored.asked.starts + 1)
        formatter = Keeper(self._store, wanted, stored.tenant, asked=asked).formatter()
        formatter.begin()
        return wanted.parsed, formatter

    def _fail(self, stored: StoredResponse, message: str) -> None:
        self._end(stored, {"status": "failed", "error": {"code": "server_error", "message": message}})

    def _end(self, stored: StoredResponse, state: JsonObject) -> None:
        self._store.put(replace(stored, body=stored.body | state, asked=None))

    def _read_again(self, stored: StoredResponse, asked: Asked) -> ResponseRequest:
        """Parse the saved request again.

        Raises:
            _NotAgain: the response must fail instead.
            RequestError: this server no longer accepts the request.
        """
        unfinished = "The server ended before this response was finished"
        if not asked.same_model:
            raise _NotAgain(
                f"{unfinished}, and was started again with another model, other options that change answers, or another"
                " version. Ask again."
            )
        if asked.starts >= MOST_STARTS:
            raise _NotAgain(f"{unfinished}, {asked.starts} times.")
        caller = self._caller(stored.tenant)
        if caller is None:
            raise _NotAgain(f"{unfinished}, and the API key that asked for it is not one of this server's any more.")
        before = stored.history[: asked.before]
        serving = self._serving
        wanted = parse_response(asked.body, stored.id, serving.card_now, serving.limits, lambda _: before)
        requests = tuple(map(with_seed, wanted.parsed.requests))
        parsed = replace(wanted.parsed, requests=requests, created=stored.body["created_at"])
        return replace(wanted, parsed=bound(serving.adapted(serving.normalize(parsed)[0]), caller))

    def _caller(self, tenant: str) -> Caller | None:
        """The caller of this name; None if it no longer has a key."""
        known = self._serving.access.keys.callers or (Caller(),)
        return next((caller for caller in known if caller.name == tenant), None)

    # --- generating

    def _start(self, parsed: ParsedRequest, formatter: ResponsesFormatter, entered: OutputStream | None = None) -> None:
        def end(_: asyncio.Task[None]) -> None:
            del self._tasks[parsed.id]
            if entered is not None:
                entered.leave()

        self._tasks[parsed.id] = task = asyncio.create_task(self._make(parsed, formatter, entered))
        task.add_done_callback(end)

    async def _make(self, parsed: ParsedRequest, formatter: ResponsesFormatter, entered: OutputStream | None) -> None:
        """Generate a response in the background. One that is generated again waits until the engine has room."""
        again = entered is None
        async with self._again if again else nullcontext():
            while self._is_wanted(parsed.id):
                outputs = entered or OutputStream(self._serving.live, parsed)
                try:
                    choices = await _whole(outputs)
                    more = certificate_field(outputs.certificate, wanted=parsed.certified)
                    formatter.whole(choices, outputs.usage, more)
                except PenstockError as error:
                    if again and isinstance(error, Overloaded):
                        await asyncio.sleep(PAUSE_SECONDS)
                        continue
                    if not (self._store.durable and isinstance(error, EngineDead)):  # else the next server generates it
                        formatter.fail(error_object(error)["error"]["message"], outputs.usage)
                except Exception as error:
                    log_failure(error, "background response")
                    formatter.fail(error_object(EngineFault())["error"]["message"], outputs.usage)
                return

    def _is_wanted(self, response_id: str) -> bool:
        """Whether the response was neither cancelled nor removed before it began."""
        known = self._store.peek(response_id)
        return known is not None and known.body["status"] == "in_progress"


async def _whole(outputs: OutputStream) -> list[tuple[ChoiceDelta, ChoiceFinished]]:
    transcript = Transcript(1)
    async with aclosing(outputs.stream()) as stream:
        async for output in stream:
            transcript.take(output)
    return transcript.choices()
