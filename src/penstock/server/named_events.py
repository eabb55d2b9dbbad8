"""Answers as server-sent events that carry their names, as Anthropic's messages and OpenAI's responses have them.

Decides when events are sent (the opening with the engine's first output, so that an error before it has its own status)
and how they are framed: `event:` is the object's own `type`. What the events are is a `Script`'s business. There is no
`[DONE]`: the last event says that it is the last.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing
from typing import Protocol

from penstock.contract.errors import EngineFault
from penstock.contract.events import ChoiceDelta, ChoiceFinished, Usage
from penstock.server.delivery import EVENT_HEADERS, Outlet, WholeShape
from penstock.server.exchange import Replies
from penstock.server.strict_json import JsonObject, encode

__all__ = ["NamedEventDelivery", "Script"]


class Script(WholeShape, Protocol):
    """How one endpoint tells the answer of one choice, whole or in events. One instance an answer: it may count."""

    def opening(self) -> Iterable[JsonObject]:
        """The events before any text."""
        ...

    def piece(self, delta: ChoiceDelta) -> Iterable[JsonObject]:
        """The events of more text; none where it would say nothing."""
        ...

    def closing(self, finished: ChoiceFinished, usage: Usage) -> Iterable[JsonObject]:
        """The events of a complete answer's end."""
        ...

    def failing(self, error: JsonObject, usage: Usage) -> Iterable[JsonObject]:
        """The events of an answer that cannot be completed; `error` is OpenAI's error object."""
        ...


class NamedEventDelivery:
    """See the module."""

    def __init__(self, script: Script) -> None:
        self._script = script

    async def deliver(self, replies: Replies, outlet: Outlet) -> None:
        """One event or more for each output, as it comes."""
        finished: ChoiceFinished | None = None
        async with aclosing(replies.stream()) as stream:
            async for output in stream:
                await self._open(outlet)
                if isinstance(output, ChoiceFinished):
                    finished = output
                else:
                    await _write(outlet, self._script.piece(output))
        if finished is None:
            raise EngineFault("The engine ended the answer before it was complete.")
        await _write(outlet, self._script.closing(finished, replies.usage))
        await outlet.end()

    async def fail(self, error: JsonObject, usage: Usage, outlet: Outlet) -> None:
        """Say so, in the endpoint's own way."""
        await _write(outlet, self._script.failing(error, usage))
        await outlet.end()

    async def _open(self, outlet: Outlet) -> None:
        if not outlet.started:
            await outlet.start(EVENT_HEADERS)
            await _write(outlet, self._script.opening())


async def _write(outlet: Outlet, events: Iterable[JsonObject]) -> None:
    framed = b"".join(b"event: " + event["type"].encode() + b"\ndata: " + encode(event) + b"\n\n" for event in events)
    if framed:
        await outlet.write(framed)
