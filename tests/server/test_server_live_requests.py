"""How long a request may take, and that no other cancellation is mistaken for its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from penstock.contract.request import EngineRequest
from penstock.server.delivery.live_requests import LiveRequests
from penstock.server.http.failures import RequestTimedOut


class Client:
    """Gives an output each time that `ready` is released; remembers whether it was closed."""

    def __init__(self) -> None:
        self.ready = asyncio.Semaphore(0)
        self.closed = False
        self.aborted: list[str] = []

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def generate(self, request: EngineRequest) -> AsyncIterator[str]:
        try:
            while True:
                await self.ready.acquire()
                yield "an output"
        finally:
            self.closed = True


REQUEST = EngineRequest(id="a", prompt=(1, 2), tenant="somebody")


def test_a_request_ends_when_its_time_is_up_while_it_is_waited_for():
    async def scene() -> None:
        client = Client()
        outputs = LiveRequests(client, 0.05).open(REQUEST)
        client.ready.release()
        assert await outputs.next() == "an output"
        with pytest.raises(RequestTimedOut):
            await outputs.next()
        assert client.closed
        assert asyncio.current_task().cancelling() == 0
        await asyncio.sleep(0)  # a cancellation left over would be raised here

    asyncio.run(scene())


def test_a_reader_that_has_the_turn_is_not_cancelled_but_waits_no_more():
    async def scene() -> None:
        client = Client()
        outputs = LiveRequests(client, 0.02).open(REQUEST)
        client.ready.release()
        await outputs.next()
        async with asyncio.timeout(30):
            while not client.aborted:
                await asyncio.sleep(0.005)
        assert client.aborted == ["a"], "the engine need not wait for a client that reads slowly"
        with pytest.raises(RequestTimedOut):
            await outputs.next()

    asyncio.run(scene())


def test_a_request_with_a_time_of_its_own_ends_then():
    async def scene() -> None:
        client = Client()
        live = LiveRequests(client, 3600)
        outputs = live.open(replace(REQUEST, max_seconds=0.05))
        with pytest.raises(RequestTimedOut, match=r"ended after 0\.05 seconds"):
            await outputs.next()
        assert client.closed
        assert not live.tenants

    asyncio.run(scene())


@pytest.mark.parametrize("seconds", [0, 60])
def test_a_cancelled_reader_is_cancelled_and_not_timed_out(seconds):
    async def scene() -> None:
        client = Client()

        async def read() -> None:
            outputs = LiveRequests(client, seconds).open(REQUEST)
            while await outputs.next():
                pass

        reader = asyncio.create_task(read())
        client.ready.release()
        await asyncio.sleep(0.01)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert client.closed

    asyncio.run(scene())


def test_no_timer_is_left_when_a_request_has_ended():
    async def scene() -> None:
        loop, client = asyncio.get_running_loop(), Client()
        outputs = LiveRequests(client, 3600).open(REQUEST)
        client.ready.release()
        await outputs.next()
        await outputs.close()
        assert all(handle.cancelled() for handle in loop._scheduled)

    asyncio.run(scene())


def test_a_request_is_listed_from_its_first_output_on_until_it_is_closed():
    async def scene() -> None:
        client = Client()
        live = LiveRequests(client, 0)
        outputs = live.open(REQUEST)
        assert not live.tenants
        client.ready.release()
        await outputs.next()
        assert live.tenants == {"a": "somebody"}
        await outputs.close()
        assert not live.tenants

    asyncio.run(scene())
