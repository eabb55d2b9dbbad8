"""The HTTP response made from the engine's outputs, and what happens when it cannot be completed.

Invariants: whatever ends a response early (disconnect, error, shutdown), its requests are closed before the response is
over, which aborts them; bytes are written only as fast as the client reads.
"""

from __future__ import annotations

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import PenstockError
from penstock.server.delivery.deliveries import Delivery
from penstock.server.delivery.live_requests import LiveRequests
from penstock.server.delivery.observation import account_of
from penstock.server.delivery.output_stream import OutputStream
from penstock.server.delivery.parsed_request import ParsedRequest
from penstock.server.delivery.streams import Resumed, Streams
from penstock.server.http.connection import ClientLeft, while_connected
from penstock.server.http.failures import ShuttingDown, error_object, error_response, log_failure, note_refusal
from penstock.server.http.response_writer import ResponseWriter

__all__ = ["EngineResponse"]


class EngineResponse(Response):
    """An HTTP response made from the engine's outputs."""

    def __init__(self, live: LiveRequests, streams: Streams, parsed: ParsedRequest, delivery: Delivery) -> None:
        self._streams = streams
        self._parsed = parsed
        self._delivery = delivery
        self._outputs = OutputStream(live, parsed)
        self._complete = False  # whether the whole answer was sent
        self.status_code = 200
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, and abort its requests if it ends early.

        It ends early if the client disconnects, the server shuts down, or another connection resumes the stream.
        """
        writer, account = ResponseWriter(send), account_of(scope)
        writer.headers = self._outputs.headers
        account.parsed, account.outputs = self._parsed, self._outputs
        try:
            async with self._streams.reading(self._parsed.id):
                await while_connected(receive, self._answer(writer, scope))
        except ClientLeft:
            return
        except Resumed as error:
            await self._fail(error, writer)
        except asyncio.CancelledError:
            await self._fail(ShuttingDown(), writer)
            raise

    async def _answer(self, writer: ResponseWriter, scope: Scope) -> None:
        try:
            await self._delivery.deliver(self._outputs, writer)
            self._complete = True
        except PenstockError as error:
            note_refusal(scope, error)
            await self._fail(error, writer)
        except Exception as error:
            log_failure(error, self._parsed.id)
            await self._fail(error, writer)

    async def _fail(self, error: Exception, writer: ResponseWriter) -> None:
        if self._complete:  # it was completed just before it was to be ended
            return
        if not writer.started:
            await writer.respond(error_response(error, self._parsed.aliases))
            return
        await self._delivery.fail(error_object(error, self._parsed.aliases), self._outputs.usage, writer)
