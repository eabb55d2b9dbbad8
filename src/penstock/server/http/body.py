"""Read a request body: JSON only, within limits on size and time.

Bytes are counted as they arrive, whatever Content-Length says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from starlette.requests import Request
from starlette.types import Receive

from penstock.api_fields.strict_json import JsonObject, decode
from penstock.server.http.connection import ClientLeft
from penstock.server.http.failures import BodyTooLarge, BodyTooSlow, UnsupportedMediaType

__all__ = ["discard_body", "read_body", "read_json"]

DEADLINE_SECONDS = 30.0
"""Time limit for reading the whole body."""

DISCARD_SECONDS = 1.0
"""How long a refused body is still read: otherwise a client that is still writing sees a reset instead of the 413."""

INLINE_BYTES = 64 * 1024
"""Larger bodies are parsed off the event loop, so that they do not hold up other streams."""


async def read_json(http_request: Request, limit: int) -> JsonObject:
    """Read the body as a JSON object.

    Raises:
        RequestError: wrong media type, more than `limit` bytes, too slow, or not strict JSON.
        ClientLeft: the connection ended before the body did.
    """
    _check_media_type(http_request.headers.get("content-type", ""))
    body = await read_body(http_request, limit)
    if len(body) <= INLINE_BYTES:
        return decode(body)
    return await asyncio.to_thread(decode, body)


async def read_body(http_request: Request, limit: int) -> bytes:
    """Read the whole body, of any media type.

    Raises:
        RequestError: more than `limit` bytes, or too slow.
        ClientLeft: the connection ended before the body did.
    """
    pieces = _pieces(http_request.receive)
    if int(http_request.headers.get("content-length", "0")) > limit:
        await _discard(pieces, limit)
        raise BodyTooLarge(limit)
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            return await _collect(pieces, limit)
    except TimeoutError:
        raise BodyTooSlow(DEADLINE_SECONDS) from None


async def discard_body(receive: Receive, limit: int) -> bool:
    """Read and drop the body of a refused request, for at most `DISCARD_SECONDS` and about `limit` bytes.

    A client that is still writing when the connection closes sees a reset, and may never read the refusal.

    Returns:
        Whether the whole body was read, so that the connection can be reused.
    """
    with suppress(ClientLeft):
        return await _discard(_pieces(receive), limit)
    return False


def _check_media_type(content_type: str) -> None:
    media_type, _, parameters = content_type.partition(";")
    charset = parameters.replace(" ", "").replace('"', "").lower()
    if media_type.strip().lower() != "application/json" or charset not in ("", "charset=utf-8", "charset=utf8"):
        raise UnsupportedMediaType


async def _pieces(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        more = message.get("more_body", False)
        yield message.get("body", b"")


async def _collect(pieces: AsyncIterator[bytes], limit: int) -> bytes:
    body = bytearray()
    async for piece in pieces:
        body += piece
        if len(body) > limit:
            body.clear()
            await _discard(pieces, limit)
            raise BodyTooLarge(limit)
    return bytes(body)


async def _discard(pieces: AsyncIterator[bytes], limit: int) -> bool:
    """Read and drop the rest within `DISCARD_SECONDS` and about `limit` bytes; return whether the body ended."""
    size = 0
    try:
        async with asyncio.timeout(DISCARD_SECONDS):
            async for piece in pieces:
                size += len(piece)
                if size > limit:
                    return False
    except TimeoutError:
        return False
    return True
