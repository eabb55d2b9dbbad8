"""Plans: the limit that a bisection finds is where goals begin to be missed, and comparisons say what they should."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
from pathlib import Path

import pytest
from command_line import only_line, penstock
from core_harness import request
from foresight_days import record_day

from penstock.bench.plotting import plotting
from penstock.bench.serving import Outcome
from penstock.bench.workload import Call
from penstock.contract.errors import ConfigError
from penstock.contract.plan import StepPlan
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core.step_time import StepTimes
from penstock.core.trace import TraceReader
from penstock.foresight import planning
from penstock.foresight.calibration import Calibration, Driven, Way, way_of
from penstock.foresight.files import read_lines
from penstock.foresight.planning import Machine, Question, at_rate, find_limit, find_limits, parse_slo, variants
from penstock.foresight.plot import draw_plan
from penstock.foresight.recorded import RecordedRun, read_record
from penstock.foresight.step_costs import CostLearner
from penstock.foresight.workloads import Drawn, Workload

CONFIG = SchedulerConfig(300, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=512, step_target_ms=60)
DRAWN = Drawn(prompt=40, output=20, prompt_sigma=0.4, output_sigma=0.4)
GOALS = {"ttft": 0.5, "itl": 0.1}
NO_WAY = Way(0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def measured() -> RecordedRun:
    """A busy day of an engine whose steps take 10 ms, 1 ms a token and a little for the context."""
    rng, at, requests = random.Random(2), 0.0, []
    for number in range(150):
        at += rng.expovariate(5.0)
        prompt = [rng.randrange(64) for _ in range(rng.randrange(8, 100))]
        requests.append(request(f"{number}/0", prompt, rng.randrange(4, 40), arrival=at))
    return read_record(record_day(CONFIG, requests))


@pytest.fixture(scope="module")
def machine(measured) -> Machine:
    return Machine(measured.config, measured.costs, NO_WAY)


@pytest.fixture(scope="module")
def question() -> Question:
    return Question(DRAWN, GOALS, 95.0, 80)


@pytest.fixture(scope="module")
def limit(question, machine):
    return find_limit(question, machine, range(2))


def test_goals_hold_below_the_limit_and_are_missed_above(question, machine, limit):
    below = at_rate(question, machine, limit.rate.low * 0.8, range(2))
    above = at_rate(question, machine, limit.rate.high * 1.3, range(2))
    assert all(below[goal]["p95"][0] <= bound * 1e3 for goal, bound in GOALS.items())
    assert any(above[goal]["p95"][0] > bound * 1e3 for goal, bound in GOALS.items())


def test_streams_are_the_rate_times_the_time_that_a_request_stays(question, machine, limit):
    at_limit = at_rate(question, machine, limit.rate.value, range(2))
    assert limit.stream.value == pytest.approx(limit.rate.value * at_limit["e2e"]["p50"][0] / 1e3, rel=0.4)


def test_two_machines_hold_about_twice_as_much(question, machine, limit):
    both = find_limit(question, dataclasses.replace(machine, replicas=2), range(2), limit.rate.value)
    assert 1.6 < both.rate.value / limit.rate.value < 2.6


def test_a_router_by_prefix_beats_turns_where_the_cache_is_small(machine):
    small = dataclasses.replace(machine, config=dataclasses.replace(CONFIG, num_blocks=64, max_num_seqs=4), replicas=2)
    shared = Drawn(prompt=8, output=4, prefixes=6, prefix_tokens=160)
    question = Question(shared, {"ttft": 0.5}, 90.0, 80)
    turns = find_limit(question, small, range(2))
    routed = find_limit(question, dataclasses.replace(small, routed=True), range(2), turns.rate.value)
    assert routed.rate.value > 1.1 * turns.rate.value


def test_what_cannot_be_held_has_the_limit_0(machine):
    nothing = find_limit(Question(DRAWN, {"ttft": 0.001}, 95.0, 20), machine, [0])
    assert nothing.rate == (0.0, 0.0, 0.0)


def test_several_processes_find_the_same_limits(question, machine, limit):
    machines = {"one": machine, "two": dataclasses.replace(machine, replicas=2)}
    quick = dataclasses.replace(question, requests=20)
    alone, together = (dict(find_limits(quick, machines, [0], limit.rate.value, jobs)) for jobs in (1, 2))
    assert alone == together


def test_the_way_to_the_engine_counts(question, machine, limit):
    far = dataclasses.replace(machine, way=Way(0.2, 0.2, 0.2))
    assert find_limit(question, far, range(2), limit.rate.value).rate.value < limit.rate.value


def test_a_workload_from_a_file_is_sent_faster_and_slower(machine):
    sizes = DRAWN.draw("day", 2.0, 60, 1).sizes
    question = Question(Workload("day", sizes), GOALS, 95.0, 60)
    found = find_limit(question, machine, [0])
    assert found.rate.value > 0
    assert len(question.arrivals(machine, found.rate.value, 0)) == 60


def test_variants_leave_out_what_cannot_be_and_what_is(machine):
    found = variants(machine)
    assert "--max-num-seqs 128" not in found  # more than 64 tokens a step
    assert found["twice the KV memory"].config.num_blocks == 600
    assert all(other != machine for other in found.values())


@pytest.mark.parametrize(
    ("text", "goals"), [("ttft=1s,itl=100ms", {"ttft": 1.0, "itl": 0.1}), ("e2e=1.5s", {"e2e": 1.5})]
)
def test_goals_are_read(text, goals):
    assert parse_slo(text) == goals


@pytest.mark.parametrize("text", ["", "ttft", "ttft=1", "ttft=0s", "speed=1s", "ttft=1s,ttft=2s"])
def test_goals_that_are_none_are_refused(text):
    with pytest.raises(ConfigError, match=r"^slo: "):
        parse_slo(text)


def test_the_way_is_measured_between_the_client_and_the_record(measured):
    fact = measured.served[0]
    prompt = next(each.request.prompt for each in measured.arrivals if each.request.id == fact.id)
    sent, first, ended = fact.arrived - 0.02, fact.times[0] + 0.003, fact.ended + 0.004
    outcome = Outcome(0.0, sent, (first,), ended, len(prompt), 1, counted=True)
    way = way_of(measured, Driven(measured.began, [Call(0.0, prompt, 1)], [outcome]))
    assert (way.there, way.back, way.end) == pytest.approx((0.02, 0.003, 0.004))


@pytest.fixture
def calibrated(monkeypatch, measured) -> list[tuple[str, tuple[str, ...]]]:
    """Makes `penstock plan` find `measured`; lists the models and options that it asked for."""
    calls = []

    def calibrate(model, options, folder, seconds, **_):
        calls.append((model, options))
        return Calibration(measured, NO_WAY, kept=True)

    monkeypatch.setattr("penstock.foresight.calibration.calibrate", calibrate)
    return calls


def test_plan_says_the_limit_and_the_best_option(tmp_path, calibrated, monkeypatch):
    few = ("--max-num-batched-tokens 128", "a second machine, requests in turn")
    monkeypatch.setattr(planning, "variants", lambda machine: {name: variants(machine)[name] for name in few})
    target = tmp_path / "plan.json"
    arguments = [
        "plan",
        "tiny",
        "--workload",
        "long",
        "--slo",
        "ttft=5s",
        "--requests",
        "20",
        "--seeds",
        "2",
        "--jobs",
        "1",
    ]
    done = penstock(*arguments, "--json", str(target), "--", "--threads", "2")
    assert done.returncode == 0, done.stderr
    assert calibrated == [("tiny", ("--no-speculate", "--threads", "2"))]
    assert "this machine holds" in done.stdout
    assert "a second machine, requests in turn" in done.stdout
    record = json.loads(target.read_text())
    assert record["limit"]["advised"] == min(record["limit"]["rates"]) > 0
    assert f"plan for {record['limit']['advised']:.2f} requests/s" in done.stdout
    assert len(record["curve"]) == 6


def test_plan_says_what_clients_see_alone_where_nothing_holds(calibrated):
    done = penstock("plan", "tiny", "--slo", "ttft=1ms", "--requests", "20", "--seeds", "1", "--no-options")
    assert done.returncode == 0, done.stderr
    assert "does not hold it at any rate; of requests that come one by one" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("0.01 ")


def test_plan_names_the_option_that_holds_something_where_nothing_is_held_without(monkeypatch, measured):
    far, near = Way(10.0, 0.0, 0.0), "--host here"
    monkeypatch.setattr(
        "penstock.foresight.calibration.calibrate", lambda *_, **__: Calibration(measured, far, kept=True)
    )
    monkeypatch.setattr(planning, "variants", lambda machine: {near: dataclasses.replace(machine, way=NO_WAY)})
    done = penstock("plan", "tiny", "--slo", "ttft=5s", "--requests", "20", "--seeds", "2", "--jobs", "1")
    assert done.returncode == 0, done.stderr
    assert "does not hold it at any rate" in done.stdout
    assert done.stdout.splitlines()[-1] == f"best option: {near}"


def test_plan_refuses_what_it_does_not_know(tmp_path):
    assert "--workload: 'walks' is neither a file" in only_line(penstock("plan", "tiny", "--workload", "walks").stderr)
    assert "--slo: " in only_line(penstock("plan", "tiny", "--slo", "fast").stderr)
    assert "--plot: " in only_line(penstock("plan", "tiny", "--plot", str(tmp_path / "plan.txt")).stderr)


def test_a_machine_of_which_nothing_is_known_takes_no_time():
    learner = CostLearner(None)
    assert learner.costs().times.of(StepTimes().decoding([5])) == 0.0


@pytest.mark.model
@pytest.mark.deep
def test_a_server_is_measured_once_and_kept_and_reads_every_prompt_anew(tmp_path, monkeypatch):
    from penstock.foresight.calibration import calibrate

    monkeypatch.setenv("PENSTOCK_KV_STORE", str(tmp_path / "blocks"))
    said: list[str] = []
    options = ("--no-speculate", "--threads", "1", "--kv-cache-memory", "64MiB")
    model = os.environ.get("PENSTOCK_TEST_MODEL", "smollm2-135m-instruct")
    first = calibrate(model, options, tmp_path, 6.0, announce=said.append)
    again = calibrate(model, options, tmp_path, 6.0, announce=said.append)
    assert (first.kept, again.kept, len(said)) == (False, True, 1)
    assert again.run.config == first.run.config
    assert 0 < first.way.there < 1.0
    assert 0 < first.way.back < 1.0
    assert again.way == first.way
    seconds = first.run.costs.times.of(first.run.costs.times.decoding([100]))
    assert 0.001 < seconds < 2.0
    assert len(list(Path(tmp_path).rglob("record.jsonl.gz"))) == 1
    calibrate(model, options, tmp_path, 6.0, anew=True)  # the same prompts
    (record,) = tmp_path.rglob("record.jsonl.gz")
    plans = [each.value for each in TraceReader(read_lines(record)) if isinstance(each.value, StepPlan)]
    assert plans
    assert not any(plan.num_restored for plan in plans)


PLAN = {
    "goals_ms": {"ttft": 500.0, "itl": 100.0},
    "quantile": 95.0,
    "limit": {"rate": [2.0, 1.8, 2.1]},
    "curve": [
        {
            "rate": rate,
            "latencies_ms": {goal: {"p50": [rate, 0.5, 9.0], "p95": [3.0, 2.0, 4.0]} for goal in ("ttft", "itl")},
        }
        for rate in (1.0, 2.0)
    ],
}


def test_a_plan_is_drawn_where_matplotlib_is(tmp_path):
    pytest.importorskip("matplotlib")
    draw_plan(PLAN, tmp_path / "plan.svg", plotting())
    drawn = (tmp_path / "plan.svg").read_text()
    assert all(text in drawn for text in ("to the first token", "between tokens", "goal, 500 ms", "p95"))


def test_without_matplotlib_a_plot_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"penstock\[bench\]"):
        plotting()
