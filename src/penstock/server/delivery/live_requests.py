"""The requests that are in the engine now: which API key they belong to, and how much time they have left.

Ends a request when its time is up, and decides who may abort what. Invariant: a request is listed here from the moment
its first output is asked for until it is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import partial

from penstock.contract.errors import RequestError
from penstock.contract.events import Output
from penstock.contract.ports import EngineClient
from penstock.contract.request import EngineRequest
from penstock.server.delivery.concurrency import Concurrency
from penstock.server.http.failures import RequestTimedOut

__all__ = ["LiveRequest", "LiveRequests"]


class _Deadline:
    """A request's deadline: like `asyncio.timeout_at`, but with one timer for all of its outputs.

    When the time is up, the task is cancelled if it waits for an output. Between two outputs it is writing to the
    client, for as long as the client takes to read: it is then left alone, and the engine is told to `abort`.
    """

    def __init__(self, seconds: float, abort: Callable[[], Coroutine[None, None, None]]) -> None:
        self.passed = False
        self._abort = abort
        self._aborting: asyncio.Task[None] | None = None
        self._waiting: asyncio.Task[object] | None = None
        self._cancelled: asyncio.Task[object] | None = None
        self._timer = asyncio.get_running_loop().call_later(seconds, self._pass) if seconds else None

    def begin_wait(self) -> None:
        """The current task is about to wait for an output."""
        self._waiting = asyncio.current_task()

    def end_wait(self) -> None:
        """The output has come."""
        self._waiting = None

    def take_back(self) -> bool:
        """Whether the current task was cancelled by this deadline and by nothing else; if so, undo the cancellation."""
        return self._cancelled is not None and self._cancelled.uncancel() == 0

    def stop(self) -> None:
        """Cancel the timer: no task waits any more."""
        self._waiting = None
        if self._timer is not None:
            self._timer.cancel()

    def _pass(self) -> None:
        self.passed = True
        if self._waiting is not None:
            self._cancelled = self._waiting
            self._waiting.cancel()
        else:
            self._aborting = asyncio.create_task(self._abort())


class LiveRequests:
    """Opens requests on an engine and knows the open ones. Confined to one event loop.

    Args:
        seconds: time limit for a request without its own; 0 for none.
    """

    def __init__(self, client: EngineClient, seconds: float) -> None:
        self.client = client
        self.seconds = seconds
        self.concurrency = Concurrency()
        self.tenants: dict[str, str] = {}
        """Request id -> tenant, of live requests."""

    def open(self, request: EngineRequest, prompt_field: str = "prompt") -> LiveRequest:
        """Open a request, to be submitted when its first output is asked for; errors call its prompt `prompt_field`."""
        return LiveRequest(self, request, prompt_field)

    def seconds_for(self, request: EngineRequest) -> float:
        """Time limit of `request`; 0 for none."""
        return request.max_seconds or self.seconds

    async def abort_response(self, response_id: str, tenant: str) -> bool:
        """Abort every request of a response that belongs to `tenant`; return whether there was one.

        An empty tenant may abort any: the server has no keys, or the caller is an admin.
        """
        found = [
            request_id
            for request_id, owner in self.tenants.items()
            if (request_id == response_id or request_id.startswith(response_id + "-")) and tenant in ("", owner)
        ]
        for request_id in found:
            await self.client.abort(request_id)
        return bool(found)


class LiveRequest:
    """The outputs of one request. Owned by the task that answers it. Must be closed: that aborts it if unfinished."""

    def __init__(self, live: LiveRequests, request: EngineRequest, prompt_field: str) -> None:
        self._live = live
        self._request = request
        self._prompt_field = prompt_field
        self._outputs: AsyncGenerator[Output, None] = live.client.generate(request)  # does nothing until it is read
        self._deadline: _Deadline | None = None

    async def next(self) -> Output | None:
        """The next output; None after the last. Closes the request after the last output, and when it raises.

        Raises:
            RequestTimedOut: its time is up; it has been aborted.
            PenstockError: as `EngineClient.generate`.
        """
        deadline = self._deadline or self._begin()
        try:
            if deadline.passed:
                raise RequestTimedOut(self._live.seconds_for(self._request))
            deadline.begin_wait()
            output = await anext(self._outputs, None)
            deadline.end_wait()
        except BaseException as error:
            timed_out = isinstance(error, asyncio.CancelledError) and deadline.take_back()
            await self.close()
            if timed_out:
                raise RequestTimedOut(self._live.seconds_for(self._request)) from None
            if isinstance(error, RequestError) and error.param == "prompt":
                error.param = self._prompt_field
            raise
        if output is None:
            await self.close()
        return output

    def renew(self) -> None:
        """Prepare to submit the request again, after the engine had no room for it."""
        self._outputs, self._deadline = self._live.client.generate(self._request), None

    async def close(self) -> None:
        """End the request at any stage; closing it again does nothing."""
        if self._deadline is not None:
            self._deadline.stop()
            self._live.tenants.pop(self._request.id, None)
        await self._outputs.aclose()

    def _begin(self) -> _Deadline:
        self._live.tenants[self._request.id] = self._request.tenant
        abort = partial(self._live.client.abort, self._request.id)
        self._deadline = _Deadline(self._live.seconds_for(self._request), abort)
        return self._deadline
