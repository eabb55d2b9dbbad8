"""The engine in its thread: many readers, slow readers, readers that leave, and the end."""

import asyncio
import threading
import time
from contextlib import asynccontextmanager

import engine_harness as harness
import pytest
from engine_harness import finishes_of, terminal_of, text_of, tokens_of
from hypothesis import given
from hypothesis import strategies as st

from penstock.contract.errors import EngineDead, EngineFault, InvalidParameter, Overloaded, ReaderTooSlow
from penstock.contract.events import (
    ChoiceDelta,
    ChoiceFinished,
    FinishReason,
    RequestFailed,
    RequestFinished,
    TokenPiece,
    Usage,
)
from penstock.contract.request import ChatPrompt, EngineRequest, Message, TokenPrompt
from penstock.core import Scheduler
from penstock.engine import EngineLoop, LocalClient
from penstock.engine import loop as loop_module
from penstock.engine.admission import Admission, QueueLimits
from penstock.engine.output_queue import TOKEN_BYTES, WaitingRoom, merge
from penstock.engine.prompt_echo import PromptEcho
from penstock.engine.retry_after import EndRate


@asynccontextmanager
async def serving(max_queued=1000, pause=0.002, on_death=lambda: None, room=None, **config):
    bench = harness.build(pause=pause, **config)
    loop = EngineLoop(bench.engine, bench.clock, QueueLimits(max_queued), on_death=on_death)
    loop.start()
    client = LocalClient(bench.intake, loop, room=room)
    try:
        yield bench, client
    finally:
        await asyncio.to_thread(client.close)
        bench.engine.scheduler.check()


async def collect(client, one):
    return [output async for output in client.generate(one)]


async def eventually(condition, seconds=1.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("place", ["check", "submit", "wanted", "submitted"])
async def test_a_defect_at_admission_ends_its_request_alone_and_leaves_nothing_of_it(monkeypatch, caplog, place):
    def planted(call):
        def fails_for_the_second_sequence(*arguments):
            one = next(each for each in arguments if hasattr(each, "id"))
            if "broken" in one.id and getattr(one, "choice", 1) == 1:
                raise ZeroDivisionError("planted")
            return call(*arguments)

        return fails_for_the_second_sequence

    async with serving() as (bench, client):
        engine = bench.engine
        owners = {"check": Admission, "submit": Scheduler, "wanted": PromptEcho, "submitted": type(engine._recorder)}
        owner = owners[place]
        monkeypatch.setattr(owner, place, planted(getattr(owner, place)))
        other = asyncio.create_task(collect(client, harness.request_of("other", bench.text, "hello", max_tokens=60)))
        with pytest.raises(EngineFault, match="internal"):
            await collect(client, harness.request_of("broken", bench.text, "hello", n=2))
        assert "planted" in caplog.text
        assert len(tokens_of(await other)) == 60
        again = await collect(client, harness.request_of("later", bench.text, "hello"))
        assert len(tokens_of(again)) == 8
        async with asyncio.timeout(30):
            while client.health().running:  # shown between steps
                await asyncio.sleep(0.01)
        assert (client.health().alive, client.health().waiting) == (True, 0)
        assert not engine._requests
        assert not engine._owners


async def test_many_readers_each_get_their_own_answer():
    async with serving(num_blocks=40) as (bench, client):
        prompts = [f"prompt {'z' * (i % 9)} {i % 5}".replace("0", "a") for i in range(40)]
        requests = [harness.request_of(f"a{i}", bench.text, p, max_tokens=12) for i, p in enumerate(prompts)]
        answers = await asyncio.gather(*[collect(client, one) for one in requests])
        for prompt, outputs in zip(prompts, answers, strict=True):
            assert tokens_of(outputs) == bench.expected(prompt, 12)
            assert isinstance(terminal_of(outputs), RequestFinished)
        await eventually(lambda: client.health().free_blocks == 40)


async def test_readers_on_two_event_loops_are_served_at_once():
    async with serving() as (bench, client):
        answers = []

        def other_loop():
            answers.append(
                asyncio.run(collect(client, harness.request_of("other", bench.text, "other", max_tokens=20)))
            )

        thread = threading.Thread(target=other_loop)
        thread.start()
        here = await collect(client, harness.request_of("here", bench.text, "here", max_tokens=20))
        await asyncio.to_thread(thread.join)
        assert tokens_of(here) == bench.expected("here", 20)
        assert tokens_of(answers[0]) == bench.expected("other", 20)


async def test_a_reader_that_leaves_gives_its_blocks_back():
    async with serving() as (bench, client):

        async def leave(one):
            stream = client.generate(one)
            async for _ in stream:
                break
            await stream.aclose()

        stays = asyncio.create_task(collect(client, harness.request_of("stays", bench.text, "stays", max_tokens=100)))
        await asyncio.gather(
            *[
                leave(harness.request_of(f"l{i}", bench.text, f"leaves {'q' * i}", n=2, max_tokens=110))
                for i in range(5)
            ]
        )
        assert tokens_of(await stays) == bench.expected("stays", 100)
        await eventually(lambda: client.health().free_blocks == bench.config.num_blocks)
        assert client.health().running == client.health().waiting == 0


async def test_a_cancelled_task_aborts_its_ask():
    async with serving() as (bench, client):
        task = asyncio.create_task(collect(client, harness.request_of("a", bench.text, "hello", max_tokens=120)))
        await eventually(lambda: client.health().steps > 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: client.health().free_blocks == bench.config.num_blocks)


async def test_abort_by_id_ends_the_stream_with_its_reason():
    async with serving(max_num_seqs=1) as (bench, client):
        blocker = asyncio.create_task(collect(client, harness.request_of("run", bench.text, "hello", max_tokens=120)))
        queued = asyncio.create_task(
            collect(client, harness.request_of("wait", bench.text, "hello again", max_tokens=120))
        )
        await eventually(lambda: client.health().waiting == 1)
        await client.abort("wait")
        await client.abort("nobody")
        [finish] = finishes_of(await queued)
        assert finish.reason is FinishReason.ABORT
        assert tokens_of(await blocker) == bench.expected("hello", 120)


async def test_a_request_aborted_while_its_prompt_is_read_ends_like_any_other():
    async with serving() as (bench, client):
        one = harness.request_of("early", bench.text, "hello", max_tokens=120)
        resolve, reading, may_go_on = bench.intake.resolve, threading.Event(), threading.Event()

        def slowly(request):
            reading.set()
            assert may_go_on.wait(5)
            return resolve(request)

        bench.intake.resolve = slowly
        answer = asyncio.create_task(collect(client, one))
        assert await asyncio.to_thread(reading.wait, 5)
        await client.abort("early")
        may_go_on.set()
        [finish] = finishes_of(await answer)
        assert finish.reason is FinishReason.ABORT
        bench.intake.resolve = resolve
        assert tokens_of(await collect(client, one)) == bench.expected("hello", 120)  # forgotten: the id is free again


async def test_prompts_without_a_template_do_not_wait_for_those_that_have_one(monkeypatch):
    """Renderings wait for processes; more of them wait here than the event loop has threads for quick work."""
    async with serving() as (bench, client):
        resolve, go_on = bench.intake.resolve, threading.Event()

        def waits(request):
            if isinstance(request.prompt, ChatPrompt):
                assert go_on.wait(60)
                raise InvalidParameter("messages", "waited")
            return resolve(request)

        monkeypatch.setattr(bench.intake, "resolve", waits)
        chats = [EngineRequest(f"c{i}", ChatPrompt((Message("user", "hi"),))) for i in range(40)]
        waiting = [asyncio.create_task(collect(client, chat)) for chat in chats]
        await asyncio.sleep(0)
        answer = await collect(client, harness.request_of("a", bench.text, "ab", max_tokens=3))
        assert tokens_of(answer) == bench.expected("ab", 3)
        assert not any(task.done() for task in waiting)
        go_on.set()
        refused = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(each) for each in refused} == {InvalidParameter}


async def test_a_slow_reader_gets_everything_in_few_pieces():
    async with serving() as (bench, client):
        stream = client.generate(harness.request_of("slow", bench.text, "hello", max_tokens=100))
        outputs = [await anext(stream)]
        await eventually(lambda: client.health().steps >= 100)
        outputs += [output async for output in stream]
        assert text_of(outputs) == bench.spelled(bench.expected("hello", 100))
        assert len([o for o in outputs if isinstance(o, ChoiceDelta)]) <= 3


async def test_a_steps_outputs_are_handed_over_once_the_next_step_has_begun(monkeypatch):
    """Otherwise the readers that they wake would take the processor that is to compute."""
    happened: list[str] = []
    call = loop_module._call
    monkeypatch.setattr(loop_module, "_call", lambda *given: (happened.append("outputs"), call(*given))[1])
    async with serving() as (bench, client):
        start = bench.engine._runner.start
        bench.engine._runner.start = lambda plan: (happened.append("start"), start(plan))[1]
        outputs = await collect(client, harness.request_of("one", bench.text, "hello", max_tokens=6))
    assert tokens_of(outputs) == bench.expected("hello", 6)
    assert happened == ["start", *["start", "outputs"] * 5, "outputs"]


async def test_a_steps_outputs_do_not_wait_for_the_runner_that_follows_a_lost_one(monkeypatch):
    happened: list[str] = []
    call = loop_module._call
    monkeypatch.setattr(loop_module, "_call", lambda *given: (happened.append("outputs"), call(*given))[1])
    async with serving() as (bench, client):
        runner = bench.engine._runner
        start, reset = runner.start, runner.reset

        def lose_the_third(plan):
            happened.append("start")
            if happened.count("start") == 3:
                bench.runner.crash_at(plan.step)
                bench.runner.start(plan)
            start(plan)

        runner.start = lose_the_third
        runner.reset = lambda: (happened.append("reset"), reset())[1]
        outputs = await collect(client, harness.request_of("one", bench.text, "hello", max_tokens=4))
    assert tokens_of(outputs) == bench.expected("hello", 4)
    assert happened[: happened.index("reset")] == ["start", "start", "outputs", "start", "outputs"]


async def test_a_reader_who_leaves_too_much_lying_is_given_up_and_its_blocks_come_back():
    room = WaitingRoom(of_all=10**9, of_one=20 * TOKEN_BYTES, patience=0.01)
    async with serving(room=room, num_blocks=200, max_model_len=800) as (bench, client):
        stream = client.generate(harness.request_of("slow", bench.text, "hello", max_tokens=700))
        outputs = [await anext(stream)]
        await eventually(lambda: room.given_up, seconds=30)
        await eventually(lambda: client.health().free_blocks == bench.config.num_blocks, seconds=30)
        outputs.append(await anext(stream))
        with pytest.raises(ReaderTooSlow):
            await anext(stream)
        expected = bench.spelled(bench.expected("hello", 700))
        assert 20 < len(text_of(outputs)) < 700
        assert expected.startswith(text_of(outputs))
        assert (room.bytes, room.given_up) == (0, 1)


async def test_a_full_queue_is_refused_with_a_time_to_come_back():
    async with serving(max_queued=2, max_num_seqs=1) as (bench, client):
        first = asyncio.create_task(collect(client, harness.request_of("a0", bench.text, "hello", max_tokens=100)))
        await eventually(lambda: client.health().steps > 0)
        with pytest.raises(Overloaded) as caught:
            await collect(client, harness.request_of("big", bench.text, "hello", n=3))
        assert 1 <= caught.value.retry_after <= 120
        await first


async def test_refusals_reach_the_one_who_asked():
    async with serving() as (bench, client):
        with pytest.raises(InvalidParameter):
            await collect(client, EngineRequest("a", TokenPrompt((999,))))
        running = asyncio.create_task(collect(client, harness.request_of("twin", bench.text, "hello", max_tokens=100)))
        await eventually(lambda: client.health().running == 1)
        with pytest.raises(InvalidParameter):
            await collect(client, harness.request_of("twin", bench.text, "hello"))
        assert tokens_of(await running) == bench.expected("hello", 100)


async def test_a_step_that_raises_is_noticed_by_no_reader():
    async with serving() as (bench, client):
        bench.runner.crash_at(2)
        prompts = [f"hello {'b' * i}" for i in range(4)]
        answers = await asyncio.gather(
            *[
                collect(client, harness.request_of(f"a{i}", bench.text, prompt, max_tokens=50))
                for i, prompt in enumerate(prompts)
            ]
        )
        assert bench.runner.crashes == 1
        for prompt, answer in zip(prompts, answers, strict=True):
            assert tokens_of(answer) == bench.expected(prompt, 50)


async def test_a_death_is_told_once_and_an_end_is_none():
    deaths = []
    async with serving(on_death=lambda: deaths.append("dead")) as (bench, client):
        await collect(client, harness.request_of("good", bench.text, "prompt", max_tokens=3))
    assert not deaths
    async with serving(on_death=lambda: deaths.append("dead"), max_num_seqs=1) as (bench, client):
        for step in range(20):
            bench.runner.crash_at(step)
        await asyncio.gather(*[
            collect(client, harness.request_of(f"r{i}", bench.text, "prompt", max_tokens=3)) for i in range(4)
        ])  # fmt: skip
        await eventually(lambda: deaths)
    assert deaths == ["dead"]


async def test_an_engine_that_dies_tells_every_reader_and_later_ones():
    async with serving() as (bench, client):
        for step in range(2, 200):
            bench.runner.crash_at(step)
        answers = await asyncio.gather(
            *[
                collect(client, harness.request_of(f"a{i}", bench.text, f"hello {'b' * i}", max_tokens=50))
                for i in range(40)
            ],
            return_exceptions=True,
        )
        for answer in answers:  # a request that came after the death is refused; one that was running fails
            assert isinstance(answer, EngineDead) or isinstance(answer[-1], RequestFailed)
        await eventually(lambda: not client.health().alive)
        with pytest.raises(EngineDead):
            await collect(client, harness.request_of("late", bench.text, "hello"))


async def test_stopping_fails_live_requests_and_refuses_later_ones():
    async with serving() as (bench, client):
        task = asyncio.create_task(collect(client, harness.request_of("a", bench.text, "hello", n=8, max_tokens=120)))
        await eventually(lambda: client.health().steps > 0)
        await asyncio.to_thread(client.close)
        outputs = await task
        assert isinstance(outputs[-1], RequestFailed | RequestFinished)
        with pytest.raises(EngineDead):
            await collect(client, harness.request_of("late", bench.text, "hello"))


PIECES = st.lists(
    st.tuples(st.integers(0, 2), st.text(max_size=3), st.lists(st.integers(0, 9), max_size=2)), max_size=30
)


@given(PIECES, st.lists(st.booleans(), min_size=30, max_size=30))
def test_merging_keeps_each_choices_text_tokens_and_end(pieces, cuts):
    outputs = [ChoiceDelta(c, t, tuple(TokenPiece(i, b"", 0.0) for i in ids)) for c, t, ids in pieces]
    outputs += [ChoiceFinished(c, FinishReason.STOP) for c in range(3)] + [RequestFinished(Usage())]
    waiting, batch = [], []
    for output, cut in zip(outputs, [*cuts, *[True] * 10], strict=False):
        batch.append(output)
        if cut:
            merge(waiting, batch)
            batch = []
    merge(waiting, batch)
    for choice in range(3):
        assert text_of(waiting, choice) == text_of(outputs, choice)
        assert tokens_of(waiting, choice) == tokens_of(outputs, choice)
    assert [o for o in waiting if not isinstance(o, ChoiceDelta)] == outputs[-4:]
    assert len(waiting) <= 3 + 4


def test_how_soon_others_end_follows_from_how_long_the_last_ones_took():
    rate = EndRate()
    assert rate.seconds_until(100, running=4) == 0
    for seconds in (1.0, 2.0, 3.0, 0.0):  # the last one never ran
        rate.ended(seconds)
    assert rate.seconds_until(6, running=4) == 3.0
    assert rate.seconds_until(0, running=4) == 0
    for _ in range(64):
        rate.ended(10.0)
    assert rate.seconds_until(1, running=0) == 10.0
