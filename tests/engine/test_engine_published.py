"""What other threads see of the measurements: whole values, at rest when the engine is."""

from __future__ import annotations

import asyncio

import engine_harness as harness
import pytest
from test_engine_client import collect, eventually, serving

from penstock.contract.errors import Overloaded


async def test_measurements_of_finished_requests_are_published():
    async with serving() as (bench, client):
        requests = [harness.request_of(f"a{i}", bench.text, "hello", n=2, max_tokens=9) for i in range(3)]
        await asyncio.gather(*(collect(client, one) for one in requests))
        await eventually(lambda: client.measurements().running == 0)
        measured = client.measurements()
        assert measured.generated_tokens == 3 * 2 * 9
        assert dict(measured.finished)["length"] == 6
        assert measured.free_blocks == measured.total_blocks


async def test_every_published_value_is_consistent_in_itself():
    async with serving() as (bench, client):
        task = asyncio.create_task(collect(client, harness.request_of("a", bench.text, "hello", n=4, max_tokens=100)))
        seen = 0
        while not task.done():
            measured = client.measurements()
            gaps = sum(measured.inter_token_latency.counts)
            assert measured.generated_tokens == gaps + measured.prompt_tokens // 5  # a first token, or a gap
            assert measured.generated_tokens >= seen
            seen = measured.generated_tokens
            await asyncio.sleep(0)
        assert seen


async def test_a_refusal_for_a_full_queue_is_counted():
    async with serving(max_queued=2, max_num_seqs=1) as (bench, client):
        first = asyncio.create_task(collect(client, harness.request_of("a0", bench.text, "hello", max_tokens=100)))
        await eventually(lambda: client.health().steps > 0)
        with pytest.raises(Overloaded):
            await collect(client, harness.request_of("big", bench.text, "hello", n=3))
        await first
        await eventually(lambda: client.measurements().running == 0)
        assert client.measurements().rejections == 1


async def test_a_reader_that_leaves_is_an_abort_and_its_tokens_are_waste():
    async with serving() as (bench, client):
        stream = client.generate(harness.request_of("a", bench.text, "hello", max_tokens=120))
        await anext(stream)
        await stream.aclose()
        await eventually(lambda: dict(client.measurements().finished)["abort"] == 1)
        measured = client.measurements()
        assert measured.wasted_tokens == measured.generated_tokens > 0


def test_nothing_is_kept_of_what_has_ended():
    bench = harness.build()
    for round_ in range(3):
        ids = [bench.submit("hello " * (1 + round_), n=2) for _ in range(3)]
        bench.step()
        bench.collect(bench.engine.abort(ids[0]))
        bench.run()
    assert not bench.engine.metrics._seqs
    assert len(bench.engine.metrics._slots) <= bench.config.max_num_seqs
