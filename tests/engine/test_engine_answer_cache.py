"""Whole answers that are kept for requests that would be answered the same."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import engine_harness as harness
import pytest
from certificate_makers import CONTRACT
from engine_harness import finishes_of, terminal_of, text_of, tokens_of

from penstock.contract.events import CacheLookup, FinishReason
from penstock.contract.request import AnswerCaching, StopRules
from penstock.contract.sampling import SamplingSpec
from penstock.engine import AnswerCache, CachedAnswers, Certifying, EngineLoop, LocalClient, QueueLimits
from penstock.engine.answer_cache import ENTRY_BYTES

GREEDY = SamplingSpec((("temperature", 0),))
MUCH = 1_000_000


@asynccontextmanager
async def serving(most_bytes=MUCH, cache=None, contract=CONTRACT, pause=0.0):
    bench = harness.build(pause=pause)
    loop = EngineLoop(bench.engine, bench.clock, QueueLimits(1000))
    loop.start()
    cache = AnswerCache(most_bytes) if cache is None else cache
    cached = CachedAnswers(cache, Certifying(contract, bench.text), bench.clock)
    client = LocalClient(bench.intake, loop, answers=cached)
    try:
        yield bench, client, cache
    finally:
        await asyncio.to_thread(client.close)


def request(bench, name="r", prompt="hello", **fields):
    return replace(harness.request_of(name, bench.text, prompt), **fields)


async def ask(client, one):
    """(what was said of the cache, the outputs)"""
    outputs = [output async for output in client.generate(one)]
    told = [output for output in outputs if isinstance(output, CacheLookup)]
    return (told[0].age if told else "not looked for"), outputs[len(told) :]


def without_timings(outputs):
    return [*outputs[:-1], replace(outputs[-1], timings=None)]


async def test_the_same_request_is_answered_the_same_without_computing():
    async with serving() as (bench, client, _):
        age, first = await ask(client, request(bench, "one", n=2))
        assert age is None
        submitted = []
        bench.engine.submit = submitted.append
        bench.clock.advance(7.5)
        age, second = await ask(client, request(bench, "two", n=2))
        assert age == 7.5
        assert without_timings(second) == without_timings(first)
        assert submitted == []
        timings = terminal_of(second).timings
        assert (timings.total, timings.queue, timings.prefill, timings.decode) == (0, 0, 0, 0)
        assert timings.ended == bench.clock.now()
        use = client.measurements().answer_cache
        assert (use.queries, use.hits, use.evicted) == (2, 1, 0)
        assert use.bytes > ENTRY_BYTES


DIFFERENT = {
    "prompt": {"prompt": "hellp"},
    "seed": {"sampling": SamplingSpec((("seed", 8),))},
    "log probabilities": {"sampling": SamplingSpec((("logprobs", 2), ("seed", 7)))},
    "choices": {"n": 2},
    "best of": {"best_of": 2},
    "stop": {"stop": StopRules(max_tokens=8, ignore_eos=True, strings=("z",))},
    "length": {"stop": StopRules(max_tokens=7, ignore_eos=True)},
    "tenant": {"tenant": "another"},
    "salt": {"cache_salt": "another"},
    "echo": {"echo": True},
}


@pytest.mark.parametrize("name", DIFFERENT)
async def test_another_request_is_computed(name):
    async with serving() as (bench, client, _):
        await ask(client, request(bench, "one"))
        fields = dict(DIFFERENT[name])
        for at in range(2):
            prompt = fields.get("prompt", "hello")
            others = {key: value for key, value in fields.items() if key != "prompt"}
            age, outputs = await ask(client, request(bench, f"other-{at}", prompt, **others))
            assert (age is None) == (at == 0)
            assert terminal_of(outputs)


async def test_what_answers_depend_on_beside_requests_is_in_the_key_too():
    cache = AnswerCache(MUCH)
    async with serving(cache=cache) as (bench, client, _):
        await ask(client, request(bench))
    async with serving(cache=cache, contract=replace(CONTRACT, form="int8")) as (bench, client, _):
        assert (await ask(client, request(bench)))[0] is None
    async with serving(cache=cache) as (bench, client, _):
        assert (await ask(client, request(bench)))[0] is not None


async def test_only_requests_that_leave_nothing_to_chance_are_kept():
    async with serving() as (bench, client, cache):
        for at in range(2):
            drawn = request(bench, f"drawn-{at}", sampling=SamplingSpec(()), drawn_seed=7)
            assert (await ask(client, drawn))[0] == "not looked for"
        assert len(cache) == 0
        for at in range(2):
            assert ((await ask(client, request(bench, f"greedy-{at}", sampling=GREEDY)))[0] is None) == (at == 0)


async def test_a_caller_may_want_an_answer_computed_or_not_kept():
    async with serving() as (bench, client, cache):
        assert (await ask(client, request(bench, "a", answer_caching=AnswerCaching(keep=False))))[0] is None
        assert len(cache) == 0
        await ask(client, request(bench, "b"))
        bench.clock.advance(10.0)
        assert (await ask(client, request(bench, "c", answer_caching=AnswerCaching(keep=False))))[0] == 10.0
        assert (await ask(client, request(bench, "d", answer_caching=AnswerCaching(most_age=10.5))))[0] == 10.0
        assert (await ask(client, request(bench, "e", answer_caching=AnswerCaching(most_age=9.0))))[0] is None
        assert (await ask(client, request(bench, "f")))[0] == 0.0  # the one that was computed anew
        assert (await ask(client, request(bench, "g", answer_caching=AnswerCaching(most_age=-1.0))))[0] is None


async def test_an_answer_that_was_aborted_or_left_is_not_kept():
    async with serving(pause=0.01) as (bench, client, cache):
        long = StopRules(max_tokens=60, ignore_eos=True)
        outputs = []
        async for output in client.generate(request(bench, "doomed", stop=long)):
            outputs.append(output)
            if len(outputs) == 3:
                await client.abort("doomed")
        assert finishes_of(outputs)[0].reason is FinishReason.ABORT
        stream = client.generate(request(bench, "left", stop=long))
        await anext(stream)
        await anext(stream)
        await stream.aclose()
        assert len(cache) == 0


async def test_a_long_answer_is_kept_and_told_in_parts():
    async with serving() as (bench, client, cache):
        long = StopRules(max_tokens=100, ignore_eos=True)
        _, first = await ask(client, request(bench, "one", n=2, stop=long))
        age, second = await ask(client, request(bench, "two", n=2, stop=long))
        assert age is not None
        assert len(next(iter(cache._entries.values())).messages) > 1
        assert without_timings(second) == without_timings(first)


async def test_it_stays_within_its_bytes_and_what_was_wanted_least_recently_goes_first():
    async with serving() as (bench, client, cache):
        await ask(client, request(bench, "measured", "x"))
        each = cache.bytes
    async with serving(most_bytes=3 * each + each // 2) as (bench, client, cache):
        for prompt in "abc":
            await ask(client, request(bench, prompt, prompt))
        assert (await ask(client, request(bench, "again", "a")))[0] is not None
        await ask(client, request(bench, "d", "d"))
        assert (len(cache), cache.evicted) == (3, 1)
        assert cache.bytes <= 3 * each + each // 2
        for prompt, kept in (("a", True), ("c", True), ("d", True), ("b", False)):
            assert ((await ask(client, request(bench, f"later-{prompt}", prompt)))[0] is not None) is kept
    async with serving(most_bytes=each // 2) as (bench, client, cache):
        for at in range(2):
            assert (await ask(client, request(bench, f"large-{at}")))[0] is None
        assert (len(cache), cache.bytes, cache.evicted) == (0, 0, 0)


async def test_a_stream_out_of_the_cache_comes_in_pieces_as_the_first_did():
    async with serving(pause=0.002) as (bench, client, _):
        _, first = await ask(client, request(bench, "one"))
        _, second = await ask(client, request(bench, "two"))
        assert len(second) == len(first) > 4
        assert text_of(second) == text_of(first)
        assert tokens_of(second) == bench.expected("hello", 8)
