"""A fleet's client over engines whose links are cut: every stream says what one engine would have said."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace

import pytest
from engine_harness import request_of, terminal_of, tokens_of
from fleet_harness import Member, Members, collect, eventually, fleet, joined
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.contract.errors import Overloaded, PromptTooLong, RequestError, RequestPoisoned, Unavailable
from penstock.contract.events import ChoiceFinished, FinishReason, RequestFailed
from penstock.contract.request import ChatPrompt, EngineRequest, Message, TextPrompt
from penstock.core.block_keys import KeyChain, root_key
from penstock.fleet import ReplicaLost
from penstock.fleet import client as client_module
from penstock.fleet.client import MOST_LOSSES, NEW_PATIENCE_SECONDS
from penstock.routing import Router

EPISODES = settings(max_examples=40, deadline=None)

requests = st.fixed_dictionaries(
    {
        "prompt": st.text("abc .", min_size=1, max_size=20),
        "n": st.integers(1, 3),
        "seed": st.integers(0, 5),
        "max_tokens": st.integers(1, 60),
        "strings": st.lists(st.text("abcdef", min_size=1, max_size=2), max_size=3).map(tuple),
        "ignore_eos": st.booleans(),
        "sampling": st.sets(st.sampled_from(("logprobs", "prompt_logprobs"))),
        "echo": st.booleans(),
        "best_of": st.booleans(),
        "certified": st.booleans(),
    }
)


def made(index: int, bench, *, prompt, sampling, echo, best_of, certified, n, **rules) -> EngineRequest:
    request = request_of(f"request-{index}", bench.text, prompt, n=n, **rules)
    spec = request.sampling
    for name in sampling:
        spec = spec.put(name, 2)
    return replace(request, sampling=spec, echo=echo, best_of=n + 1 if best_of else None, certified=certified)


def cutting(seed: int, mean: int):
    """Cuts about every `mean` messages."""
    draw = random.Random(seed)
    return lambda: draw.random() < 1 / mean


@EPISODES
@given(st.lists(requests, min_size=1, max_size=4), st.integers(0, 2**32), st.integers(4, 40), st.integers(1, 3))
def test_whatever_is_cut_each_stream_says_what_one_engine_says(asked, seed, mean, size):
    async def episode():
        alone = Members()
        bench = alone.add().bench
        wanted = [made(index, bench, **each) for index, each in enumerate(asked)]
        async with fleet(alone):
            expected = [joined(await collect(alone.ever[0].client, each)) for each in wanted]
        members = Members()
        for index in range(size):
            members.add(cutting(seed + index, mean))
        async with fleet(members) as client:
            answers = await asyncio.gather(*(collect(client, each) for each in wanted))
            for member in members.ever:
                member.cut = lambda: False
        assert [joined(each) for each in answers] == expected
        for each, answer in zip(asked, expected, strict=True):
            assert bool(answer.get("certificate")) == each["certified"]

    with pytest.MonkeyPatch.context() as patch:  # no waiting for links to recover
        patch.setattr(client_module, "AGAIN_SECONDS", 0.0)
        patch.setattr(client_module, "LOOK_SECONDS", 0.001)
        asyncio.run(episode())


async def test_a_replica_that_dies_is_followed_by_another_with_guesses_of_what_is_known():
    members = Members()
    first, second = members.add(pause=0.005), members.add(pause=0.005)
    async with fleet(members) as client:
        request = request_of("one", first.bench.text, "hello", max_tokens=100)
        got = []
        async with aclosing(client.generate(request)) as outputs:
            async for output in outputs:
                got.append(output)
                if len(tokens_of(got)) >= 60 and len(members.members) == 2:
                    busy, other = (first, second) if first.asked else (second, first)
                    members.kill(busy)
        assert tokens_of(got) == first.bench.expected("hello", 100)
        assert terminal_of(got).usage.completion_tokens == 100
        assert len(other.asked[0].expected[0]) >= 60
        # Sixty known tokens in steps of at most 15 drafts, and the rest one by one.
        assert other.loop.health().steps < 60


async def test_an_engine_that_stops_under_its_link_is_as_good_as_lost():
    members = Members()
    first, second = members.add(pause=0.005), members.add(pause=0.005)
    async with fleet(members) as client:
        request = request_of("one", first.bench.text, "hello", max_tokens=60)
        running = asyncio.create_task(collect(client, request))
        await eventually(lambda: first.asked or second.asked)
        busy = first if first.asked else second
        await eventually(lambda: busy.client.health().generated_tokens > 5)
        await asyncio.to_thread(busy.loop.stop)
        del members.members[busy.name]
        assert tokens_of(await running) == first.bench.expected("hello", 60)


async def test_a_request_that_ends_replica_after_replica_is_ended():
    members = Members()
    for _ in range(MOST_LOSSES + 3):
        members.add(lambda: True)
    async with fleet(members) as client:
        with pytest.raises(RequestPoisoned, match=f"ended {MOST_LOSSES + 1} replicas"):
            await collect(client, request_of("one", members.ever[0].bench.text, "hello"))
        assert sum(len(member.asked) for member in members.ever) == MOST_LOSSES + 1
        for member in members.ever:
            member.cut = lambda: False
        answer = await collect(client, request_of("two", members.ever[0].bench.text, "hello"))
        assert len(tokens_of(answer)) == 8


async def test_one_link_that_is_lost_again_and_again_is_not_the_requests_fault():
    members = Members()
    losses = iter([True] * (MOST_LOSSES + 3))
    member = members.add(lambda: next(losses, False))
    async with fleet(members) as client:
        assert len(tokens_of(await collect(client, request_of("one", member.bench.text, "hello")))) == 8
    assert len(member.asked) > MOST_LOSSES + 1


class Leaps:
    """A clock that moves on by a second with every look."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        self._now += 1.0
        return self._now


async def test_without_replicas_a_request_is_told_to_come_again():
    members = Members()
    clock = Leaps()
    async with fleet(members, clock=clock) as client:
        bench = Members().add().bench
        with pytest.raises(Unavailable) as refused:
            await collect(client, request_of("one", bench.text, "hello"))
        assert refused.value.retry_after > 0
        assert clock.now() > NEW_PATIENCE_SECONDS
        assert client.health().alive
        assert client.health().slots == 0
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.heartbeat(), 0.3)


async def test_a_request_waits_for_the_first_replica():
    members = Members()
    async with fleet(members) as client:
        bench = Members().add().bench
        running = asyncio.create_task(collect(client, request_of("one", bench.text, "hello")))
        await asyncio.sleep(0.2)
        member = members.add()
        assert tokens_of(await running) == member.bench.expected("hello", 8)
        await client.heartbeat()


async def test_what_one_replica_has_no_room_for_another_gets_and_what_none_has_room_for_is_refused():
    members = Members()
    for _ in range(2):
        members.add(max_queued=1, max_num_seqs=1, pause=0.02)
    async with fleet(members) as client:
        text = members.ever[0].bench.text
        busy = [asyncio.create_task(collect(client, request_of(f"busy-{i}", text, "hello"))) for i in range(12)]
        answers = await asyncio.gather(*busy, return_exceptions=True)
        refused = [each for each in answers if isinstance(each, BaseException)]
        assert all(isinstance(each, Overloaded) for each in refused)
        assert refused
        assert all(member.asked for member in members.ever)
        assert [tokens_of(each) for each in answers if isinstance(each, list)] == [
            members.ever[0].bench.expected("hello", 8)
        ] * (12 - len(refused))


async def test_a_request_that_has_begun_is_not_refused_when_queues_are_full():
    members = Members()
    first = members.add(pause=0.002, max_num_seqs=1)
    async with fleet(members) as client:
        text = first.bench.text
        running = asyncio.create_task(collect(client, request_of("one", text, "hello", max_tokens=60)))
        await eventually(lambda: first.client.health().generated_tokens > 5)
        second = members.add(max_queued=1, max_num_seqs=1, pause=0.02)
        fills = [asyncio.create_task(collect(second.client, request_of("fill-0", text, "x", max_tokens=40)))]
        await eventually(lambda: second.client.health().running == 1)
        fills.append(asyncio.create_task(collect(second.client, request_of("fill-1", text, "x"))))
        await eventually(lambda: second.client.health().waiting == 1)
        members.kill(first)
        assert tokens_of(await running) == first.bench.expected("hello", 60)
        await asyncio.gather(*fills)
        assert len(second.asked) > 1


async def test_what_is_wrong_with_a_request_is_said_here_or_there():
    members = Members()
    member = members.add()
    async with fleet(members) as client:
        with pytest.raises(PromptTooLong):
            await collect(client, request_of("one", member.bench.text, "a" * 128))
        assert not member.asked
        twice = replace(request_of("two", member.bench.text, "hello"), priority=3)
        with pytest.raises(RequestError, match="priority"):
            await collect(client, twice)
        for call in (client.load_adapter("a", "b"), client.unload_adapter("a"), client.start_profile()):
            with pytest.raises(RequestError):
                await call
        with pytest.raises(RequestError):
            await client.stop_profile()
        for look in (client.recent_steps(), client.cached_prefixes(), client.tenant_shares()):
            with pytest.raises(RequestError, match="is for one engine; a fleet has several"):
                await look
        assert client.adapters() == {}


@pytest.mark.parametrize("kill", [False, True])
async def test_an_abort_ends_a_stream_wherever_it_is(kill):
    members = Members()
    member = members.add(pause=0.005)
    async with fleet(members) as client:
        running = asyncio.create_task(collect(client, request_of("one", member.bench.text, "hello", max_tokens=100)))
        await eventually(lambda: member.client.health().generated_tokens > 5)
        if kill:
            members.kill(member)
            await asyncio.sleep(0.1)
        await client.abort("one")
        outputs = await running
        ends = [output for output in outputs if isinstance(output, ChoiceFinished)]
        assert [end.reason for end in ends] == [FinishReason.ABORT]
        assert terminal_of(outputs).usage.completion_tokens == len(tokens_of(outputs)) > 0
        await client.abort("unknown")


async def test_who_leaves_ends_the_request_at_its_replica():
    members = Members()
    member = members.add(pause=0.005)
    async with fleet(members) as client:
        request = request_of("one", member.bench.text, "hello", max_tokens=100)
        async with aclosing(client.generate(request)) as outputs:
            async for _ in outputs:
                break
        await eventually(lambda: member.idle)
        assert member.client.health().generated_tokens < 100


class Otherwise(Member):
    """Answers with other tokens."""

    async def generate(self, request):
        async for outputs in super().generate(replace(request, sequences=tuple(map(self._other, request.sequences)))):
            yield outputs

    def _other(self, sequence):
        return replace(sequence, sampling=sequence.sampling.put("seed", 99))


async def test_a_replica_that_answers_otherwise_does_not_continue_the_sentence():
    members = Members()
    first = members.add(pause=0.005)
    async with fleet(members) as client:
        running = asyncio.create_task(collect(client, request_of("one", first.bench.text, "hello", max_tokens=100)))
        await eventually(lambda: first.client.health().generated_tokens > 10)
        other = Otherwise("other")
        members.ever.append(other)
        members.members["other"] = other
        members.kill(first)
        outputs = await running
        assert isinstance(outputs[-1], RequestFailed)
        assert "differently" in outputs[-1].message
        got = tokens_of(outputs)
        assert got == first.bench.expected("hello", 100)[: len(got)]


async def test_the_work_of_replicas_that_are_gone_still_counts():
    members = Members()
    first, second = members.add(), members.add()
    async with fleet(members) as client:
        for index in range(6):
            await collect(client, request_of(f"request-{index}", first.bench.text, "hello" * (index + 1)))
        await eventually(lambda: first.idle and second.idle)
        assert client.measurements().generated_tokens == 48
        assert client.health().slots == 16
        members.kill(first)
        assert client.measurements().generated_tokens == 48
        assert client.measurements().total_blocks == second.client.health().total_blocks
        assert sum(dict(client.measurements().finished).values()) == 6
        for _ in range(3):
            members.kill(members.add())
        assert client.measurements().generated_tokens == 48


async def test_turns_of_a_conversation_go_where_the_first_went_by_the_engines_own_keys():
    members = Members()
    for _ in range(3):
        members.add()
    async with fleet(
        members, router=Router(seed=3, affinity=20.0)
    ) as client:  # reading counts for much: prompts are tiny
        text = members.ever[0].bench.text
        talk = "the first turn is long enough for blocks"
        for turn in range(5):
            await collect(client, request_of(f"turn-{turn}", text, talk))
            talk += "more"
        assert [bool(member.asked) for member in members.ever].count(True) == 1
        assert client.measurements().cached_tokens > 100
    config = members.ever[0].bench.config
    chain = KeyChain(root_key(config.model_digest, "", ""), config.block_size)
    chain.follow(text.tokenizer.encode(talk))
    assert chain.keys


async def test_tokenizing_needs_no_replica():
    async with fleet(Members()) as client:
        tokens = await client.tokenize(TextPrompt("abc"))
        assert await client.detokenize(tokens.token_ids) == "abc"
        chat = await client.tokenize(ChatPrompt((Message("user", "abc"),)))
        assert chat.text.startswith("abc")


async def test_a_full_fleet_is_known_to_be_full_without_asking():
    members = Members()
    member = members.add()
    async with fleet(members) as client:
        client.check_queue("")
        full = replace(member.state(), retry_after=7)
        member.state = lambda: full
        with pytest.raises(Overloaded) as refused:
            client.check_queue("")
        assert refused.value.retry_after == 7
        members.add()
        client.check_queue("")


async def test_a_lost_reset_is_no_error():
    members = Members()
    member = members.add()

    async def lost():
        raise ReplicaLost("gone")

    async with fleet(members) as client:
        await client.reset_prefix_cache()
        member.reset_prefix_cache = lost
        await client.reset_prefix_cache()
