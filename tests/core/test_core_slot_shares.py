"""The policy `fair`: a tenant with too few slots takes one back, and two that flood leave each other alone."""

from __future__ import annotations

from collections import Counter

import pytest
from core_harness import Harness, config, request

from penstock.contract.plan import StallReason
from penstock.contract.stats import SchedulerStats
from penstock.core.chunk_limit import LEAST, decodes
from penstock.core.slot_claims import IN_A_ROW


def fair(**options) -> Harness:
    sizes = {"num_blocks": 200, "max_num_seqs": 8, "max_num_batched_tokens": 32}
    return Harness(config(policy="fair", **{**sizes, **options}))


def send(harness: Harness, tenant: str, count: int, *, prompt: int = 6, tokens: int = 30, share: float = 1.0) -> None:
    for _ in range(count):
        number = len(harness.requests)
        own = [(number * 7 + place * place) % 11 for place in range(prompt)]
        own[:2] = number % 11, number // 11 % 11  # no two begin alike
        harness.submit(request(f"{tenant}-{number}", own, tokens, tenant=tenant, share=share, arrival=float(number)))


def stats(harness: Harness) -> SchedulerStats:
    return harness.scheduler.stats


def slots(harness: Harness) -> Counter[str]:
    return Counter(seq.request.tenant for seq in harness.scheduler._running)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_newcomer_takes_a_slot_of_one_that_has_all(depth):
    harness = fair(depth=depth)
    send(harness, "flood", 20)
    for _ in range(6):
        harness.step()
    send(harness, "calm", 1)
    plans = len(harness.plans)
    while not any(admit.seq_id.startswith("calm") for plan in harness.plans[plans:] for admit in plan.admits):
        harness.step()
        assert len(harness.plans) <= plans + depth, "who is in flight is stopped as soon as it is not"
    assert slots(harness) == {"flood": 7, "calm": 1}
    assert stats(harness).preemptions == harness.taken == 1
    harness.drain()


@pytest.mark.parametrize("target", [0, 100])
@pytest.mark.parametrize(("prompt", "steps"), [(6, 6), (50, 1), (50, 4)], ids=["decodes", "reads", "does both"])
def test_a_newcomer_is_in_the_next_plan_that_is_made_with_its_whole_prompt(prompt, steps, target):
    harness = fair(max_num_batched_tokens=64, step_target_ms=target)
    send(harness, "flood", 20, prompt=prompt)
    for _ in range(steps):
        harness.step()
    harness.plan()
    send(harness, "calm", 1, prompt=40)  # while a plan is in flight
    harness.commit()
    assert read_of_the_newcomer(harness) == (40, True)
    harness.commit()
    harness.drain()


@pytest.mark.parametrize("prompt", [6, 50], ids=["decodes", "does both"])
def test_a_newcomer_beside_a_queue_has_a_step_for_itself_and_then_a_chunk_of_each(prompt):
    harness = flooded(prompt, target=1)  # what the step itself takes
    send(harness, "calm", 1, prompt=40)
    assert read_of_the_newcomer(harness) == (LEAST, False)
    plan = harness.plans[-1]
    assert len(plan.rows) == 1
    assert plan.stalls[0].reason is StallReason.NEWCOMER
    harness.commit()
    for last in (False, True):
        assert read_of_the_newcomer(harness) == (40 - 2 * LEAST if last else LEAST, last)
        assert len(harness.plans[-1].rows) > 1, "those who decode have rows again"
        harness.commit()
    harness.drain()


def test_newcomers_that_come_with_every_step_keep_who_floods_waiting_for_a_few_in_a_row():
    harness = flooded(target=1)
    for number in range(2 * IN_A_ROW + 1):
        send(harness, f"calm{number}", 1, prompt=8, tokens=3)
        harness.step()
    plans = harness.plans[-2 * IN_A_ROW - 1 :]
    flood = {seq.slot for seq in harness.scheduler._running if seq.request.tenant == "flood"}
    left_out = [not flood.intersection(row.slot for row in plan.rows) for plan in plans]
    assert left_out == [True] * IN_A_ROW + [False] + [True] * IN_A_ROW
    assert [stall.reason for plan in plans for stall in plan.stalls] == [StallReason.NEWCOMER] * len(plans)
    harness.drain()


def test_others_that_do_not_crowd_go_on_in_a_newcomers_step():
    harness = flooded(target=1)
    send(harness, "calm", 1, prompt=8)
    harness.step()
    send(harness, "quiet", 1, prompt=8)
    harness.step()
    tenants = {seq.slot: seq.request.tenant for seq in harness.scheduler._running}
    assert {tenants[row.slot] for row in harness.plans[-1].rows} == {"calm", "quiet"}
    harness.drain()


def test_who_asks_again_at_once_is_a_newcomer_again_while_it_is_level():
    harness = flooded(target=1)
    for _ in range(2):
        send(harness, "calm", 1, prompt=8, tokens=2)
        harness.step()
        assert [admit.seq_id.split("-")[0] for admit in harness.plans[-1].admits] == ["calm"]
        while slots(harness)["calm"]:
            harness.step()
    harness.drain()


@pytest.mark.parametrize("target", [1, 1000], ids=["decoding is slow", "decoding is quick"])
def test_where_nobody_else_waits_a_newcomer_is_read_beside_decoding_if_that_is_quick(target):
    harness = flooded(6, requests=7, target=target)
    send(harness, "calm", 1, prompt=8)
    assert read_of_the_newcomer(harness) == (8, True)
    assert len(harness.plans[-1].rows) == (1 if target == 1 else 8)
    harness.commit()
    harness.drain()


def flooded(prompt: int = 6, *, requests: int = 20, target: int) -> Harness:
    """One tenant decodes in all slots, or in all but one."""
    harness = fair(max_num_batched_tokens=64, step_target_ms=target)
    send(harness, "flood", requests, prompt=prompt)
    for _ in range(6):
        harness.step()
    assert any(decodes(seq) for seq in harness.scheduler._running), "somebody waits for the step's end"
    return harness


def read_of_the_newcomer(harness: Harness) -> tuple[int, bool]:
    """How many of the newcomer's positions the next plan computes, and whether it draws; the plan is then in flight."""
    plan = harness.plan()
    slot = next(seq.slot for seq in harness.scheduler._running if seq.request.tenant == "calm")
    return next((row.count, row.sample) for row in plan.rows if row.slot == slot)


@pytest.mark.parametrize(("share", "settled"), [(1.0, {"one": 4, "other": 4}), (3.0, {"one": 2, "other": 6})])
def test_two_that_flood_settle_at_their_shares_and_then_preempt_nobody(share, settled):
    harness = fair()
    for _ in range(300):
        for tenant, own in (("one", 1.0), ("other", share if len(harness.plans) > 10 else 0)):
            missing = 10 - sum(each.startswith(tenant + "-") for each in harness.live)
            if own:
                send(harness, tenant, missing, share=own)
        harness.step()
        if len(harness.plans) == 60:
            before = stats(harness).preemptions
    assert before == settled["other"], "one for each slot that passed on"
    assert stats(harness).preemptions == before
    assert slots(harness) == settled
    harness.drain()


def test_who_was_given_more_tokens_takes_nothing():
    harness = fair()
    send(harness, "calm", 1, prompt=40, tokens=1)
    send(harness, "flood", 20)
    harness.step()
    harness.step()
    harness.scheduler._waiting._counters["calm"] = 1e6
    send(harness, "calm", 1)
    for _ in range(5):
        harness.step()
    assert harness.taken == 0
    harness.drain()


def test_blocks_are_taken_too_and_only_where_they_are_enough():
    harness = fair(num_blocks=24, max_num_seqs=8)
    send(harness, "flood", 6, prompt=12, tokens=20)
    for _ in range(4):
        harness.step()
    send(harness, "calm", 1, prompt=12, tokens=4)
    plan = harness.plan()
    assert [admit.seq_id for admit in plan.admits] == ["calm-6"]
    assert harness.taken >= 1
    harness.commit()
    harness.drain()


def test_without_a_prefix_cache_nobody_is_stopped_as_it_would_begin_anew():
    harness = fair(prefix_caching=False)
    send(harness, "flood", 20)
    harness.step()
    send(harness, "calm", 1)
    harness.step()
    harness.step()
    assert stats(harness).preemptions == 0
    harness.drain()


def test_a_newcomer_that_would_take_a_slot_waits_for_nobodys_end():
    harness = fair()
    send(harness, "flood", 20)
    harness.step()
    harness.step()
    asked = request("new", (1, 2, 3), 4, tenant="calm")
    assert harness.scheduler.backlog(asked).ends == 0
    assert harness.scheduler.backlog(request("more", (1, 2, 3), 4, tenant="flood")).ends > 0
    harness.drain()
