"""A planted delay of each kind that the engine knows appears in its own part, and the parts sum to the wall time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from latency_harness import BETWEEN, ROUNDING, parts_of, run, timed

from penstock.contract.grammar import Grammar, GrammarKind
from penstock.contract.measurements import NEXT_STEP, PARTS
from penstock.contract.plan import StallReason


def largest(parts) -> str:
    return max((name for name in PARTS if name != "engine"), key=lambda name: getattr(parts, name))


def test_alone_it_has_a_prompt_and_a_decode_and_the_engine_between_steps():
    harness = timed()
    one = harness.submit("hello", max_tokens=4)
    run(harness)
    parts = parts_of(harness, one)
    assert parts.queue_for == ((NEXT_STEP, pytest.approx(BETWEEN)),)
    assert parts.prompt == pytest.approx(0.001 + 5 * 0.0001 + 5e-6)
    assert parts.engine == pytest.approx(3 * BETWEEN)
    assert parts.decode > 3 * 0.001
    assert parts.behind == ()
    others = set(PARTS) - {"queue", "prompt", "engine", "decode"}
    assert [getattr(parts, name) for name in others] == [0.0] * len(others)


def test_a_request_waits_for_a_slot_behind_the_one_that_has_it():
    harness = timed(max_num_seqs=1)
    first = harness.submit("hello", max_tokens=40)
    second = harness.submit("there", max_tokens=2)
    third = harness.submit("again", max_tokens=2)
    run(harness)
    parts, last = parts_of(harness, second), parts_of(harness, third)
    assert largest(parts) == "queue"
    assert dict(parts.queue_for)[StallReason.NO_SLOT] > 39 * (0.001 + BETWEEN)
    assert parts.behind == (f"{first}/0",)
    assert last.behind == (f"{second}/0", f"{first}/0")
    assert last.queue > parts.queue
    assert largest(parts_of(harness, first)) == "decode"


def test_a_request_waits_for_blocks():
    harness = timed(num_blocks=11)
    first = harness.submit("a" * 24, max_tokens=20)
    harness.step()
    second = harness.submit("b" * 20, max_tokens=2)
    run(harness)
    reasons = dict(parts_of(harness, second).queue_for)
    assert max(reasons, key=reasons.__getitem__) == StallReason.NO_BLOCKS
    assert parts_of(harness, second).behind == (f"{first}/0",)


def test_a_long_neighbour_is_others_prompts_and_costs_as_much_as_its_chunks():
    alone, together = timed(max_model_len=256, num_blocks=128), timed(max_model_len=256, num_blocks=128)
    for harness in (alone, together):
        harness.submit("hello", max_tokens=12)
        harness.step()
    neighbour = together.submit("n" * 150, max_tokens=1)
    run(alone)
    run(together)
    without, beside = parts_of(alone, "request-0"), parts_of(together, "request-0")
    assert without.other_prompts == 0.0
    assert largest(beside) == "other_prompts"
    more = beside.total - without.total
    assert beside.other_prompts == pytest.approx(more, rel=0.25)
    assert beside.decode == pytest.approx(without.decode, rel=0.25)
    of_neighbour = parts_of(together, neighbour)
    assert of_neighbour.prompt == pytest.approx(beside.other_prompts, abs=ROUNDING)
    assert 0.0 < of_neighbour.other_decodes < of_neighbour.prompt


def test_a_mask_that_is_late_is_grammar():
    harness = timed()
    resolved = harness.intake.resolve(replace(request(harness, "guided"), id="guided"))
    sequence = replace(resolved.sequences[0], grammar=Grammar(GrammarKind.REGEX, "a+"))
    harness.runner.let_wait(sequence.id, 6)
    harness.outputs["guided"] = []
    harness.engine.submit(replace(resolved, sequences=(sequence,)))
    run(harness)
    parts = parts_of(harness, "guided")
    assert parts.grammar == pytest.approx(5 * 0.0011, rel=0.05)  # the first to wait was the prompt's own chunk
    assert parts.decode == pytest.approx(4 * 0.0011, rel=0.05)


def request(harness, request_id: str):
    from engine_harness import request_of

    return request_of(request_id, harness.text, "hello", max_tokens=4)


def test_lost_blocks_are_preempted_until_all_is_computed_again():
    harness = timed(num_blocks=12, prefix_caching=False)
    elder = harness.submit("a" * 8, max_tokens=40)
    younger = harness.submit("b" * 8, max_tokens=20)
    run(harness)
    assert harness.engine.scheduler.stats.preemptions
    parts = parts_of(harness, younger)
    assert parts_of(harness, elder).preempted == 0.0
    assert largest(parts) == "preempted"
    undisturbed = parts_of(harness, elder)
    assert parts.decode + parts.engine < 20 / 39 * (undisturbed.decode + undisturbed.engine)


def test_a_failed_step_is_recovery_for_all_who_were_in_it():
    harness = timed()
    both = [harness.submit(text, max_tokens=8) for text in ("hello", "there")]
    harness.runner.crash_at(3)
    run(harness)
    assert harness.runner.crashes == 1
    for one in both:
        parts = parts_of(harness, one)
        assert parts.recovery > 0.0
        assert parts.preempted == 0.0


def test_choices_are_explained_by_the_one_that_ended_last():
    harness = timed(max_num_seqs=1)
    one = harness.submit("hello", n=3, max_tokens=6)
    run(harness)
    parts = parts_of(harness, one)
    assert dict(parts.queue_for)[StallReason.NO_SLOT] > 10 * 0.001
    assert parts.behind == (f"{one}/1", f"{one}/0")


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_aborted_request_is_explained_up_to_its_end(steps):
    harness = timed(max_num_seqs=1)
    first = harness.submit("hello", max_tokens=20)
    second = harness.submit("there", max_tokens=20)
    for _ in range(steps):
        harness.clock.advance(BETWEEN)
        harness.step()
    harness.clock.advance(0.5)
    for one in (first, second):
        harness.collect(harness.engine.abort(one))
    assert parts_of(harness, second).queue == pytest.approx(parts_of(harness, second).total)
    assert parts_of(harness, first).engine >= (0.5 if steps else 0.0)
    assert harness.clock.now() == pytest.approx(parts_of(harness, first).total)
