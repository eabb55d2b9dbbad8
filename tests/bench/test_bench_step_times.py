"""`bench/step_times.py`: which steps it reads from a trace, what their errors are, and a real engine's load."""

from __future__ import annotations

import json

import pytest

import step_times
from penstock.contract.plan import GuessWork, Row, StepPlan, StepResult
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core.step_time import StepTimes
from penstock.core.trace import encode_drop, encode_header, encode_plan, encode_result


def decode(slot: int = 0, drafts: int = 0) -> Row:
    return Row(slot, 100, 1 + drafts, (), True, (0,) * drafts)


def chunk(count: int, *, last: bool = False) -> Row:
    return Row(9, 0, count, (), last)


def plan(number: int, *rows: Row) -> StepPlan:
    return StepPlan(number, (), (), rows)


def test_steps_are_read_with_the_seconds_that_they_took_alone():
    lines = [
        encode_header(SchedulerConfig(8, window=5)),
        encode_plan(plan(0, decode())),
        encode_plan(plan(1, decode())),  # in flight at once
        encode_result(StepResult(0, seconds=0.5, guessing=GuessWork(0.125, 1, 1))),
        encode_drop(),
        encode_plan(plan(2, Row(0, 0, 16, (), False, stored=(b"1",)), decode(1))),
        encode_result(StepResult(2, seconds=9.0, restoring=8.0)),
        encode_plan(plan(3)),
        encode_result(StepResult(3, seconds=1.0)),
        encode_plan(plan(4, decode())),
        encode_result(StepResult(4, seconds=0.25)),
    ]
    config, steps = step_times.measured_steps(lines)
    assert config.window == 5
    assert [(step.plan.step, step.seconds) for step in steps] == [(0, 0.375), (4, 0.25)]


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        ((decode(),), "decode 1"),
        ((decode(0), decode(1)), "decode 2"),
        (tuple(map(decode, range(7))), "decode 5..8"),
        (tuple(map(decode, range(40))), "decode 33 and more"),
        ((decode(drafts=3),), "decode 1, with drafts"),
        ((decode(), chunk(16)), "prompt of 1..32 beside"),
        ((decode(), chunk(500, last=True)), "prompt of 129..512 beside"),
        ((chunk(16, last=True),), "prompt alone"),
        ((chunk(16),), "prompt alone, not its end"),
    ],
)
def test_kinds(rows, kind):
    assert step_times.kind_of(plan(0, *rows)) == kind


def test_errors_are_of_what_was_expected_before_a_step_was_learned_and_of_the_same_plan_before():
    seconds = [0.1] * 40 + [0.2, 0.1]
    steps = [step_times.Step(plan(number, decode()), each) for number, each in enumerate(seconds)]
    found = list(step_times.foresee(StepTimes(), steps))
    assert found[0].before == pytest.approx(0.8)
    assert found[-2].error == pytest.approx(-0.5, abs=0.01)
    assert (found[-2].again, found[-1].again) == (0.1, 0.2)
    rows = step_times.summary(found, learn=2.0)
    assert rows["decode 1"] == rows["all"]
    assert rows["all"]["steps"] == 22
    assert rows["all"]["median"] < 0.5
    assert rows["all"]["again_median"] == 0.0
    assert "decode 1" in step_times.table(rows)


def test_a_real_engine_computes_the_load_and_its_trace_is_evaluated(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(step_times, "_LONGEST", 100)
    monkeypatch.setattr(step_times, "_CONTEXTS", 200)
    monkeypatch.setattr(step_times, "_CHUNK", 64)
    target = tmp_path / "record.json"
    arguments = [f"{tiny}:none", "--learn", "0.05", "--measure", "0.05", "--threads", "1", "--json", str(target)]
    monkeypatch.setattr("sys.argv", ["step_times.py", *arguments, "--traces", str(tmp_path)])
    step_times.main()
    record = json.loads(target.read_text())
    (case,) = record["cases"].values()
    assert case["errors"]["all"]["steps"] > 10
    assert case["errors"]["all"]["again_median"] is not None
    (trace,) = tmp_path.glob("*.trace")
    monkeypatch.setattr("sys.argv", ["step_times.py", "--trace", str(trace), "--learn", "0.05", "--json", str(target)])
    step_times.main()
    again = json.loads(target.read_text())["cases"][trace.name]
    assert again["errors"] == case["errors"]
    assert capsys.readouterr().out.count("again median") == 2
