"""The simulated engine against engines whose every step is known: the same steps at the same times."""

from __future__ import annotations

import dataclasses
import random

import pytest
from command_line import only_line, penstock
from core_harness import config, embedding, request
from foresight_days import AFTER, AROUND, record_day

from penstock.contract.errors import ConfigError
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core.trace import StepPlan, StepResult, TraceReader
from penstock.foresight.arrivals import Arrival
from penstock.foresight.comparing import compare, comparison_record, comparison_table
from penstock.foresight.engine import SimulatedEngine, run
from penstock.foresight.figures import estimates, figures, samples_of
from penstock.foresight.pace import Pace
from penstock.foresight.recorded import read_record
from penstock.foresight.step_costs import CostLearner, Rest

BUSY = SchedulerConfig(400, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=512, step_target_ms=40)


def busy_day(count: int = 120, seed: int = 1, rate: float = 4.0, pace=lambda at: 1.0, **options) -> list[str]:
    rng, at, requests = random.Random(seed), 0.0, []
    for number in range(count):
        at += rng.expovariate(rate)
        prompt = [rng.randrange(64) for _ in range(rng.randrange(4, 120))]
        tenant = "ab"[number % 2]
        requests.append(request(f"{number}/0", prompt, rng.randrange(2, 40), arrival=at, tenant=tenant))
    return record_day(dataclasses.replace(BUSY, **options), requests, pace=pace)


@pytest.fixture(scope="module")
def busy() -> list[str]:
    return busy_day()


def test_one_request_takes_the_steps_that_it_took(busy):
    day = record_day(BUSY, [request("0/0", range(20), 5)])
    recorded = read_record(day)
    (served,) = run(SimulatedEngine(recorded.config, recorded.costs), recorded.arrivals)
    (fact,) = recorded.served
    assert (served.tokens, served.prompt_tokens) == (5, 20)
    assert len(served.times) == len(fact.times) == 5
    assert served.begun == fact.begun == 0.0


def test_a_record_is_read_as_its_requests_and_what_became_of_them(busy):
    recorded = read_record(busy)
    assert len(recorded.arrivals) == len(recorded.served) == 120
    assert recorded.arrivals[0].at == 0.0
    first = next(each for each in recorded.served if each.id == "0/0")
    assert first.first_token > 0.010
    assert all(len(each.times) == each.tokens for each in recorded.served)
    assert recorded.steps == sum(isinstance(each.value, StepPlan) for each in TraceReader(busy))
    rests = {rest for values in recorded.costs.rests._by_shape.values() for rest in values}
    assert all(rest == pytest.approx(Rest(AROUND, AFTER), abs=2e-6) for rest in rests)


def test_costs_are_learned_from_the_steps_until_a_time(busy):
    recorded = read_record(busy)
    half = recorded.seconds / 2
    early = read_record(busy, until=half)
    some, every = (sum(map(len, each.costs.scatter._by_shape.values())) for each in (early, recorded))
    ends = [each.at - recorded.began for each in TraceReader(busy) if isinstance(each.value, StepResult)]
    assert (some, every) == (sum(end <= half for end in ends), len(ends))
    assert 0.3 * every < some < 0.7 * every
    assert len(early.arrivals) == len(recorded.arrivals) == 120


def test_simulated_latencies_are_those_of_the_recorded_day(busy):
    recorded = read_record(busy)
    simulated = run(SimulatedEngine(recorded.config, recorded.costs), recorded.arrivals)
    facts, found = figures(recorded.served), figures(simulated)
    for latency in ("ttft", "itl", "e2e"):
        for quantile in ("p50", "p90", "p99"):
            fact, value = facts[latency][quantile].value, found[latency][quantile].value
            assert value == pytest.approx(fact, rel=0.10), (latency, quantile)


def test_slow_seconds_of_the_machine_are_slow_in_the_simulation_too():
    def pace(at: float) -> float:
        return 2.0 if 8.0 < at < 16.0 else 1.0

    recorded = read_record(busy_day(pace=pace))
    simulated = run(SimulatedEngine(recorded.config, recorded.costs, part=0.0), recorded.arrivals)
    by_id = {each.id: each for each in simulated}
    for began, ended in (0.0, 8.0), (9.0, 16.0), (18.0, 30.0):
        of = [each for each in recorded.served if began <= each.arrived < ended]
        fact = sum(each.end_to_end for each in of) / len(of)
        assert sum(by_id[each.id].end_to_end for each in of) / len(of) == pytest.approx(fact, rel=0.15)


@pytest.mark.parametrize(("at", "value"), [(2.5, 0.5), (3.1, 1.5), (4.0, 1.5), (5.9, 1.0), (6.5, 0.5), (9.9, 1.0)])
def test_a_pace_is_that_of_its_second_and_stays_while_nothing_happens(at, value):
    pace = Pace([(2.1, 1.0, 2.0), (3.0, 1.0, 1.0), (3.9, 2.0, 1.0), (5.5, 1.0, 1.0)])
    assert pace.seconds == 4.0
    assert pace.at(at) == value
    assert Pace().at(at) == 1.0


def test_the_same_seed_gives_the_same_day_and_another_one_another(busy):
    recorded = read_record(busy)
    ends = [
        [each.ended for each in run(SimulatedEngine(recorded.config, recorded.costs, seed), recorded.arrivals)]
        for seed in (0, 0, 1)
    ]
    assert ends[0] == ends[1] != ends[2]


def test_fewer_slots_make_requests_wait(busy):
    recorded = read_record(busy)
    narrow = dataclasses.replace(recorded.config, max_num_seqs=1)
    wide = run(SimulatedEngine(recorded.config, recorded.costs), recorded.arrivals)
    waiting = run(SimulatedEngine(narrow, recorded.costs), recorded.arrivals)
    assert figures(waiting)["queue"]["p50"].value > 10 * figures(wide)["queue"]["p50"].value + 1.0


def test_prefixes_are_found_in_the_simulated_cache_and_answers_too():
    prompt = tuple(range(16))
    first = request("0/0", prompt, 20)
    again = read_record(record_day(config(), [first]))
    answer = again.arrivals[0].answer
    assert len(answer) == 20
    second = Arrival(10.0, request("1/0", (*prompt, *answer[:8]), 2, arrival=10.0))
    served = run(SimulatedEngine(again.config, again.costs), [*again.arrivals, second])
    assert [each.cached_tokens for each in served] == [0, 20]  # whole blocks of 4; the last token is computed


def test_a_caller_who_left_without_a_token_leaves_again_unless_it_is_served_sooner():
    one = config(max_num_seqs=1)
    requests = [request("0/0", range(8), 40), request("1/0", range(20, 28), 4, arrival=0.01)]
    recorded = read_record(record_day(one, requests, aborts={"1/0": 0.2}))
    assert recorded.arrivals[1].patience == pytest.approx(0.2, abs=0.03)
    assert [each.id for each in recorded.served] == ["0/0"]
    engine = SimulatedEngine(one, recorded.costs)
    assert [each.id for each in run(engine, recorded.arrivals)] == ["0/0"]
    assert engine.left == ["1/0"]
    assert len(run(SimulatedEngine(config(), recorded.costs), recorded.arrivals)) == 2


def test_embeddings_are_simulated_too():
    recorded = read_record(record_day(config(), [embedding("0/0", range(30)), request("1/0")]))
    served = run(SimulatedEngine(recorded.config, recorded.costs), recorded.arrivals)
    assert sorted((each.id, each.tokens) for each in served) == [("0/0", 0), ("1/0", 4)]
    assert all(each.first_token > 0 for each in served)


def test_requests_that_do_not_fit_are_refused_and_counted():
    recorded = read_record(record_day(config(), [request("0/0", range(40), 20), request("1/0")]))
    engine = SimulatedEngine(config(num_blocks=8), recorded.costs)
    assert [each.id for each in run(engine, recorded.arrivals)] == ["1/0"]
    assert engine.refused == ["0/0"]


def test_a_record_without_times_is_no_day():
    lines = [line.split(',"at":')[0] + "}\n" for line in busy_day(2)]
    with pytest.raises(ConfigError, match="line 2: it says no time"):
        read_record(lines)


def test_shapes_that_were_not_measured_take_what_their_neighbours_scatter():
    learner = CostLearner(None)
    for record in TraceReader(busy_day(40)):
        if isinstance(record.value, StepPlan):
            learner.step(record.value, 0.02, record.at)
    scatter = learner.costs().scatter
    with_prompts, without = scatter.near((30, 30)), scatter.near((30, 0))
    assert len(with_prompts) >= 12
    assert len(without) >= 12
    assert with_prompts is not without


def test_intervals_hold_the_value_and_narrow_with_more_requests(busy):
    recorded = read_record(busy)
    few, many = (estimates(samples_of(recorded.served[:count], "e2e"))["p50"] for count in (20, 120))
    assert few.low <= few.value <= few.high
    assert many.high - many.low < few.high - few.low


def test_a_fair_policy_helps_the_tenant_that_sends_little():
    rng = random.Random(5)
    prompts = [[rng.randrange(64) for _ in range(60)] for _ in range(60)]  # one tenant sends all at once
    requests = [request(f"heavy{number}/0", prompt, 20, tenant="heavy") for number, prompt in enumerate(prompts)]
    for number in range(6):
        arrival = 1.0 + number
        requests.append(
            request(f"light{number}/0", [rng.randrange(64) for _ in range(10)], 5, tenant="light", arrival=arrival)
        )
    recorded = read_record(record_day(dataclasses.replace(BUSY, max_num_seqs=4), requests))
    compared = compare(recorded, dataclasses.replace(recorded.config, policy="fair"), seeds=2)
    record = comparison_record(compared)
    light = record["changes"]["tenant light"]
    assert light["sooner"] == light["requests"] == 6
    assert record["changes"]["tenant heavy"]["end_to_end_ms"]["mean"] > light["end_to_end_ms"]["mean"]
    table = comparison_table(record)
    assert "policy fcfs -> fair" in table
    assert "tenant light" in table


def test_replay_with_an_option_tells_who_gained(tmp_path, busy):
    file = tmp_path / "day.jsonl"
    file.write_text("".join(busy))
    done = penstock("replay", str(file), "--max-num-seqs", "2", "--seeds", "1", "--json", str(tmp_path / "r.json"))
    assert done.returncode == 0, done.stderr
    assert "changed: max_num_seqs 8 -> 2" in done.stdout
    assert "who gained and lost" in done.stdout
    assert (tmp_path / "r.json").exists()


def test_options_that_cannot_be_are_refused_by_name(tmp_path, busy):
    file = tmp_path / "day.jsonl"
    file.write_text("".join(busy[:5]))
    done = penstock("replay", str(file), "--max-num-batched-tokens", "2")
    assert done.returncode == 2
    assert "--max-num-batched-tokens: 2 is below max_num_seqs" in only_line(done.stderr)
    assert "--json" in only_line(penstock("replay", str(file), "--json", "-").stderr)
