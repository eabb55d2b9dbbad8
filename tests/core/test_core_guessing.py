"""How much the core has a draft model guess, by its cost and how often it is right: whole runs in simulated time.

Sequences here are known beforehand, a formula says how long a step takes, and a guess is right with a planted chance.
The measure is the best fixed length of guesses, which one would choose knowing the chance and all costs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
from core_harness import config, request

from penstock.contract.errors import ConfigError, EngineFault
from penstock.contract.events import Finished
from penstock.contract.plan import Draft, GuessWork, RowResult, SampledToken, StepPlan, StepResult
from penstock.core.draft_chances import MODEL, DraftChances, judge
from penstock.core.scheduler import Scheduler


@dataclass(frozen=True)
class Costs:
    """Seconds: of a step, of a row in it, of a drafted position, and of a pass and a position of the draft model."""

    step: float = 0.020
    row: float = 0.0002
    draft: float = 0.0005
    each_pass: float = 0.0015
    each: float = 0.00005

    def best(self, right: float, rows: int) -> float:
        """The speedup in tokens a second of the best fixed length of guesses, which may be none."""
        plain = self.step + self.row * rows
        times = [1.0]
        for length in range(1, 9):
            brought = sum(right**power for power in range(length + 1))
            taken = plain + length * (self.each_pass + rows * (self.draft + self.each))
            times.append(brought * plain / taken)
        return max(times)


class Simulated:
    """A runner in simulated time."""

    def __init__(self, costs: Costs, right: float, seed: int = 0) -> None:
        self.costs, self.right, self.luck = costs, right, random.Random(seed)
        self.known: dict[int, int] = {}
        self.followed: dict[int, int] = {}
        self.guesses: dict[int, tuple[int, ...]] = {}
        self.seconds = self.guessing = 0.0
        self.drawn = 0  # tokens

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.drawn / self.seconds

    def run(self, plan: StepPlan) -> StepResult:
        for admit in plan.admits:
            self.known[admit.slot], self.followed[admit.slot] = len(admit.tokens), admit.computed
        work = [0, 0]
        rows = [self._row(row, work) for row in plan.rows if row.sample]
        drafts = sum(len(row.drafts) for row in plan.rows)
        costs, chunk = self.costs, sum(row.count for row in plan.rows if row.count > 1 + len(row.drafts))
        guessing = work[0] * costs.each_pass + work[1] * costs.each
        seconds = costs.step + costs.row * len(plan.rows) + costs.draft * (drafts + chunk) + guessing
        self.drawn += sum(len(row.tokens) for row in rows)
        self.seconds, self.guessing = self.seconds + seconds, self.guessing + guessing
        return StepResult(plan.step, tuple(rows), seconds, guessing=GuessWork(guessing, *work))

    def _row(self, row, work) -> RowResult:
        slot, tokens = row.slot, []
        for draft in (*row.drafts, None):
            tokens.append(SampledToken(self.known[slot] % 7))
            self.known[slot] += 1
            if tokens[-1].id != draft:
                break
        known, guess = self.known[slot], ()
        right = judge(self.guesses.pop(slot, ()), [token.id for token in tokens])[0]
        self.followed[slot] = min(self.followed[slot] + right, known - 1)
        if row.follow:
            lag = known - self.followed[slot]
            took = min(lag, row.follow)
            work[0], work[1] = max(work[0], 1, row.guesses), work[1] + took + max(0, row.guesses - 1)
            self.followed[slot] += took
            if took == lag and row.guesses:
                places = range(known, known + row.guesses)
                guess = tuple(at % 7 + 7 * (self.luck.random() >= self.right) for at in places)
        self.guesses[slot] = guess
        return RowResult(slot, tuple(tokens), guess=guess, lag=known - self.followed[slot])


def serve(costs: Costs, right: float, rows: int = 1, tokens: int = 600, prompt: int = 8, **options) -> Simulated:
    """Run `rows` sequences until one has ended, after as many that are not measured: a new engine has to learn."""
    sizes = {"max_model_len": 4096, "max_num_seqs": 32, "max_num_batched_tokens": 512, "weigh_drafts": True}
    cfg = replace(config(4000, prefix_caching=False), **sizes | {"draft_context": 4096} | options)
    scheduler, runner = Scheduler(cfg), Simulated(costs, right)
    for round_ in range(2):
        for number in range(rows):
            scheduler.submit(request(f"s{number}", [number % 11] * prompt, max_tokens=tokens if round_ else 200))
        runner.seconds, runner.guessing, runner.drawn = 0.0, 0.0, 0
        ended = False
        while not ended if round_ else scheduler.has_work:
            plan = scheduler.plan()
            events = scheduler.commit(plan, runner.run(plan))
            ended = any(isinstance(event, Finished) for event in events)
            if plan.step % 64 == 0:  # a check takes longer than a step
                scheduler.check()
    return runner


COSTS = [Costs(), Costs(each_pass=0.006), Costs(each=0.0002), Costs(step=0.005, draft=0.002), Costs(each_pass=0.0001)]


CHANCES = [0.0, 0.3, 0.6, 0.8, 0.95]


@pytest.mark.parametrize(
    ("costs", "right", "rows"),
    [
        pytest.param(costs, right, rows, marks=() if (number + chance + place) % 10 == 0 else pytest.mark.deep)
        for number, costs in enumerate(COSTS)
        for chance, right in enumerate(CHANCES)
        for place, rows in enumerate((1, 4, 16))
    ],
)
def test_it_comes_within_a_tenth_of_the_best_fixed_length_and_never_costs_more_than_a_fiftieth(costs, right, rows):
    plain = serve(costs, right, rows, draft_context=0)
    guessed = serve(costs, right, rows)
    times, best = guessed.rate / plain.rate, costs.best(right, rows)
    assert times >= max(0.9 * best, 0.98)


def test_where_guesses_are_never_right_a_hundredth_of_the_time_finds_that_out():
    guessed = serve(Costs(), 0.0, tokens=2000)
    assert 0 < guessed.guessing < 0.02 * guessed.seconds


def test_guesses_that_become_right_are_found_out():
    class Later(Simulated):
        def run(self, plan):
            self.right = 0.95 if plan.step > 1500 else 0.0
            return super().run(plan)

    cfg = config(4000, max_model_len=4096, weigh_drafts=True, draft_context=4096)
    scheduler, runner = Scheduler(cfg), Later(Costs(), 0.0)
    scheduler.submit(request("a", (1, 2, 3), max_tokens=4000))
    while scheduler.has_work:
        plan = scheduler.plan()
        scheduler.commit(plan, runner.run(plan))
    assert plan.step < 2800, "2,500 tokens in fewer than 1,300 steps"


def test_a_draft_model_is_tried_now_and_then_however_long_a_pass_of_it_takes():
    """A pass of 80 ms takes more time than is saved up for quick passes."""
    guessed = serve(Costs(step=0.5, each_pass=0.08), 0.0, tokens=600)
    assert 0 < guessed.guessing < 0.02 * guessed.seconds


def test_a_short_answer_to_a_long_prompt_is_not_worth_catching_up():
    """2,000 positions take as long as 20 steps: an answer of 10 tokens never pays for them, one of 600 does."""
    costs = Costs(each=0.0002)
    short = serve(costs, 0.9, tokens=10, prompt=2000)
    assert short.guessing < 0.04 * short.seconds
    plain, guessed = (serve(costs, 0.9, prompt=2000, draft_context=each) for each in (0, 4096))
    assert guessed.rate / plain.rate > 1.5


def test_catching_up_makes_no_step_much_longer_while_others_stream():
    costs = Costs()
    cfg = config(4000, max_model_len=4096, max_num_batched_tokens=600, weigh_drafts=True, draft_context=4096)
    scheduler, runner = Scheduler(cfg), Simulated(costs, 0.9)
    scheduler.submit(request("short", (1, 2, 3), max_tokens=400))
    longest, before = 0.0, 0.0
    for step in range(300):
        if step == 40:
            scheduler.submit(request("long", [5] * 500, max_tokens=400))
        plan = scheduler.plan()
        scheduler.commit(plan, runner.run(plan))
        follow = sum(row.follow for row in plan.rows)
        if step > 45 and follow > 30:
            longest = max(longest, runner.seconds - before)
        before = runner.seconds
    assert 0 < longest < 1.6 * (costs.step + 9 * costs.each_pass)


def offered(guess: tuple[int, ...]) -> tuple[Scheduler, int]:
    """A sequence that goes on 1, 2, 3, ... after its first token, with this guess; returns how many were wanted too."""
    scheduler = Scheduler(config(draft_context=64))
    scheduler.submit(request("a", (0, 0), max_tokens=30))
    scheduler.commit(scheduler.plan(), StepResult(0, (RowResult(0, (SampledToken(0),), lag=3),)))
    plan = scheduler.plan()
    (row,) = plan.rows
    assert row.follow == 4
    assert row.guesses > 0
    scheduler.commit(plan, StepResult(1, (RowResult(0, (SampledToken(1),), guess=guess[: row.guesses], lag=0),)))
    return scheduler, row.guesses


def test_of_two_guesses_the_one_that_brings_more_is_carried_and_both_are_judged():
    scheduler, _ = offered((2, 3, 4))
    repeated = Draft("a", (2, 9, 9, 9, 9, 9), "suffix", 4)
    plan = scheduler.plan((repeated,))
    assert plan.rows[0].drafts == (2, 3), "one was wanted of a model that is expected to be good"
    judged, *_ = scheduler.commit(plan, StepResult(2, (RowResult(0, tuple(map(SampledToken, (2, 5))), lag=2),)))
    assert (judged.drafter, judged.drafts, judged.right) == (MODEL, 2, 1)
    of = scheduler._drafting._chances._all
    assert of.of((MODEL, 1)) != DraftChances()._all.of((MODEL, 1))
    assert of.of(("suffix", 3)) != DraftChances()._all.of(("suffix", 3))


def test_what_repeats_surely_needs_no_draft_model():
    scheduler, _ = offered(())
    for _ in range(30):
        scheduler._drafting._chances._all.add(("suffix", 3), 1, 1)
    plan = scheduler.plan((Draft("a", (2, 3), "suffix", 4),))
    assert plan.rows[0].drafts == (2, 3)
    assert not plan.rows[0].follow


def test_an_offer_is_not_carried_behind_another_token():
    """The sequence was preempted or computed alone in between: what was guessed is forgotten."""
    scheduler, _ = offered((2, 3, 4))
    scheduler.drop_in_flight()
    plan = scheduler.plan()
    assert all(not row.drafts for row in plan.rows)


def test_more_guesses_than_were_wanted_are_our_bug():
    scheduler, _ = offered((2, 3, 4))
    plan = scheduler.plan()
    (row,) = plan.rows
    too_many = RowResult(0, tuple(map(SampledToken, (9,))), guess=(1,) * (row.guesses + 1), lag=0)
    with pytest.raises(EngineFault, match="were guessed behind a row"):
        scheduler.commit(plan, StepResult(2, (too_many,)))


def test_a_model_with_a_window_in_every_layer_cannot_be_guessed_for():
    with pytest.raises(ConfigError, match="draft_context"):
        config(draft_context=64, window=8)


FOLLOWING = config(400, draft_context=400, max_model_len=400, max_num_batched_tokens=64, weigh_drafts=True)


def test_where_guesses_do_not_pay_few_newcomers_are_followed():
    """The model's own predictor follows few of them, and soon all again once guesses pay."""
    scheduler, runner = Scheduler(FOLLOWING), Simulated(Costs(), right=0.0)

    def followed(count: int) -> list[bool]:
        seen = []
        for number in range(count):
            scheduler.submit(request(f"{runner.right}-{number}-{runner.drawn}", [5] * 12, max_tokens=120))
            while scheduler.has_work:
                plan = scheduler.plan()
                seen += [admit.followed for admit in plan.admits]
                scheduler.commit(plan, runner.run(plan))
        return seen

    assert followed(2)[0], "at first guesses are expected to pay"
    assert sum(followed(32)) == 32 // 8
    runner.right = 1.0
    assert all(followed(16)[-4:])
