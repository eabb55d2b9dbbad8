"""Which sequences are blamed for steps that fail, and which are not."""

from __future__ import annotations

from core_harness import VOCAB, Harness, request

from penstock.contract.events import FinishReason
from penstock.contract.scheduler_config import SchedulerConfig

CONFIG = SchedulerConfig(num_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)


def started(count=3):
    """A harness with `count` sequences, each of which has drawn a token."""
    harness = Harness(CONFIG)
    for number in range(count):
        prompt = tuple((number + at) % VOCAB for at in range(6))
        harness.submit(request(f"s{number}", prompt, max_tokens=12))
    harness.step()
    return harness


def test_nobody_is_suspected_when_what_computes_is_killed_once():
    harness = started()
    harness.plan()
    harness.kill()
    assert not harness.finds_out
    harness.drain()
    assert {end.reason for end in harness.finished.values()} == {FinishReason.LENGTH}


def test_those_who_got_on_in_between_are_not_suspected_after_ten_kills():
    harness = started()
    for _ in range(10):
        harness.plan()
        harness.kill()
        assert not harness.finds_out
        harness.step()
    harness.drain()
    assert {end.reason for end in harness.finished.values()} == {FinishReason.LENGTH}


def test_those_who_were_there_three_times_are_computed_alone_and_acquitted():
    harness = started()
    for _ in range(3):
        harness.plan()
        harness.kill()
    assert harness.finds_out
    plan = harness.plan()
    assert len(plan.rows) == 1
    harness.commit()
    harness.drain()
    assert {end.reason for end in harness.finished.values()} == {FinishReason.LENGTH}


def test_a_sequence_whose_every_step_is_killed_ends_after_six():
    harness = started()
    harness.allowed_ends["s1"] = FinishReason.ERROR
    harness.poisoned.add("s1")
    kills = 0
    while "s1" not in harness.finished:
        plan = harness.plan()
        slots = {seq.slot for seq in harness.scheduler._running if seq.id == "s1"}
        if slots & {row.slot for row in plan.rows}:
            harness.kill()
            kills += 1
        else:
            harness.commit()
    assert kills == 6
    harness.drain()
    assert {harness.finished[each].reason for each in ("s0", "s2")} == {FinishReason.LENGTH}
    assert harness.finished["s1"].poisoned
