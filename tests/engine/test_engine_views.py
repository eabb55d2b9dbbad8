"""What an engine shows of its inner state: its latest steps, the parts that requests had in them, tenants' shares."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_harness import Harness, build, request_of, terminal_of

from penstock.contract.engine_views import StepStall, StepView
from penstock.contract.errors import EngineDead
from penstock.contract.plan import StallReason, StepPlan, StepResult
from penstock.core import Scheduler
from penstock.drafters import SuffixDrafter
from penstock.engine import Engine, EngineLoop, LocalClient, recent_steps
from penstock.engine.admission import QueueLimits
from penstock.engine.recent_steps import StepRing, told
from penstock.engine.tenant_book import TenantBook


class Hurried:
    """A runner whose steps take a millisecond, and another for each position."""

    def __init__(self, runner) -> None:
        self._runner = runner

    def run(self, plan: StepPlan) -> StepResult:
        return replace(self._runner.run(plan), seconds=0.001 + 0.001 * plan.num_tokens)

    def reset(self) -> bool:
        return self._runner.reset()


class Advancing:
    """Lets the clock go on as far as the step took; the step `fails_at` raises."""

    def __init__(self, runner, clock, fails_at: int) -> None:
        self._runner = runner
        self._clock = clock
        self._fails_at = fails_at

    def run(self, plan: StepPlan) -> StepResult:
        result = self._runner.run(plan)
        if plan.step == self._fails_at:
            raise RuntimeError("out of memory")
        self._clock.advance(result.seconds)
        return result

    def reset(self) -> bool:
        return self._runner.reset()


def timed(*, drafter=None, fails_at: int = -1, **options) -> Harness:
    harness = build(**options)
    runner = Advancing(Hurried(harness.runner), harness.clock, fails_at)
    harness.engine = Engine(Scheduler(harness.config), runner, harness.text, clock=harness.clock, drafter=drafter)
    return harness


def steps_of(harness: Harness, *requests: str, after: int = -1) -> tuple[StepView, ...]:
    return told(harness.engine.recent_steps.snapshot(), after, frozenset(requests)).steps


def test_a_step_tells_what_it_computed_and_how_long_that_took():
    harness = timed()
    harness.submit("a" * 20, max_tokens=3)
    harness.run()
    steps = steps_of(harness)
    assert [(each.step, each.chunk, each.decoding) for each in steps] == [(0, 16, 0), (1, 4, 0), (2, 0, 1), (3, 0, 1)]
    assert [round(each.prompts, 6) for each in steps] == [0.017, 0.005, 0.0, 0.0]
    assert [round(each.decode, 6) for each in steps] == [0.0, 0.0, 0.002, 0.002]
    assert steps[-1].at == pytest.approx(harness.clock.now())
    assert steps_of(harness, after=1) == steps[2:]


def test_what_a_step_was_expected_to_take_is_what_the_model_said_before_it_learned():
    harness = timed(num_blocks=256, max_model_len=512)
    harness.submit("a" * 4, max_tokens=40)
    expected = []
    while harness.engine.has_work:
        before = harness.engine.scheduler.times.known
        harness.step()
        last = steps_of(harness)[-1]
        expected.append(last.foreseen)
        assert (last.foreseen > 0) == (before is not None)
    assert expected[-1] == pytest.approx(steps_of(harness)[-1].decode, rel=0.05)


def test_a_prompt_that_nothing_is_drawn_from_has_a_forecast_too():
    harness = timed()
    harness.submit("a" * 40, max_tokens=2)
    harness.run()
    harness.submit("b" * 40, max_tokens=2)
    harness.step()
    last = steps_of(harness)[-1]
    assert (last.chunk, last.decoding) == (16, 0)
    assert last.foreseen > 0


def test_why_the_queue_stood_is_told_without_saying_whose_it_is():
    harness = timed(max_num_seqs=1)
    first, second = harness.submit("aaaa", max_tokens=6), harness.submit("bbbb", max_tokens=2)
    harness.run()
    stalled = [each for each in steps_of(harness) if each.stall]
    assert stalled
    assert {each.stall for each in stalled} == {StepStall(StallReason.NO_SLOT, 1, 0)}
    assert {each.waiting for each in stalled} == {1}
    assert not any(name in repr(steps_of(harness)) for name in (first, second))


def test_guessed_positions_and_rows_that_decode_are_told_apart():
    harness = timed(drafter=SuffixDrafter(most_bytes=1_000_000))
    harness.submit("abcabcabcabc", max_tokens=60)
    harness.run()
    assert any(each.drafted for each in steps_of(harness))
    assert all((each.decoding, each.chunk) == (1, 0) for each in steps_of(harness)[1:])


def test_a_requests_steps_are_those_it_lived_through_with_its_own_part():
    harness = timed(max_num_seqs=2)
    harness.submit("a" * 5, max_tokens=12)
    harness.step()
    harness.step()
    second = harness.submit("b" * 5, max_tokens=4)
    harness.run()
    steps = steps_of(harness, second)
    assert [each.own.positions for each in steps] == [5, 1, 1, 1]
    assert steps[0].own.prompts == pytest.approx(steps[0].prompts)
    assert steps[0].own.decode == 0.0
    assert [each.own.decode for each in steps[1:]] == pytest.approx([each.decode / 2 for each in steps[1:]])
    assert [each.own for each in steps_of(harness)] == [None] * len(steps_of(harness))
    parts = terminal_of(harness.outputs[second]).timings.parts
    assert parts.prompt == pytest.approx(steps[0].prompts)


def test_a_slot_that_another_has_now_is_not_its_own_any_more():
    harness = timed(max_num_seqs=1)
    first, second = harness.submit("aaaa", max_tokens=3), harness.submit("bbbb", max_tokens=3)
    harness.run()
    one, two = steps_of(harness, first), steps_of(harness, second)
    assert one[-1].step < two[0].step
    assert len(one) == len(two) == 3
    assert steps_of(harness, "nobody") == ()
    assert steps_of(harness, first, second) == tuple(
        each._replace(own=own.own) for each, own in zip(steps_of(harness), one + two, strict=True)
    )


def test_of_a_request_whose_first_steps_are_forgotten_that_is_said():
    harness = timed()
    harness.engine.recent_steps = StepRing(most_steps=4)
    named = harness.submit("aaaa", max_tokens=8)
    harness.step()
    assert not told(harness.engine.recent_steps.snapshot(), requests=frozenset([named])).cut
    harness.run()
    recent = told(harness.engine.recent_steps.snapshot(), requests=frozenset([named]))
    assert recent.cut
    assert [each.own.positions for each in recent.steps] == [1] * 4


@pytest.mark.parametrize(("most_steps", "most_rows", "left"), [(5, 1000, 5), (1000, 9, 3), (1000, 1, 1)])
def test_steps_are_bounded_by_their_number_and_by_their_rows(most_steps, most_rows, left):
    harness = timed()
    harness.engine.recent_steps = StepRing(most_steps, most_rows)
    for _ in range(3):
        harness.submit("a", max_tokens=20)
    for _ in range(15):
        harness.step()
    steps = steps_of(harness)
    assert len(steps) == left
    assert [each.step for each in steps] == list(range(15 - left, 15))


def test_no_more_than_the_latest_are_told_at_once_but_all_of_a_request(monkeypatch):
    monkeypatch.setattr(recent_steps, "MOST_TOLD", 4)
    harness = timed()
    named = harness.submit("aaaa", max_tokens=9)
    harness.run()
    assert [each.step for each in steps_of(harness)] == [5, 6, 7, 8]
    assert [each.step for each in steps_of(harness, after=6)] == [7, 8]
    assert [each.step for each in steps_of(harness, named)] == list(range(9))


def test_a_step_that_failed_is_not_told_and_what_came_of_it_is():
    harness = timed(fails_at=2)
    named = harness.submit("a" * 6, max_tokens=4)
    harness.run()
    assert harness.engine.measurements().failed_steps == 1
    steps = steps_of(harness, named)
    assert [each.step for each in steps] == [0, 1, 3, 4]
    assert [each.own.positions for each in steps] == [6, 1, 4, 1]  # four of eight are in the prefix cache


# ---- tenants


def of_tenant(harness: Harness, tenant: str, share: float = 1.0, *, prompt: str = "aaaa", **rules) -> str:
    name = f"request-{next(harness.ids)}"
    one = request_of(name, harness.text, prompt, **rules)
    return harness.submit_request(replace(one, tenant=tenant, share=share))


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_tenants_have_slots_queue_and_tokens(policy):
    harness = timed(max_num_seqs=2, policy=policy)
    for _ in range(2):
        of_tenant(harness, "a", 2.0, max_tokens=4)
    for _ in range(3):
        of_tenant(harness, "b", prompt="bbbbbb", max_tokens=2)
    harness.step()
    one, two = harness.engine.tenant_shares()
    assert (one.tenant, one.share, two.tenant, two.share) == ("a", 2.0, "b", 1.0)
    assert one.running + two.running == 2
    assert one.waiting + two.waiting == 3
    assert two.waiting_tokens == 6 * two.waiting
    harness.run()
    assert [each[2:] for each in harness.engine.tenant_shares()] == [
        (0, 0, 0, 2 * (4 + 4)),
        (0, 0, 0, 3 * (6 + 2) - 2 * 4),  # the first block of the second and third is cached
    ]


def test_the_tenants_with_the_fewest_tokens_are_forgotten_first():
    book = TenantBook(most=2)
    sequence = request_sequence()
    for tenant, tokens in (("a", 5), ("b", 3), ("c", 1), ("b", 9)):
        book.ended(replace(sequence, tenant=tenant), tokens)
    assert [(each.tenant, each.tokens) for each in book.shares({}, [])] == [("a", 5), ("b", 9)]
    live = [(replace(sequence, tenant="z"), 7), (replace(sequence, tenant="a"), 1)]
    assert [(each.tenant, each.tokens) for each in book.shares({}, live)] == [("a", 6), ("b", 9), ("z", 7)]


def request_sequence():
    harness = build()
    return harness.intake.resolve(request_of("one", harness.text, "a")).sequences[0]


# ---- asked from outside the engine's thread


async def test_a_client_is_told_by_the_engines_thread_and_reads_in_another():
    harness = timed()
    loop = EngineLoop(harness.engine, harness.clock, QueueLimits(100))
    loop.start()
    client = LocalClient(harness.intake, loop)
    try:
        one = request_of("one", harness.text, "aaaaaaaa", max_tokens=3)
        outputs = [output async for output in client.generate(replace(one, tenant="t"))]
        assert outputs
        recent = await client.recent_steps()
        assert [each.chunk for each in recent.steps] == [8, 0, 0]
        own = await client.recent_steps(requests=frozenset(["one"]))
        assert [each.own.positions for each in own.steps] == [8, 1, 1]
        assert (await client.recent_steps(after=1)).steps == recent.steps[2:]
        tree = await client.cached_prefixes()
        assert (tree.blocks, [node.blocks for node in tree.nodes]) == (2, [2])
        assert [(each.tenant, each.tokens) for each in await client.tenant_shares()] == [("t", 8 + 3)]
    finally:
        client.close()
    for look in (client.recent_steps(), client.cached_prefixes(), client.tenant_shares()):
        with pytest.raises(EngineDead):
            await look
