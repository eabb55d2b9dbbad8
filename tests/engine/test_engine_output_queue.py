"""A reader that waits at a queue is woken once, nothing is lost when it is cancelled, and what it leaves is bounded."""

from __future__ import annotations

import asyncio
import tracemalloc
from functools import partial

import pytest

from penstock.contract.errors import Overloaded, ReaderTooSlow
from penstock.contract.events import ChoiceDelta, Output, RequestFinished, TokenPiece, Usage
from penstock.engine.output_queue import OutputQueue, WaitingRoom


async def reader_of(queue: OutputQueue) -> asyncio.Task[list[Output]]:
    """A reader that found nothing and waits."""
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
        queue.put([ChoiceDelta(0, "d", ())])  # before the reader, which is woken, has its turn
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


def tokens(count: int, alternatives: int = 0) -> list[Output]:
    top = tuple(TokenPiece(each, b"b", -1.0) for each in range(alternatives))
    return [ChoiceDelta(0, "a" * count, (TokenPiece(7, b"a", -0.5, top),) * count)]


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)


def test_a_reader_who_lets_too_much_lie_gets_it_and_then_an_error():
    async def scene() -> None:
        room, abandoned = WaitingRoom(of_all=10**9, of_one=10_000, patience=0.0), []
        queue = OutputQueue(room, lambda: abandoned.append(True))
        queue.put(tokens(20))
        assert not abandoned
        queue.put(tokens(30))
        await until(lambda: abandoned)
        queue.put(tokens(1))  # reaches no reader
        assert await queue.take() == [ChoiceDelta(0, "a" * 50, tokens(50)[0].tokens)]
        assert not queue.drained
        with pytest.raises(ReaderTooSlow):
            await queue.take()
        queue.leave()
        assert (room.bytes, room.given_up, abandoned) == (0, 1, [True])

    asyncio.run(scene())


def test_a_reader_who_comes_in_time_may_be_behind():
    async def scene() -> None:
        room = WaitingRoom(of_all=10**9, of_one=1000, patience=0.0)
        queue = OutputQueue(room, lambda: pytest.fail("given up"))
        for _ in range(50):
            queue.put(tokens(20, 20))
            await asyncio.sleep(0)
            assert await queue.take()

    asyncio.run(scene())


def test_the_end_of_a_complete_answer_may_lie():
    async def scene() -> None:
        room = WaitingRoom(of_all=10**9, of_one=1000, patience=0.0)
        queue = OutputQueue(room, lambda: pytest.fail("given up"))
        queue.put([*tokens(90), RequestFinished(Usage())])
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(await queue.take()) == 2
        assert queue.drained

    asyncio.run(scene())


def test_beyond_the_sum_the_one_for_whom_most_lies_loses_it():
    async def scene() -> None:
        room, abandoned = WaitingRoom(of_all=40_000), []
        queues = [OutputQueue(room, partial(abandoned.append, index)) for index in range(3)]
        for queue, count in zip(queues, (30, 90, 30), strict=True):
            queue.put(tokens(count))
        assert not abandoned
        queues[0].put(tokens(30))
        assert abandoned == [1]
        assert room.bytes <= 40_000
        with pytest.raises(ReaderTooSlow):
            await queues[1].take()
        assert [len((await queues[index].take())[0].text) for index in (0, 2)] == [60, 30]
        for queue in queues:
            queue.leave()
            queue.put(tokens(9))  # until the engine has heard that its reader left
        assert room.bytes == 0

    asyncio.run(scene())


def test_what_a_reader_is_busy_with_counts_until_it_comes_again():
    async def scene() -> None:
        room = WaitingRoom(of_all=10**9)
        queue = OutputQueue(room)
        queue.put(tokens(10))
        held = room.bytes
        await queue.take()
        assert room.bytes == held > 2000
        waiting = await reader_of(queue)
        assert room.bytes == 0
        waiting.cancel()

    asyncio.run(scene())


def test_the_estimate_is_near_what_python_takes():
    def pieces() -> tuple[TokenPiece, ...]:
        top = [TokenPiece(1000 + each, b"x", -1.0 - each, (), each + 1) for each in range(20)]
        return tuple(
            TokenPiece(5000 + i, b"x", -0.5 - i, tuple(each._replace(logprob=float(i + 2)) for each in top), 1, i)
            for i in range(300)
        )

    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        delta = ChoiceDelta(0, "x" * 300, pieces())
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    room = WaitingRoom(of_all=10**9)
    queue = OutputQueue(room)

    async def put() -> None:
        queue.put([delta])

    asyncio.run(put())
    assert taken == pytest.approx(room.bytes, rel=0.35)
