"""Conversations of the routers' benchmark, held with a fleet of engines without tensors."""

from __future__ import annotations

import asyncio
import pickle

import pytest
from fleet_harness import Members, fleet

import fleet_routers
from fleet_sim.live import conversation_of, hold
from fleet_sim.trace import Conversation, Turn
from penstock.contract.errors import Overloaded

BOOK = "hello world " * 200


def talk(number: int, begins: float, turns: int, tenant: int = 0) -> Conversation:
    said = [Turn(4 + 3 * each, 5, 0.02 if each else 0.0) for each in range(turns)]
    return Conversation(number, tenant, begins, 40, said)


async def held(talks: list[Conversation], **options):
    members = Members()
    for _ in range(2):
        members.add(num_blocks=1024, max_model_len=1024, max_num_batched_tokens=512)
    async with fleet(members) as client:
        found = await hold(client, talks, BOOK, **{"warm": 0.0, "ends": 60.0, "most_tokens": 1000, **options})
    asked = sorted((each for member in members.ever for each in member.asked), key=lambda each: each.id)
    return found, {each.id: each for each in asked}


async def test_each_message_repeats_all_that_was_said():
    found, asked = await held([talk(0, 0.0, 3), talk(1, 0.3, 2)])
    assert list(asked) == ["0-0", "0-1", "0-2", "1-0", "1-1"]
    for before, after in (("0-0", "0-1"), ("0-1", "0-2"), ("1-0", "1-1")):
        assert asked[after].prompt_text.startswith(asked[before].prompt_text)
        assert len(asked[after].prompt) >= len(asked[before].prompt) + 5, "the answer is part of it"
    assert asked["1-0"].prompt_text[:160] == asked["0-0"].prompt_text[:160], "one tenant, one system prompt"
    figures = found.figures()
    assert (figures["requests"], figures["failed"]) == (5, 0)
    assert figures["prompt_tokens"] == sum(len(each.prompt) for each in asked.values())
    assert figures["cached_share"] > 0.5
    assert 0 < figures["first_token_p50"] <= figures["first_token_p99"] < 60


async def test_only_messages_in_the_time_that_counts_are_counted():
    found, asked = await held([talk(0, 0.0, 2), talk(1, 0.5, 2), talk(2, 5.0, 1)], warm=0.4, ends=1.0)
    assert set(asked) == {"0-0", "0-1", "1-0", "1-1"}
    assert len(found.first_token) == 2
    found, asked = await held([talk(0, 0.0, 5)], most_tokens=60)
    assert 0 < len(asked) < 5


class Refusing:
    """A client that refuses, or waits for ever."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def generate(self, request):
        if self.error is not None:
            raise self.error
        await asyncio.sleep(60)
        yield


@pytest.mark.parametrize(("error", "told"), [(Overloaded("full", retry_after=1), "full"), (None, "no answer in time")])
async def test_a_conversation_ends_with_a_failure_that_is_counted(error, told):
    found = await hold(Refusing(error), [talk(0, 0.0, 3)], BOOK, warm=0, ends=9, most_tokens=1000, patience=0.05)
    assert found.failures == {told: 1}


def test_a_message_says_its_text_to_routers_and_its_bytes_to_replicas():
    message = fleet_routers.Prompted(b"bytes")
    message.prompt = "text"
    assert type(pickle.loads(pickle.dumps(message))) is bytes
    assert message == b"bytes"
    assert conversation_of("12-3") == "12"


def test_the_table_has_a_line_for_each_router():
    times = dict.fromkeys(("first_token_p50", "first_token_p90", "first_token_p99", "whole_mean"), 0.25)
    row = {"router": "ours", "requests": 9, "cached_share": 0.5, "failed": 1, **times}
    assert (
        fleet_routers.table([row, row]).splitlines()[2:]
        == ["| ours | 9 | 50.0% | 250 ms | 250 ms | 250 ms | 250 ms | 1 |"] * 2
    )
