"""Fleets of simulated engines: looking at them changes nothing, and what they cost grows with requests alone."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

import routers
from fleet_sim import simulation
from fleet_sim.day import DAY_REPLICA, TracedMessages, drawn_day
from fleet_sim.replica import ReplicaConfig, replica_engine
from fleet_sim.rivals import RIVALS
from fleet_sim.simulation import FleetConfig, simulate
from fleet_sim.trace import DAY, TraceConfig, conversations
from penstock.foresight.fleet import Fleet, InTurn
from penstock.foresight.workloads import Drawn, read_workload

REPLICA = ReplicaConfig()


def test_a_fleet_computes_what_its_engines_would_if_all_ran_all_the_time():
    day = list(Drawn(300, 60).draw("", 3.0, 150, 1).arrivals(REPLICA.context))
    fleet, alone = Fleet([replica_engine(REPLICA) for _ in range(3)]), [replica_engine(REPLICA) for _ in range(3)]
    one, other = InTurn(), InTurn()
    for each in day:
        fleet.run(each.at)
        fleet.offer(one.choose(each, fleet.engines), each)
        for engine in alone:
            engine.run(each.at)
        alone[other.choose(each, alone)].offer(each)
    while fleet.due < float("inf"):
        fleet.advance()
    for engine in alone:
        engine.run()
    assert [engine.served for engine in fleet.engines] == [engine.served for engine in alone]
    assert sum(len(engine.served) for engine in alone) == 150


def test_an_engine_that_took_another_ones_place_has_nothing_to_do():
    fleet = Fleet([replica_engine(REPLICA)])
    fleet.offer(0, next(Drawn(300, 60).draw("", 1.0, 1, 1).arrivals(REPLICA.context)))
    fleet.replace(0, replica_engine(REPLICA))
    assert fleet.due == float("inf")


def loaded(replicas: int = 3, seconds: float = 120.0, **options) -> tuple[FleetConfig, list]:
    trace = TraceConfig(seconds=seconds, requests_per_second=1.2 * replicas, tenants=10)
    return FleetConfig(replicas=replicas, warm=0.0, ends=seconds, **options), conversations(trace, 1)


def every_step(config: ReplicaConfig, speed: float = 1.0):
    return replica_engine(config, speed, every=True)


@pytest.mark.parametrize("name", ["ours", "two choices"])
def test_figures_are_those_of_a_fleet_whose_every_step_is_planned(name, monkeypatch):
    fleet, talks = loaded()
    quick = simulate(fleet, talks, RIVALS[name]).figures(120.0)
    monkeypatch.setattr(simulation, "replica_engine", every_step)
    whole = simulate(fleet, talks, RIVALS[name]).figures(120.0)
    assert quick["planned"] < whole["planned"] / 4
    alike = {"requests", "cached_share", "first_token_p50", "first_token_p99", "whole_p50", "whole_p99", "failed"}
    bound = 0.06 if name == "ours" else 1e-6  # ours hears of free blocks only when a replica has decided something
    assert {each: quick[each] for each in alike} == pytest.approx({each: whole[each] for each in alike}, rel=bound)


def test_what_a_lost_replica_had_is_answered_by_others():
    fleet, talks = loaded(losses=(30.0, 60.0))
    outcome = simulate(fleet, talks, RIVALS["ours"])
    assert len(outcome.first_token) == outcome.asked > 250
    assert outcome.left == outcome.refused == 0
    assert outcome.stayed < outcome.followed


def test_too_many_requests_are_refused_and_some_lose_patience():
    fleet, talks = loaded(1, replica=ReplicaConfig(tokens_per_second=200.0, waiting=1, slots=2, patience=3.0))
    outcome = simulate(fleet, talks, RIVALS["two choices"])
    assert outcome.refused
    assert outcome.left
    assert len(outcome.first_token) + outcome.refused + outcome.left == outcome.asked
    assert all(each <= 3.0 + 3.0 for each in outcome.first_token)  # a step of 2.6 s may begin before patience ends


def test_a_slow_replica_gets_less_from_a_router_that_looks():
    fleet, talks = loaded(2, slow=0.5)
    assert simulate(fleet, talks, RIVALS["ours"]).served[0] < simulate(fleet, talks, RIVALS["ours"]).served[1]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", routers.DAY_ROUTERS)
def test_the_cost_of_a_day_grows_with_its_requests_and_not_faster(name):
    costs = []
    for requests in (300, 600, 1200):
        talks = conversations(drawn_day(requests), 1)
        outcome = simulate(FleetConfig(replicas=40, warm=0.0, ends=DAY, replica=DAY_REPLICA), talks, RIVALS[name])
        costs.append((outcome.planned + outcome.events) / outcome.asked)
    assert costs[1] < 1.1 * costs[0]
    assert costs[2] < 1.1 * costs[1]


def test_a_fleet_of_a_thousand_costs_what_its_requests_cost():
    talks = conversations(drawn_day(200), 1)
    few, many = (
        simulate(FleetConfig(replicas=count, warm=0.0, ends=DAY, replica=DAY_REPLICA), talks, RIVALS["two choices"])
        for count in (50, 1000)
    )
    assert many.asked == few.asked
    assert many.planned + many.events < 1.1 * (few.planned + few.events)


def test_a_drawn_day_is_busiest_at_noon_and_has_the_lengths_that_are_published():
    talks = conversations(drawn_day(20_000), 0)
    by_hour = [sum(int(talk.begins // 3600) == hour for talk in talks) for hour in range(24)]
    assert 1.8 < sum(by_hour[10:14]) / sum(by_hour[:2] + by_hour[22:]) < 2.6
    prompts = sorted(talk.tokens(turn) for talk in talks for turn in range(len(talk.turns)))
    answers = sorted(each.answer for talk in talks for each in talk.turns)
    assert prompts[len(prompts) // 2] == pytest.approx(1020, rel=0.1)
    assert answers[len(answers) // 2] == pytest.approx(129, rel=0.05)


def test_prompts_repeat_what_was_said_before_and_the_tenants_beginning():
    talk = next(each for each in conversations(drawn_day(500), 2) if len(each.turns) > 1)
    first = (*talk.prompt(0), *talk.answer(0))
    assert talk.prompt(1)[: len(first)] == first
    assert len(talk.prompt(1)) == talk.tokens(1)
    assert talk.prompt(0)[0] == talk.tenant << 20


def test_a_trace_in_a_file_is_routed_and_its_equal_blocks_are_found(tmp_path):
    rng, file = random.Random(1), tmp_path / "mooncake.jsonl"
    for at in range(100, 160):
        blocks = [rng.randrange(3), 9, at]
        line = {"timestamp": 1000 * at, "input_length": 1536, "output_length": 20, "hash_ids": blocks}
        with file.open("a") as lines:
            lines.write(json.dumps(line) + "\n")
    messages = TracedMessages(read_workload(file), 32_768)
    assert messages.seconds == 59.0
    assert len(messages) == 60
    outcome = simulate(FleetConfig(replicas=2, warm=0.0, ends=messages.seconds), messages, RIVALS["ours"])
    assert len(outcome.first_token) == 60
    assert 0.5 < outcome.cached_tokens / outcome.prompt_tokens < 2 / 3


def test_the_command_reports_a_day_of_four_routers(tmp_path, monkeypatch, capsys):
    target = tmp_path / "record.json"
    argv = ["routers.py", "--day", "--requests", "60", "--requests", "120", "--replicas", "5", "--json", str(target)]
    monkeypatch.setattr("sys.argv", argv)
    routers.main()
    shown = capsys.readouterr().out
    assert all(f"| {name} |" in shown for name in routers.DAY_ROUTERS)
    record = json.loads(target.read_text())
    assert len(record["rows"]) == 8
    assert {"commit", "machine", "taken"} <= record.keys()
    row = record["rows"][0]
    assert row["trace"]["night"] < 1.0
    assert row["processor_seconds_a_request"] > 0
    assert {"first_token_p99", "whole_p99", "cached_share", "busy_max_over_mean", "failed"} <= row.keys()


def test_a_trace_that_cannot_be_read_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["routers.py", "--trace", str(tmp_path / "none.jsonl")])
    with pytest.raises(SystemExit):
        routers.main()
    assert "none.jsonl" in capsys.readouterr().err


def test_a_message_longer_than_the_context_is_not_asked():
    fleet, talks = loaded(1)
    short = replace(fleet, replica=replace(REPLICA, context=2000))
    assert 0 < simulate(short, talks, RIVALS["two choices"]).asked < simulate(fleet, talks, RIVALS["ours"]).asked
