"""What a client asks of the engine beside generating: heartbeat, reset, tokens; and how much may wait."""

from __future__ import annotations

import asyncio
import threading

import pytest
from engine_harness import build, text_of

from penstock.contract.errors import EngineDead, InvalidParameter, Overloaded
from penstock.contract.request import ChatPrompt, EngineRequest, Message, StopRules, TextPrompt, TokenPrompt
from penstock.core.replaying import replay
from penstock.engine import EngineLoop, LocalClient
from penstock.engine import loop as loop_module
from penstock.engine.admission import QueueLimits
from penstock.engine.intake import GIANT_CHARS
from penstock.text import Tokenizer


class Running:
    """A harness whose engine runs in its thread."""

    def __init__(
        self, max_queued: int = 1000, max_queued_tokens: int = 10_000, on_rest=lambda: None, **options
    ) -> None:
        self.harness = build(**options)
        self.loop = EngineLoop(
            self.harness.engine, self.harness.clock, QueueLimits(max_queued, max_queued_tokens), on_rest=on_rest
        )
        self.loop.start()
        self.client = LocalClient(self.harness.intake, self.loop)

    async def answer(self, request_id: str, prompt: str, **fields) -> list:
        request = EngineRequest(request_id, TextPrompt(prompt), stop=StopRules(max_tokens=4, ignore_eos=True), **fields)
        return [output async for output in self.client.generate(request)]

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.harness.engine.close()


class Gated:
    """Finishes a run, but waits in the first one until the test lets it go."""

    def __init__(self, finish) -> None:
        self._finish = finish
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self):
        self.entered.set()
        assert self.opened.wait(5)
        return self._finish()


async def test_a_heartbeat_comes_back_from_the_engines_thread_and_not_from_a_dead_one():
    with Running() as running:
        await asyncio.wait_for(running.client.heartbeat(), 5)
    with pytest.raises(EngineDead):
        await asyncio.wait_for(running.client.heartbeat(), 5)


async def test_a_heartbeat_waits_for_the_step_before_it():
    with Running() as running:
        engine = running.harness.engine
        gated = engine._finish_run = Gated(engine._finish_run)
        answering = asyncio.create_task(running.answer("a", "hello there"))
        await asyncio.to_thread(gated.entered.wait, 5)
        beating = asyncio.create_task(running.client.heartbeat())
        done, _ = await asyncio.wait([beating], timeout=0.05)
        assert not done
        gated.opened.set()
        await asyncio.wait_for(beating, 5)
        await answering


async def test_a_reset_prefix_cache_is_found_no_more_and_is_on_record(tmp_path):
    trace = tmp_path / "trace.jsonl"
    with Running(record=trace) as running:
        hits = []
        for request_id in ("a", "b", "c"):
            outputs = await running.answer(request_id, "hello hello hello")
            hits.append(outputs[-1].usage.cached_tokens)
            if request_id == "b":
                await running.client.reset_prefix_cache()
            assert text_of(outputs)
    assert hits[0] == hits[2] == 0 < hits[1]
    assert '"reset"' in trace.read_text()
    assert replay(trace.read_text().splitlines()).same


async def test_tokens_waiting_are_bounded_but_one_long_prompt_is_always_taken():
    with Running(pause=0.05, max_queued_tokens=20, max_num_seqs=1, max_num_batched_tokens=16) as running:
        requests = [asyncio.create_task(running.answer(f"a{index}", "hello hello")) for index in range(4)]
        ended = await asyncio.gather(*requests, return_exceptions=True)
        refused = [each for each in ended if isinstance(each, Overloaded)]
        assert 1 <= len(refused) < 4
        assert all("tokens are waiting" in each.message and each.retry_after >= 1 for each in refused)
        assert all(isinstance(each, list | Overloaded) for each in ended)
        assert text_of(await running.answer("long", "hello hello hello hello hello"))


async def test_a_prompt_is_tokenised_as_it_would_be_generated_from():
    with Running() as running:
        tokens = await running.client.tokenize(TextPrompt("hi!"))
        assert (tokens.token_ids, tokens.pieces, tokens.text) == ((7, 8, 29), (b"h", b"i", b"!"), "hi!")
        assert await running.client.detokenize(tokens.token_ids) == "hi!"
        chat = await running.client.tokenize(ChatPrompt((Message("user", "hi"),)))
        assert chat.text == "hi<|end|>"
        assert (await running.client.tokenize(TokenPrompt((1, 2)))).pieces == (b"b", b"c")


@pytest.mark.parametrize("tenant", ["", "one"])
async def test_short_prompts_wait_for_no_long_ones_and_a_key_has_half_of_their_places(monkeypatch, tenant):
    gate, under_way = threading.Event(), []
    with Running() as running:
        encode = Tokenizer.encode

        def held_up(tokenizer, text, **given):
            if len(text) >= GIANT_CHARS:
                under_way.append(text[0])
                assert gate.wait(30)
                return (1,)
            return encode(tokenizer, text, **given)

        monkeypatch.setattr(Tokenizer, "encode", held_up)
        monkeypatch.setattr(running.harness.intake, "_check_length", lambda _chars, _field: None)
        giants = [asyncio.create_task(running.client.tokenize(TextPrompt("a" * GIANT_CHARS), tenant)) for _ in range(9)]
        places = 1 if tenant else 2
        while len(under_way) < places:
            await asyncio.sleep(0.01)
        assert (await running.client.tokenize(TextPrompt("hi!"), tenant)).token_ids == (7, 8, 29)
        if tenant:
            other = asyncio.create_task(running.client.tokenize(TextPrompt("b" * GIANT_CHARS), "another"))
            while "b" not in under_way:
                await asyncio.sleep(0.01)
            giants.append(other)
        assert under_way.count("a") == places
        gate.set()
        assert {each.token_ids for each in await asyncio.gather(*giants)} == {(1,)}


async def test_ids_outside_the_vocabulary_are_refused():
    with Running() as running:
        for ids in ((32,), (-1,), ()):
            with pytest.raises(InvalidParameter):
                await running.client.detokenize(ids)
            with pytest.raises(InvalidParameter):
                await running.client.tokenize(TokenPrompt(ids))


async def test_an_engine_that_has_done_its_work_rests_once_however_often_it_is_asked_for_its_health(monkeypatch):
    monkeypatch.setattr(loop_module, "REST_SECONDS", 0.05)
    rests, rested = [], threading.Event()

    def rest() -> None:
        rests.append(threading.current_thread().name)
        rested.set()

    with Running(on_rest=rest) as running:
        scheduler, checked = running.harness.engine.scheduler, []
        check = scheduler.check
        monkeypatch.setattr(type(scheduler), "check", lambda _: checked.append(len(rests)) or check())
        await asyncio.wait_for(running.client.heartbeat(), 5)
        assert rests == [], "nothing was done yet"
        for number in range(2):
            rested.clear()
            await running.answer(f"r{number}", "a prompt")
            while not rested.is_set():
                await asyncio.wait_for(running.client.heartbeat(), 5)
                running.harness.clock.advance(0.01)
            await asyncio.wait_for(running.client.heartbeat(), 5)
        assert rests == ["penstock-engine"] * 2
        assert checked == [0, 1], "once before each rest, and not when the work is done: the next request may come"
