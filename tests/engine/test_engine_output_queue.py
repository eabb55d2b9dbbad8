"""A reader that waits at a queue is woken once, and nothing is lost when it is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from penstock.contract.errors import Overloaded
from penstock.contract.events import ChoiceDelta, Output
from penstock.engine.output_queue import OutputQueue


async def reader_of(queue: OutputQueue) -> asyncio.Task[list[Output]]:
    """One who found nothing and waits."""
    waiting = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    return waiting


def test_what_lies_there_is_taken_at_once_and_then_is_waited_for():
    async def scene() -> None:
        queue = OutputQueue()
        queue.put([ChoiceDelta(0, "a", ())])
        queue.put([ChoiceDelta(0, "b", ())])
        assert await queue.take() == [ChoiceDelta(0, "ab", ())]
        waiting = await reader_of(queue)
        queue.put([ChoiceDelta(0, "c", ())])
        queue.put([ChoiceDelta(0, "d", ())])  # before the reader, who is woken, has the turn
        assert await waiting == [ChoiceDelta(0, "cd", ())]

    asyncio.run(scene())


def test_a_cancelled_reader_leaves_what_comes_to_the_next():
    async def scene() -> None:
        queue = OutputQueue()
        waiting = await reader_of(queue)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        queue.put([ChoiceDelta(0, "a", ())])
        assert await queue.take() == [ChoiceDelta(0, "a", ())]

    asyncio.run(scene())


def test_a_reader_who_waits_hears_of_a_refusal():
    async def scene() -> None:
        queue = OutputQueue()
        waiting = await reader_of(queue)
        queue.fail(Overloaded("full"))
        with pytest.raises(Overloaded):
            await waiting
        assert queue.closed

    asyncio.run(scene())
