"""An engine's reading rate, measured by looking at it now and then."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fleet_harness import Members

from penstock.fleet import ReplicaEngine
from penstock.fleet.reading_rate import ReadingRate
from penstock.fleet.wire import read_state


def test_only_time_with_prompts_to_read_counts():
    rate = ReadingRate()
    rate.look(0.0, 0.0, 0)
    rate.look(1.0, 0.0, 5000)
    assert rate.tokens_per_second == 0.0, "nobody knows for how long it read"
    rate.look(2.0, 3.0, 5000)
    rate.look(2.5, 2.0, 5500)
    assert rate.tokens_per_second == 1000.0
    rate.look(3.0, 0.0, 5600)
    rate.look(9.0, 1.0, 5600)
    assert rate.tokens_per_second == 1000.0, "it was done somewhere between two looks"
    rate.look(10.0, 1.0, 5700)
    assert rate.tokens_per_second == pytest.approx(600 / 1.5)


def test_who_looks_twice_at_once_learns_nothing():
    rate = ReadingRate()
    for _ in range(3):
        rate.look(1.0, 1.0, 100)
    assert rate.tokens_per_second == 0.0


def test_it_follows_an_engine_that_becomes_slower():
    rate, rng = ReadingRate(), random.Random(0)
    now, computed = 0.0, 0.0
    for speed, seconds in ((4000, 500.0), (1000, 500.0)):
        ends = now + seconds
        while now < ends:
            passed = rng.random()
            now, computed = now + passed, computed + speed * passed
            rate.look(now, 1.0, round(computed))
        assert rate.tokens_per_second == pytest.approx(speed, rel=0.02)


async def test_the_router_is_told():
    now = iter((1.0, 2.0))
    member = Members().add()
    member.side = ReplicaEngine(Reading(member.client), member.bench.text, SimpleNamespace(now=lambda: next(now)))
    assert (await member.side.current_state()).load.tokens_per_second == 0.0
    assert read_state(await member.side.state()).load.tokens_per_second == 700.0
    await asyncio.to_thread(member.client.close)


class Reading:
    """An engine that always has prompts to read, and has computed 700 more positions at each look."""

    def __init__(self, client) -> None:
        self.client = client
        self.computed = 0

    async def waiting_seconds(self) -> tuple[float, float]:
        return 2.0, 2.0

    def health(self):
        self.computed += 700
        return replace(self.client.health(), computed_tokens=self.computed)

    def __getattr__(self, name: str):
        return getattr(self.client, name)
