"""Random lives of an engine: whatever is submitted, aborted, failed and reset, every law holds after every call.

`PENSTOCK_EPISODES` says how many (100 by default; 10,000 in deep runs).
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
from core_harness import (
    WINDOWS,
    Harness,
    random_checkpoints,
    random_config,
    random_drafter,
    random_request,
    run_episode,
    run_workload,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.contract.errors import RequestError
from penstock.contract.events import Admitted, FinishReason, SeqEvent
from penstock.core.draft_chances import MODEL

EPISODES = int(os.environ.get("PENSTOCK_EPISODES", "100"))
seeds = st.integers(0, 2**32)


def test_random_episodes_hold_every_law():
    preemptions = hits = shared = drafted = ahead = left = drops = resumed = kept = restored = forgotten = 0
    failed = poisoned = tried = killed = cut = taken = saved = read = short = saved_states = read_states = guessed = 0
    told = removed = cleared = 0
    for seed in range(EPISODES):
        try:
            harness = run_episode(seed)
        except Exception as error:
            error.add_note(f"run_episode({seed})")
            raise
        preemptions += harness.scheduler.stats.preemptions
        hits += harness.scheduler.stats.hit_tokens
        shared += sum(stall.reason == "shared_prefix" for plan in harness.plans for stall in plan.stalls)
        drafted += sum(bool(row.drafts) for plan in harness.plans for row in plan.rows)
        guessed += sum(judged.right for judged in harness.judged if judged.drafter == MODEL)
        ahead += harness.ahead
        left += harness.left
        drops += harness.drops
        failed += harness.failed_steps
        killed += harness.kills
        cut += harness.cut
        taken += harness.taken
        saved += harness.saved
        read += harness.scheduler.stats.restored_tokens
        short += harness.short
        told += harness.mirror.stored
        removed += harness.mirror.removed
        cleared += harness.mirror.cleared
        saved_states += harness.saved_states
        read_states += harness.restored_states
        poisoned += sum(harness.finished[each].reason is FinishReason.ERROR for each in harness.poisoned)
        tried += sum(stall.reason == "suspects" for plan in harness.plans for stall in plan.stalls)
        resumed += harness.resumed
        states = harness.scheduler._pool._checkpoints
        if states is not None:
            kept += harness.kept
            restored += states.restored
            forgotten += harness.kept > len(states) == states.num_slots
    assert min(preemptions, hits, shared, left, resumed) > 0, (
        "the episodes reach preemption, hits, shared prefixes, blocks left behind and hits whose beginning is gone"
    )
    assert min(drafted, ahead) > 0, "they reach drafts, and rows planned while the one before is in flight"
    assert guessed > 0, "what a draft model guesses is right now and then"
    assert drops > 0, "they reach steps that are broken off"
    assert min(failed, poisoned, tried) > 0, "they reach steps that fail, who is to blame, and those who wait for that"
    assert killed > 0, "they lose all keys and values"
    assert taken > 0, "tenants take slots from each other"
    assert cut > 0, "they read prompts in parts that a step's time allows"
    assert min(saved, read, short) > 0, "they save blocks, read some, and find that others are gone"
    assert min(saved_states, read_states) > 0, "they save states, and read some"
    assert min(told, removed, cleared) > 0, "blocks enter the cache and leave it, one by one and all at once"
    assert min(kept, restored, forgotten) > 0, "they keep states, restore some and forget others"


def test_who_left_while_its_row_failed_is_not_mistaken_for_who_is_there():
    """An aborted sequence's row fails a step in which the only other row is a suspect's."""
    run_episode(15035)


WORKLOADS = max(20, EPISODES // 10)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("depth", "right"), [(1, 0.0), (1, 0.5), (1, 1.0), (2, None), (2, 0.0), (2, 0.5), (2, 1.0)])
def test_drafts_and_plans_ahead_change_no_event(depth, right):
    for seed in range(WORKLOADS):
        window = WINDOWS[seed % len(WINDOWS)]
        plain, other = run_workload(seed, window=window), run_workload(seed, depth, right, window)
        assert said_of(other) == said_of(plain), f"run_workload({seed}, {depth}, {right})"


@pytest.mark.parametrize(("depth", "right"), [(1, None), (1, 0.5), (2, None)])
def test_a_draft_model_changes_no_event(depth, right):
    for seed in range(WORKLOADS):
        plain, other = run_workload(seed), run_workload(seed, depth, right, draft_context=(64, 9)[seed % 2])
        assert said_of(other) == said_of(plain), f"run_workload({seed}, {depth}, {right}, draft_context)"


@pytest.mark.parametrize("checkpoints", [1, 3, 20])
def test_checkpoints_change_no_event(checkpoints):
    """Compared with the same model without checkpoints, where every sequence computes all of its positions."""
    for seed in range(WORKLOADS):
        depth, window = 1 + seed % 2, WINDOWS[seed % len(WINDOWS)]
        plain, other = (run_workload(seed, depth, window=window, checkpoints=count) for count in (0, checkpoints))
        assert said_of(other) == said_of(plain), f"run_workload({seed}, {depth}, checkpoints={checkpoints})"


@pytest.mark.parametrize(("depth", "right", "spares"), [(1, 0.5, 20), (2, 0.8, 3), (3, 0.3, 1)])
def test_drafts_of_a_model_that_carries_state_change_no_event(depth, right, spares):
    for seed in range(WORKLOADS):
        window = WINDOWS[seed % len(WINDOWS)]
        plain = run_workload(seed, window=window, checkpoints=0)
        other = run_workload(seed, depth, right, window, checkpoints=8, spare_states=spares)
        assert said_of(other) == said_of(plain), f"run_workload({seed}, {depth}, {right}, spare_states={spares})"


def said_of(harness: Harness) -> dict[str, list[SeqEvent]]:
    """Every event of every sequence, less how much was cached at its admission: that depends on which came first."""
    return {
        name: [each for each in events if not isinstance(each, Admitted)] for name, events in harness.events.items()
    }


class SchedulerMachine(RuleBasedStateMachine):
    """The same moves, chosen by Hypothesis, which seeks the shortest life that breaks a law."""

    @initialize(seed=seeds)
    def start(self, seed):
        rng = random.Random(seed)
        cfg = random_config(rng)
        options = random_checkpoints(seed, cfg.block_size)
        self.harness = Harness(
            replace(cfg, depth=rng.choice([1, 2]), window=rng.choice(WINDOWS), step_target_ms=seed % 4, **options),
            random_drafter(rng),
        )
        self.harness.stopwatch = rng
        self.number = 0

    @rule(seed=seeds)
    def submit(self, seed):
        self.number += 1
        req = random_request(random.Random(seed), self.number, self.harness.config.policy)
        try:
            self.harness.submit(req)
        except RequestError:
            assert req.id not in self.harness.requests

    @rule(seed=seeds, count=st.integers(2, 4))
    def submit_choices(self, seed, count):
        for _ in range(count):
            self.submit(seed)

    @precondition(lambda self: self.harness.live)
    @rule(data=st.data())
    def abort(self, data):
        self.harness.abort(data.draw(st.sampled_from(self.harness.live)))

    @precondition(lambda self: self.harness.live)
    @rule(data=st.data())
    def fail(self, data):
        self.harness.fail(data.draw(st.sampled_from(self.harness.live)))

    @precondition(lambda self: self.harness.live)
    @rule(data=st.data(), draws=st.integers(1, 3))
    def let_wait(self, data, draws):
        self.harness.let_wait(data.draw(st.sampled_from(self.harness.live)), draws)

    @rule()
    def reset(self):
        self.harness.reset()

    @precondition(lambda self: len(self.harness.flights) < self.harness.config.depth)
    @rule()
    def plan(self):
        self.harness.plan()

    @precondition(lambda self: self.harness.flights)
    @rule()
    def commit(self):
        self.harness.commit()

    @precondition(lambda self: self.harness.flights)
    @rule()
    def drop(self):
        self.harness.drop()

    @precondition(lambda self: self.harness.flights and not self.harness.finds_out)
    @rule()
    def fail_step(self):
        self.harness.fail_step()

    @precondition(lambda self: self.harness.flights and not self.harness.finds_out)
    @rule()
    def kill(self):
        self.harness.kill()

    @precondition(lambda self: self.harness.live)
    @rule(data=st.data())
    def poison(self, data):
        self.harness.poison(data.draw(st.sampled_from(self.harness.live)))

    @rule(count=st.integers(1, 8))
    def steps(self, count):
        for _ in range(count):
            self.harness.step()

    @invariant()
    def lawful(self):
        self.harness.check()

    def teardown(self):
        if hasattr(self, "harness"):
            self.harness.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=EPISODES,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
