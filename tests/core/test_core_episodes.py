"""Random lives of an engine: whatever is submitted, aborted, failed and reset, every law holds after every call.

`PENSTOCK_EPISODES` says how many (500 by default; 10,000 in deep runs).
"""

from __future__ import annotations

import os
import random

from core_harness import Harness, random_config, random_request, run_episode
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.contract.errors import RequestError

EPISODES = int(os.environ.get("PENSTOCK_EPISODES", "500"))
seeds = st.integers(0, 2**32)


def test_random_episodes_hold_every_law():
    preemptions = hits = shared = 0
    for seed in range(EPISODES):
        try:
            harness = run_episode(seed)
        except Exception as error:
            error.add_note(f"run_episode({seed})")
            raise
        preemptions += harness.scheduler.stats.preemptions
        hits += harness.scheduler.stats.hit_tokens
        shared += sum(stall.reason == "shared_prefix" for plan in harness.plans for stall in plan.stalls)
    assert min(preemptions, hits, shared) > 0, "the episodes reach preemption, cache hits and shared prefixes"


class SchedulerMachine(RuleBasedStateMachine):
    """The same moves, chosen by Hypothesis, which seeks the shortest life that breaks a law."""

    @initialize(seed=seeds)
    def start(self, seed):
        self.harness = Harness(random_config(random.Random(seed)))
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

    @rule()
    def reset(self):
        self.harness.reset()

    @precondition(lambda self: self.harness.flight is None)
    @rule()
    def plan(self):
        self.harness.plan()

    @precondition(lambda self: self.harness.flight is not None)
    @rule()
    def commit(self):
        self.harness.commit()

    @precondition(lambda self: self.harness.flight is None)
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
