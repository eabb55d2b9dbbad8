"""How many guessed tokens are computed: what they cost, how likely they are, and which rows wait meanwhile."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from core_harness import Harness, config, request

from penstock.contract.plan import Draft
from penstock.core.draft_chances import DraftChances, Judgements, judge
from penstock.core.draft_lengths import draft_lengths
from penstock.core.step_time import DraftPrice, StepTimes
from penstock.sim import golden


def rate(counts, offers, rows, seconds, price, once=0.0) -> float:
    brought = rows + sum(
        math.prod(offer[:n]) for offer, count in zip(offers, counts, strict=True) for n in range(1, count + 1)
    )
    return brought / (seconds + price * sum(counts) + (once if any(counts) else 0.0))


@pytest.mark.parametrize("most", [0.0, 0.02], ids=["by position", "and for having any"])
def test_no_other_choice_brings_more_tokens_a_second(most):
    rng = random.Random(5)
    for _ in range(300):
        offers = [[rng.uniform(0.05, 0.98) for _ in range(rng.randint(1, 3))] for _ in range(3)]
        seconds, price, once = rng.uniform(0.001, 0.1), rng.uniform(0.0001, 0.05), rng.uniform(0.0, most)
        chosen = draft_lengths(offers, 3, seconds, price, 100, once=once)
        best = max(
            rate(counts, offers, 3, seconds, price, once)
            for counts in itertools.product(*(range(len(offer) + 1) for offer in offers))
        )
        assert rate(chosen, offers, 3, seconds, price, once) == pytest.approx(best)


def test_what_having_drafts_costs_is_paid_by_all_that_they_save_together():
    """One row's likely guess saves less than having drafts costs; such guesses of all eight rows save more."""
    times = {"rows": 8, "seconds": 0.012, "price": 0.0006, "budget": 100}
    assert draft_lengths([[0.9] * 2], **times) == [2]
    assert draft_lengths([[0.9] * 2], **times, once=0.002) == [0]
    assert draft_lengths([[0.9] * 2] * 8, **times, once=0.002) == [2] * 8
    assert draft_lengths([[0.9] * 2] * 8, **times, once=0.002, row_price=0.0005, common=0.0) == [2] * 8
    assert draft_lengths([[0.9] * 2] * 8, **times, once=0.005, row_price=0.0005, common=0.0) == [0] * 8


def test_where_nothing_is_known_of_time_every_draft_is_taken():
    assert draft_lengths([[0.1] * 4, [0.9] * 2], 5, 0.0, 0.0, 100) == [4, 2]


def test_the_budget_goes_to_the_likeliest():
    assert draft_lengths([[0.5] * 4, [0.9] * 4], 2, 1.0, 0.001, 3) == [0, 3]


def test_rows_without_a_guess_wait_a_quarter_longer_at_most():
    sure = [[0.98] * 32]
    assert draft_lengths(sure, 1, 1.0, 0.1, 100)[0] > 5
    assert draft_lengths(sure, 2, 1.0, 0.1, 100) == [2]


def test_a_row_that_gets_ahead_of_others_saves_rows_and_half_of_what_steps_take():
    """Eight rows, all with guesses, although one of them usually has none."""
    sure, times = [[0.98] * 4] * 8, {"seconds": 0.008, "price": 0.0008}
    assert draft_lengths(sure, 8, budget=100, **times) == [4] * 8
    assert draft_lengths(sure, 8, budget=100, **times, row_price=0.0005, common=0.0) == [0] * 8
    assert draft_lengths(sure, 8, budget=100, **times, row_price=0.0005, common=2.0) == [2] * 8
    cheap = draft_lengths(sure, 8, budget=100, seconds=0.008, price=0.0006, row_price=0.0005, common=0.0)
    assert min(cheap) >= 1, "half of a step's fixed time counts all the same"
    one = draft_lengths(sure[:1], 1, budget=100, **times, row_price=0.0005, common=4.0)
    assert one == draft_lengths(sure[:1], 1, budget=100, **times) == [4]


def test_a_step_with_drafts_keeps_to_its_target():
    """A reader of a stream would notice a longer step."""
    sure = [[0.98] * 32] * 8
    assert sum(draft_lengths(sure, 8, 0.01, 0.0001, 1000)) > 200
    assert sum(draft_lengths(sure, 8, 0.01, 0.0001, 1000, target=0.02)) in (99, 100)
    assert sum(draft_lengths(sure, 8, 0.03, 0.0001, 1000, target=0.02)) == 0


def test_a_guess_is_judged_up_to_its_first_wrong_token():
    assert judge((1, 2, 3), (1, 2, 3, 4)) == (3, 3)
    assert judge((1, 2, 3), (1, 5, 3)) == (1, 2)
    assert judge((1, 2, 3), (7,)) == (0, 1)
    assert judge((1, 2, 3), ()) == (0, 0)


def test_a_sequence_is_told_by_its_own_guesses_and_a_new_one_by_those_of_all():
    chances, wrong, right = DraftChances(), Judgements(), Judgements()
    draft = Draft("a", (1, 2), "some", 4)
    assert chances.of(wrong, draft) == pytest.approx(0.5)
    for _ in range(30):
        chances.learn(wrong, draft, (9,))
    assert chances.of(wrong, draft) < 0.03
    assert chances.of(Judgements(), draft) < 0.1
    assert chances.of(wrong, Draft("a", (1,), "other", 4)) == pytest.approx(0.5)
    assert chances.of(wrong, Draft("a", (1,), "some", 40)) == pytest.approx(0.5)
    for _ in range(30):
        chances.learn(right, draft, (1, 2, 3))
    assert chances.of(right, draft) == 0.98
    assert chances.of(wrong, draft) < 0.15


class Guessing:
    """Guesses the golden tokens, or only wrong ones."""

    def __init__(self) -> None:
        self.right = False

    def draft(self, req, known, cfg) -> tuple[int, ...]:
        coming = golden(req.prompt, known + 8, 11, req.sampling, req.choice, cfg.window)[known:]
        return coming if self.right else tuple((token + 1) % 11 for token in coming)


def drafts_of_a_step(harness) -> int:
    harness.step()
    return sum(len(row.drafts) for row in harness.plans[-1].rows)


def test_wrong_guesses_are_soon_not_computed_and_right_ones_are_again(monkeypatch):
    """This also shows that a guess is judged without computing it."""
    guessing = Guessing()
    harness = Harness(config(weigh_drafts=True, max_model_len=256, num_blocks=128, max_num_batched_tokens=64), guessing)
    monkeypatch.setattr(StepTimes, "of", lambda *_: 0.01)
    monkeypatch.setattr(StepTimes, "draft_price", lambda *_: DraftPrice(0.0, 0.002))
    harness.submit(request("a", max_tokens=200))
    widths = [drafts_of_a_step(harness) for _ in range(30)]
    assert max(widths) > 0
    assert widths[-10:] == [0] * 10
    guessing.right = True
    widths = [drafts_of_a_step(harness) for _ in range(20)]
    assert widths[-1] >= 4
    harness.drain()


@pytest.mark.parametrize(("target", "most"), [(15, 2), (9, 0)])
def test_the_target_of_steps_bounds_drafts(monkeypatch, target, most):
    guessing = Guessing()
    guessing.right = True
    sizes = {"max_model_len": 256, "num_blocks": 128, "max_num_batched_tokens": 64}
    monkeypatch.setattr(StepTimes, "of", lambda *_: 0.01)
    monkeypatch.setattr(StepTimes, "draft_price", lambda *_: DraftPrice(0.0, 0.002))
    for bound, expected in ((0, 4), (target, most)):
        harness = Harness(config(weigh_drafts=True, step_target_ms=bound, **sizes), guessing)
        harness.submit(request("a", max_tokens=100))
        widest = max(drafts_of_a_step(harness) for _ in range(20))
        assert widest == expected if bound else widest >= expected
        harness.drain()
