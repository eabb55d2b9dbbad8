"""bench/foresight.py: what it sends is what was drawn, and errors are those of the prediction."""

from __future__ import annotations

import pytest

from foresight import _beside, _judged, calls_of, day_table, limit_table
from penstock.foresight.workloads import DRAWN


def test_calls_share_what_was_drawn_as_shared_and_have_the_drawn_lengths():
    drawn = DRAWN["shared"]
    calls = calls_of(drawn, 2.0, 60, seed=1)
    sizes = drawn.draw("", 2.0, 60, 1).sizes
    assert [(call.offset, len(call.prompt), call.output_tokens) for call in calls] == [
        (size.at, size.prompt_tokens, size.output_tokens) for size in sizes
    ]
    assert len({call.prompt[:512] for call in calls}) == 8
    assert len({call.prompt[:528] for call in calls}) > 50
    assert all(0 <= token < 10_000 for call in calls for token in call.prompt)


def test_other_seeds_send_other_prompts():
    one, other = (calls_of(DRAWN["chat"], 2.0, 40, seed) for seed in (1, 2))
    assert not {call.prompt for call in one} & {call.prompt for call in other}


def test_an_error_is_the_share_by_which_the_prediction_is_above_the_measurement():
    samples = {"ttft": [100.0] * 5, "itl": [20.0] * 5, "e2e": [1000.0] * 5}
    table = _beside(samples, {**samples, "itl": [25.0] * 5}, samples)
    assert (table["itl p50"]["measured"], table["itl p50"]["simulated"]) == (20.0, 25.0)
    assert table["itl p50"]["error"] == pytest.approx(0.25)
    assert table["itl p50"]["error_with_its_steps"] == table["ttft p99"]["error"] == 0
    day = {"workload": "chat", "requests": 5, "rate": 1.0, "failed": 0, "latencies_ms": table}
    assert "+25.0%" in day_table(day)


def test_a_rate_is_held_if_the_median_of_its_turns_keeps_every_goal_and_nothing_failed():
    goals = {"ttft": 1.0, "itl": 0.1}
    turns = [
        {"ttft_ms": ttft, "itl_ms": itl, "failed": 0} for ttft, itl in ((900.0, 90.0), (990.0, 70.0), (2000.0, 99.0))
    ]
    held = _judged(1.0, 2.0, turns, goals)
    assert (held["held"], held["median_ms"]) == (True, {"ttft": 990.0, "itl": 90.0})
    missed = _judged(1.2, 2.4, [*turns, {"ttft_ms": 1200.0, "itl_ms": 50.0, "failed": 0}], goals)
    assert (missed["held"], missed["median_ms"]["ttft"]) == (False, 1095.0)
    assert not _judged(1.0, 2.0, [*turns, turns[0] | {"failed": 1}], goals)["held"]
    shown = limit_table({"rate": [2.1, 2.0, 2.2], "advised": 2.0, "tried": [held, missed]})
    assert "1 times it, 2.00 requests/s: held" in shown
    assert "1.2 times it, 2.40 requests/s: missed (medians: ttft 1095 ms" in shown
