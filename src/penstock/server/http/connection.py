"""Cancel a request's work when its client disconnects, and close a connection after a response.

Cancellation covers queueing, prefill and decode, streaming or not. The web framework cancels neither plain responses
nor (from ASGI 2.4 on) streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Send

__all__ = ["ClientLeft", "last_of_its_connection", "while_connected"]


class ClientLeft(Exception):
    """The client has disconnected; there is nobody to answer."""


async def while_connected(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Run `work`, but cancel it as soon as the client disconnects. The request body must have been read.

    Returns or raises only after `work` has ended, clean-up included.

    Raises:
        ClientLeft: the client disconnected first.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_departure(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


def last_of_its_connection(send: Send) -> Send:
    """Wrap `send` to close the connection after this response, and to tell the client so."""

    async def send_last(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["connection"] = "close"
        await send(message)

    return send_last
