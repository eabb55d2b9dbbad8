"""Replicas on Ray as a fleet's client sees them: links by name, and the state that each last reported.

A thread asks every replica for its state, so that reading it never waits. A call that fails, for whatever reason,
counts as a lost link: another replica can do its work.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from penstock.contract.events import Output
from penstock.engine import ResolvedRequest
from penstock.fleet import ray_names
from penstock.fleet.description import Description
from penstock.fleet.replica import ReplicaLost, ReplicaState
from penstock.fleet.wire import read_outputs, read_state, write_request

__all__ = ["RayReplica", "RayReplicas", "read_stream"]

log = logging.getLogger(__name__)

ASK_SECONDS = 0.25
"""How often replicas are asked for their state."""
CALL_SECONDS = 10.0
"""How long a replica may take to answer: it waits for the end of a step, which takes less."""

_description = msgspec.msgpack.Decoder(Description)


class RayReplica:
    """See `Replica`.

    Args:
        handle: handle of the Ray deployment.
        name: name of the replica.
        description: its description of its model.
    """

    def __init__(self, handle: Any, name: str, description: Description) -> None:
        self._handle = handle
        self._name = name
        self._state: ReplicaState | None = None
        self.description = description

    async def generate(self, request: ResolvedRequest) -> AsyncGenerator[list[Output], None]:
        """See `Replica.generate`."""
        messages = self._handle.options(stream=True).generate.remote(write_request(request), to=self._name)
        async with aclosing(read_stream(messages)) as batches:
            async for outputs in batches:
                yield outputs

    async def abort(self, request_id: str) -> None:
        """See `Replica.abort`."""
        try:
            await self._call("abort", request_id)
        except ReplicaLost as lost:
            log.info("request %s is not aborted at replica %s: %s", request_id, self._name, lost)

    async def heartbeat(self) -> None:
        """See `Replica.heartbeat`."""
        await self._call("heartbeat")

    async def reset_prefix_cache(self) -> None:
        """See `Replica.reset_prefix_cache`."""
        await self._call("reset_prefix_cache")

    def state(self) -> ReplicaState | None:
        """See `Replica.state`."""
        return self._state

    async def ask(self) -> None:
        """Ask the replica for its state, and keep it. Raises ReplicaLost."""
        self._state = read_state(await self._call("state"))

    async def _call(self, method: str, *arguments: Any) -> Any:
        return await _call(self._handle, method, *arguments, to=self._name)


class RayReplicas:
    """See `Replicas`. Use it in a `with` block: its thread runs inside.

    Args:
        handle: handle of the Ray deployment.
        answers: as in `Description`; replicas with another value are left out. None until the first is chosen.
    """

    def __init__(self, handle: Any, answers: bytes | None = None) -> None:
        self._handle = handle
        self.answers = answers
        self._links: dict[str, RayReplica] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._watch()), name="penstock-fleet", daemon=True)

    def __enter__(self) -> RayReplicas:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(2 * CALL_SECONDS)

    def present(self) -> Mapping[str, RayReplica]:
        """See `Replicas.present`."""
        links, answers = self._links, self.answers
        return {
            name: links[name]
            for name in sorted(ray_names.in_service)
            if name in links and answers in (None, links[name].description.answers)
        }

    async def _watch(self) -> None:
        """Ask every replica again and again; a slow one does not hold up the others."""
        while not self._stopped.is_set():
            names = set(ray_names.in_service)
            self._links = {name: link for name, link in self._links.items() if name in names}
            self._asking = {name: task for name, task in self._asking.items() if not task.done()}
            for name in names or {""}:  # the first call, to any replica, makes Ray say which are in service
                if name not in self._asking:
                    self._asking[name] = asyncio.create_task(self._ask(name))
            await asyncio.sleep(ASK_SECONDS)
        for task in self._asking.values():
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)

    async def _ask(self, name: str) -> None:
        try:
            if name not in self._links:
                description = _description.decode(await _call(self._handle, "describe", to=name))
                if not name:
                    return
                link = RayReplica(self._handle, name, description)
                await link.ask()
                if self.answers not in (None, description.answers):
                    log.warning("replica %s is left out: it has another model, or options that change answers", name)
                self._links = {**self._links, name: link}
            else:
                await self._links[name].ask()
        except (ReplicaLost, msgspec.MsgspecError) as error:
            log.info("replica %s does not say how it is: %s", name or "(any)", error)


async def read_stream(messages: Any) -> AsyncGenerator[list[Output], None]:
    """Yield what a replica answers to one request. Closing early cancels the call, and so aborts the request there.

    Args:
        messages: the streaming response of Ray's handle.

    Raises:
        ReplicaLost: before or between outputs; it is unknown how far the replica got.
        PenstockError: before the first output, if the replica refuses the request.
    """
    ended = False
    try:
        while True:
            try:
                message = await anext(messages, None)
            except Exception as error:  # Ray has a class for each way to lose an actor, and more with each version
                ended = True
                raise ReplicaLost(f"{type(error).__name__}") from error
            if message is None:
                ended = True
                return
            yield read_outputs(message)
    finally:
        if not ended:
            # Cancelling waits for Ray's router, perhaps for long if the replica is gone. It has its own thread because
            # the loop's pool resolves requests, and a server that shuts down waits for that pool.
            threading.Thread(target=messages.cancel, name="penstock-cancel", daemon=True).start()


async def _call(handle: Any, method: str, *arguments: Any, to: str) -> Any:
    """The result of a call to one replica. Raises ReplicaLost."""
    response = getattr(handle, method).remote(*arguments, to=to)
    try:
        return await asyncio.wait_for(response, CALL_SECONDS)
    except Exception as error:  # as in `read_stream`
        raise ReplicaLost(f"{method}: {type(error).__name__}") from error
