"""How long an ask may take, and that nobody else's cancellation is taken for its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from penstock.contract.request import EngineRequest
from penstock.server.failures import RequestTimedOut
from penstock.server.live_asks import LiveAsks


class Client:
    """Gives an output each time that `ready` is released; remembers whether it was closed."""

    def __init__(self) -> None:
        self.ready = asyncio.Semaphore(0)
        self.closed = False

    async def generate(self, ask: EngineRequest) -> AsyncIterator[str]:
        try:
            while True:
                await self.ready.acquire()
                yield "an output"
        finally:
            self.closed = True


@pytest.fixture
def ask() -> EngineRequest:
    return EngineRequest(id="a", prompt=(1, 2))


def test_an_ask_ends_when_its_time_is_up_while_it_is_waited_for(ask):
    async def scene() -> None:
        client = Client()
        outputs = LiveAsks(client, 0.05).generate(ask)
        client.ready.release()
        assert await anext(outputs) == "an output"
        with pytest.raises(RequestTimedOut):
            await anext(outputs)
        assert client.closed
        assert asyncio.current_task().cancelling() == 0
        await asyncio.sleep(0)  # nothing is left that would be thrown here

    asyncio.run(scene())


def test_a_reader_that_has_the_turn_is_not_cancelled_but_waits_no_more(ask):
    async def scene() -> None:
        client = Client()
        outputs = LiveAsks(client, 0.02).generate(ask)
        client.ready.release()
        await anext(outputs)
        await asyncio.sleep(0.06)
        with pytest.raises(RequestTimedOut):
            await anext(outputs)

    asyncio.run(scene())


@pytest.mark.parametrize("seconds", [0, 60])
def test_a_cancelled_reader_is_cancelled_and_not_timed_out(ask, seconds):
    async def scene() -> None:
        client = Client()

        async def read() -> None:
            async for _ in LiveAsks(client, seconds).generate(ask):
                pass

        reader = asyncio.create_task(read())
        client.ready.release()
        await asyncio.sleep(0.01)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader

    asyncio.run(scene())


def test_no_timer_is_left_when_an_ask_has_ended(ask):
    async def scene() -> None:
        loop, client = asyncio.get_running_loop(), Client()
        outputs = LiveAsks(client, 3600).generate(ask)
        client.ready.release()
        await anext(outputs)
        await outputs.aclose()
        assert all(handle.cancelled() for handle in loop._scheduled)

    asyncio.run(scene())
