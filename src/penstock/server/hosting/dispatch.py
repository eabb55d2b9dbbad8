"""Hands each request to the model that it names: by `?model=`, by the body's `model`, else the first of the list.

A model's part of the server is made when the model is first loaded, and stays when the model is unloaded, so its stored
answers are still there when the model is loaded again. Requests for a stored answer name no model: each part is asked
until one has it. If an earlier process recorded the answer, the model that gave it is loaded first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from urllib.parse import parse_qs

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.api_fields.strict_json import printable
from penstock.contract.errors import PenstockError, UnknownModel
from penstock.contract.hosting import Models, ModelStatus, ServedModel
from penstock.contract.journal import AnswerJournal
from penstock.server.application import ModelPart
from penstock.server.http.body import read_body
from penstock.server.http.connection import while_connected
from penstock.server.http.failures import error_response
from penstock.server.http.known_refusals import SCOPE_KEY

__all__ = ["Dispatch", "Parts"]

_STORED = ("/v1/responses/", "/v1/chat/completions/")
"""Prefixes of paths that may name a stored answer."""
_NOT_FOUND = 404


class _Named(msgspec.Struct):
    """The fields of a body that are read before its model is known; the rest is skipped."""

    model: str | None = None
    lora_name: str | None = None


class Parts:
    """The parts of the models that have been loaded so far, by main name. Confined to one event loop.

    Args:
        models: the server's models.
        make: makes the part of a model that is loaded for the first time; called in a thread.
        journals: the journals of models' stored answers, by main name.
    """

    def __init__(
        self,
        models: Models,
        make: Callable[[str, ServedModel], ModelPart],
        journals: Mapping[str, AnswerJournal] | None = None,
    ) -> None:
        self.models = models
        self._make = make
        self._journals = journals or {}
        self._parts: dict[str, ModelPart] = {}
        self._making = asyncio.Lock()
        self._holding: list[asyncio.Task[None]] = []
        self._end = asyncio.Event()

    def present(self) -> tuple[ModelPart, ...]:
        """Every part that was made so far."""
        return tuple(self._parts.values())

    def made(self, main: str) -> ModelPart | None:
        """The part of the model with this main name; None if it was never loaded."""
        return self._parts.get(main)

    def status(self, name: str) -> ModelStatus:
        """The present status of the model that a caller named.

        Raises:
            UnknownModel: no model has this name.
        """
        try:
            return self.models.status(name)
        except UnknownModel:
            raise UnknownModel(printable(name), *self.models.names) from None

    async def of(self, name: str) -> ModelPart:
        """The part of the model that a caller named; the model is loaded if it never was.

        Raises:
            UnknownModel: no model has this name.
            Unavailable: the model is not loaded yet, or cannot be.
        """
        main = self.status(name).model.names[0]
        if main not in self._parts:
            async with self.models.use(main) as model, self._making:
                if main not in self._parts:  # another request may have waited for it too
                    part = await asyncio.to_thread(self._make, main, model)  # reads its stored answers
                    await self._begin(part)
                    self._parts[main] = part
        return self._parts[main]

    async def holder(self, answer_id: str) -> str:
        """The main name of a model that has no part yet, and whose journal holds this answer; "" if there is none."""
        for name, journal in self._journals.items():
            if name not in self._parts and await journal.holds(answer_id):
                return name
        return ""

    async def close(self) -> None:
        """Leave the lifespan of every part, which ends what runs beside its requests."""
        self._end.set()
        await asyncio.gather(*self._holding)

    async def _begin(self, part: ModelPart) -> None:
        """Enter the part's lifespan in a task of its own; the same task leaves it."""
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def hold() -> None:
            async with part.app.router.lifespan_context(part.app):
                begun.set_result(None)
                await self._end.wait()

        self._holding.append(asyncio.create_task(hold()))
        await begun


class Dispatch:
    """ASGI middleware; see the module.

    Args:
        app: the endpoints of the server itself.
        parts: the parts of the models.
        is_own: whether a path belongs to `app`.
        max_body_bytes: limit on the size of a body.
    """

    def __init__(self, app: ASGIApp, parts: Parts, is_own: Callable[[str], bool], max_body_bytes: int) -> None:
        self._app = app
        self._parts = parts
        self._is_own = is_own
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the server itself, or the model that the request names, answer it."""
        if scope["type"] != "http" or self._is_own(scope["path"]):
            await self._app(scope, receive, send)
            return
        try:
            body = await read_body(Request(scope, receive), self._max_body_bytes)
            name = self._named(scope, body)
            stored_id = _stored_id(scope["path"])
            if stored_id and not name:
                name = await self._parts.holder(stored_id)
            if stored_id and not name and (parts := self._parts.present()):
                await self._ask_each(parts, scope, _Replay(body, receive), send)
                return
            part = await self._part(name or self._parts.models.names[0], receive)
        except PenstockError as error:
            await error_response(error)(scope, receive, send)
            return
        await _answer(part, scope, _Replay(body, receive), send)

    async def _part(self, name: str, receive: Receive) -> ModelPart:
        """The part of a model; gives up if the client disconnects meanwhile."""
        found: list[ModelPart] = []

        async def find() -> None:
            found.append(await self._parts.of(name))

        await while_connected(receive, find())
        return found[0]

    def _named(self, scope: Scope, body: bytes) -> str:
        """The name by which a request finds its model: of the model, or of an adapter to unload.

        "" for none, and if the body cannot be read: its endpoint then says why.
        """
        asked = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("model")
        if asked:
            return str(asked[0])
        try:
            named: _Named = msgspec.json.decode(body, type=_Named)
        except msgspec.DecodeError:
            return ""
        if named.model is None and named.lora_name in self._parts.models.names:
            return named.lora_name
        return named.model or ""

    async def _ask_each(self, parts: tuple[ModelPart, ...], scope: Scope, replay: _Replay, send: Send) -> None:
        """Ask each part for a stored answer; if none has it, the last part's refusal is sent."""
        for part in parts[:-1]:
            attempt = _Attempt(send)
            await _answer(part, scope, replay.again(), attempt.send)
            if attempt.known:
                return
        await _answer(parts[-1], scope, replay.again(), send)


async def _answer(part: ModelPart, scope: Scope, receive: Receive, send: Send) -> None:
    """Have a part answer a request.

    Starlette's outermost layer would answer a failure in plain text. It is left out: the server's envelope does that.
    """
    scope["app"] = part.app
    if part.app.middleware_stack is None:
        part.app.middleware_stack = part.app.build_middleware_stack().app  # type: ignore[attr-defined]
    try:
        await part.app.middleware_stack(scope, receive, send)
    finally:
        scope.pop(SCOPE_KEY, None)  # the same head may name another model, whose queue has room


def _stored_id(path: str) -> str:
    """The id of a stored answer, if the path names one; else ""."""
    prefix = next((each for each in _STORED if path.startswith(each)), "")
    return path.removeprefix(prefix).partition("/")[0] if prefix else ""


class _Replay:
    """Receives a body that was already read once more, then whatever the client sends."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body = body
        self._receive = receive
        self._given = False

    def again(self) -> _Replay:
        """The same body, from the beginning."""
        return _Replay(self._body, self._receive)

    async def __call__(self) -> Message:
        if self._given:
            return await self._receive()
        self._given = True
        return {"type": "http.request", "body": self._body, "more_body": False}


class _Attempt:
    """Passes an answer on, unless it says that nothing was found (404)."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.known = True

    async def send(self, message: Message) -> None:
        """Send a message of an answer."""
        if message["type"] == "http.response.start" and message["status"] == _NOT_FOUND:
            self.known = False
        if self.known:
            await self._send(message)
