"""Whoever waits at a mailbox is woken once, and nothing is lost when he is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from penstock.contract.errors import Overloaded
from penstock.contract.events import ChoiceDelta, Output
from penstock.engine.mailbox import Mailbox


async def reader_of(mailbox: Mailbox) -> asyncio.Task[list[Output]]:
    """One who found nothing and waits."""
    waiting = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    return waiting


def test_what_lies_there_is_taken_at_once_and_then_is_waited_for():
    async def scene() -> None:
        mailbox = Mailbox()
        mailbox.put([ChoiceDelta(0, "a", ())])
        mailbox.put([ChoiceDelta(0, "b", ())])
        assert await mailbox.take() == [ChoiceDelta(0, "ab", ())]
        waiting = await reader_of(mailbox)
        mailbox.put([ChoiceDelta(0, "c", ())])
        mailbox.put([ChoiceDelta(0, "d", ())])  # before the reader, who is woken, has the turn
        assert await waiting == [ChoiceDelta(0, "cd", ())]

    asyncio.run(scene())


def test_a_cancelled_reader_leaves_what_comes_to_the_next():
    async def scene() -> None:
        mailbox = Mailbox()
        waiting = await reader_of(mailbox)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        mailbox.put([ChoiceDelta(0, "a", ())])
        assert await mailbox.take() == [ChoiceDelta(0, "a", ())]

    asyncio.run(scene())


def test_a_reader_who_waits_hears_of_a_refusal():
    async def scene() -> None:
        mailbox = Mailbox()
        waiting = await reader_of(mailbox)
        mailbox.fail(Overloaded("full"))
        with pytest.raises(Overloaded):
            await waiting
        assert mailbox.closed

    asyncio.run(scene())
