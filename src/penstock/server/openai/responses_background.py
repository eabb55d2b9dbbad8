"""Responses in the background: each is made in a task of its own, for nobody who waits.

Decides what becomes of one whose server ended before it had, however it ended: it is generated again from its request,
which was written down before its caller was told that it is accepted. Its seed follows from its id, so it becomes what
it would have been. It ends as failed instead where it would be another answer, where its caller has lost its key, and
where it may be what ends the server. Confined to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing, asynccontextmanager, nullcontext
from dataclasses import replace

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
"""A response that is unfinished whenever the server ends may be why it ends."""

AGAIN_AT_ONCE = 16
"""How many are generated again at the same time, beside what callers send meanwhile."""

PAUSE_SECONDS = 1.0
"""Between two tries to generate one again where the engine has no room for it."""

log = logging.getLogger("penstock.server")


class _NotAgain(Exception):
    """A response that was not finished is not to be generated again; says why, to its caller."""


class BackgroundResponses:
    """The responses of one application that are made in the background; see the module."""

    def __init__(self, serving: Serving, store: ResponseStore) -> None:
        self._serving = serving
        self._store = store
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._again = asyncio.Semaphore(AGAIN_AT_ONCE)
        serving.around.append(self._while_serving)

    async def begin(self, wanted: ResponseRequest, body: JsonObject, tenant: str) -> JsonObject:
        """Begin one, whose request has this body; the response as it is now, which would survive the server's end.

        Raises:
            Overloaded: its caller has as many requests at once as it may.
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
        """Return when it is not being made, or not any more."""
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
        """What generates a response that was being made when the server ended; None where nothing should."""
        if stored.asked is None:  # its client's connection ended with the server
            self._end(stored, {"status": "cancelled"})
            return None
        try:
            wanted = self._read_again(stored, stored.asked)
        except (_NotAgain, RequestError) as error:
            self._fail(stored, str(error))
            return None
        except Exception as error:  # one that cannot be read must not keep the others from being made
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
        """The request as it was read before.

        Raises:
            _NotAgain: the response is to fail instead.
            RequestError: this server does not take the request any more.
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
        wanted = parse_response(asked.body, stored.id, serving.card, serving.limits, lambda _: before)
        requests = tuple(map(with_seed, wanted.parsed.requests))
        parsed = replace(wanted.parsed, requests=requests, created=stored.body["created_at"])
        return replace(wanted, parsed=bound(self._serving.normalize(parsed)[0], caller))

    def _caller(self, tenant: str) -> Caller | None:
        """Who has this name now."""
        known = self._serving.access.keys.callers or (Caller(),)
        return next((caller for caller in known if caller.name == tenant), None)

    # --- making

    def _start(self, parsed: ParsedRequest, formatter: ResponsesFormatter, entered: OutputStream | None = None) -> None:
        def end(_: asyncio.Task[None]) -> None:
            del self._tasks[parsed.id]
            if entered is not None:
                entered.leave()

        self._tasks[parsed.id] = task = asyncio.create_task(self._make(parsed, formatter, entered))
        task.add_done_callback(end)

    async def _make(self, parsed: ParsedRequest, formatter: ResponsesFormatter, entered: OutputStream | None) -> None:
        """Make a response that nobody waits for. One that is made again waits until there is room for it."""
        again = entered is None
        async with self._again if again else nullcontext():
            while self._is_wanted(parsed.id):
                outputs = entered or OutputStream(self._serving.live, parsed)
                try:
                    formatter.whole(await _whole(outputs), outputs.usage)
                except PenstockError as error:
                    if again and isinstance(error, Overloaded):
                        await asyncio.sleep(PAUSE_SECONDS)
                        continue
                    if not (self._store.durable and isinstance(error, EngineDead)):  # else the next server makes it
                        formatter.fail(error_object(error)["error"]["message"], outputs.usage)
                except Exception as error:
                    log_failure(error, "background response")
                    formatter.fail(error_object(EngineFault())["error"]["message"], outputs.usage)
                return

    def _is_wanted(self, response_id: str) -> bool:
        """Whether it was neither cancelled nor forgotten before it began."""
        known = self._store.peek(response_id)
        return known is not None and known.body["status"] == "in_progress"


async def _whole(outputs: OutputStream) -> list[tuple[ChoiceDelta, ChoiceFinished]]:
    transcript = Transcript(1)
    async with aclosing(outputs.stream()) as stream:
        async for output in stream:
            transcript.take(output)
    return transcript.choices()
