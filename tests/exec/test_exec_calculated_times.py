"""What steps should take by the program's cost, before many were measured."""

from __future__ import annotations

import pytest

from penstock.calculated_times import parts_of
from penstock.contract.model import StepCost, StepRow

WEIGHTS, KV, TOKEN, HEAD, PAIR = 10_000_000, 1_000, 20_000_000, 4_000_000, 2_000
RATES = {"int8": 1e12, "bf16": 1e11}


def cost_of(row: StepRow) -> StepCost:
    pairs = sum(range(row.computed + 1, row.computed + row.count + 1))
    return StepCost(
        weight_bytes=WEIGHTS,
        kv_bytes=KV * (row.computed + row.count),
        int8_ops=TOKEN * row.count + HEAD * row.samples,
        bf16_ops=PAIR * pairs,
    )


def test_each_part_takes_what_its_bytes_and_operations_take():
    step, few, row, seen, position, pair = parts_of(cost_of, RATES.__getitem__, 0.002)
    assert step + few == pytest.approx(0.002)
    assert few == pytest.approx(row / 4)
    assert row == pytest.approx((TOKEN + HEAD) / RATES["int8"] + PAIR / RATES["bf16"])
    assert seen == pytest.approx(KV * step / WEIGHTS + PAIR / RATES["bf16"])
    assert position == pytest.approx(TOKEN / RATES["int8"], rel=0.01)
    assert pair == pytest.approx(PAIR / RATES["bf16"])


def test_the_first_rows_take_a_part_of_the_first_step_and_no_part_is_negative():
    parts = parts_of(cost_of, {"int8": 1e9, "bf16": 1e9}.__getitem__, 0.002)
    assert parts[:2] == (pytest.approx(0.0015), pytest.approx(0.0005))
    assert min(parts) >= 0


def test_a_model_that_looks_back_at_nothing_has_parts_of_zero():
    def alike(row: StepRow) -> StepCost:
        return StepCost(weight_bytes=WEIGHTS, fp32_ops=TOKEN * row.count)

    step, _, row, seen, position, pair = parts_of(alike, {"fp32": 1e11}.__getitem__, 0.002)
    assert (seen, pair) == (0.0, 0.0)
    assert position == pytest.approx(row) == pytest.approx(TOKEN / 1e11)
    assert step > 0
