"""The trace: exact round trips, replay, and clear words about what is wrong with a file."""

from __future__ import annotations

import dataclasses
import json

import pytest
from core_harness import Harness, config, least_of, request, run_episode
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.contract.errors import ConfigError
from penstock.contract.plan import Admit, Row, RowResult, Stall, StepPlan, StepResult
from penstock.contract.request import SequenceRequest, StopRules
from penstock.contract.sampling import SamplingSpec
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core import chunk_limit, trace
from penstock.core.replaying import replay
from penstock.core.trace import TRACE_VERSION

st.register_type_strategy(float, st.floats(allow_nan=False))
specs = st.dictionaries(st.text(), st.booleans() | st.integers() | st.floats(allow_nan=False)).map(
    lambda entries: SamplingSpec(tuple(sorted(entries.items(), key=lambda entry: entry[0])))
)
st.register_type_strategy(SamplingSpec, specs)
small = st.integers(1, 40)
configs = st.builds(
    SchedulerConfig, small, small, st.just(3), st.integers(3, 50), small, st.sampled_from(["fcfs", "priority"])
)


def decode(line: str):
    (item,) = trace.TraceReader([line])
    return item.value


@given(
    st.from_type(SequenceRequest).map(trace.encode_submit)
    | st.from_type(StepPlan).map(trace.encode_plan)
    | st.from_type(StepResult).map(trace.encode_result)
)
@settings(max_examples=100, deadline=None)
def test_encoding_what_was_decoded_gives_the_same_line(line):
    (body,) = json.loads(line)
    kinds = {"submit": trace.encode_submit, "plan": trace.encode_plan, "result": trace.encode_result}
    assert kinds[body](decode(line)) == line


@given(st.from_type(SequenceRequest))
@settings(max_examples=60, deadline=None)
def test_requests_survive_the_round_trip(value):
    again = decode(trace.encode_submit(value))
    assert again == value
    assert [type(v) for _, v in again.sampling.entries] == [type(v) for _, v in value.sampling.entries]


@given(st.from_type(StepPlan))
@settings(max_examples=60, deadline=None)
def test_plans_survive_the_round_trip(value):
    assert decode(trace.encode_plan(value)) == value


@given(st.from_type(StepResult))
@settings(max_examples=60, deadline=None)
def test_results_survive_the_round_trip(value):
    assert decode(trace.encode_result(value)) == value


@given(configs, st.binary(max_size=8), st.booleans())
@settings(max_examples=60, deadline=None)
def test_configurations_survive_the_round_trip(value, root, caching):
    value = dataclasses.replace(value, model_digest=root, prefix_caching=caching)
    assert decode(trace.encode_header(value)).config == value


def test_a_trace_line_is_one_line():
    line = trace.encode_submit(SequenceRequest("a\nb\u2028", (1,), stop=StopRules(strings=("\n", "é"))))
    assert line.isascii()
    assert line.isprintable()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(20))
def test_a_replay_makes_every_plan_again(seed, monkeypatch):
    harness = run_episode(seed)
    monkeypatch.setattr(chunk_limit, "LEAST", least_of(seed))
    report = replay(harness.trace)
    assert report.same, report.explain()
    assert (report.steps, report.truncated) == (len(harness.plans), False)


def small_trace() -> list[str]:
    harness = Harness(config())
    harness.submit(request("a", range(6), max_tokens=4))
    harness.submit(request("b", range(6), max_tokens=2))
    harness.drain()
    return harness.trace


def test_the_first_difference_is_named():
    lines = small_trace()
    at = next(number for number, line in enumerate(lines) if '"step":2,' in line)
    body = json.loads(lines[at])
    body["plan"]["rows"][0]["start"] += 1
    lines[at] = json.dumps(body)
    report = replay(lines)
    assert not report.same
    assert report.steps == 2
    assert report.difference.startswith(f"line {at + 1}: step 2: rows was")
    assert "2 steps replayed" in report.explain()


def test_an_input_that_is_missing_is_a_difference():
    lines = small_trace()
    assert not replay(lines[:1] + lines[2:]).same


def test_a_submission_that_is_refused_in_the_replay_is_a_difference():
    lines = small_trace()
    assert "refused" in replay([*lines[:2], lines[1]]).difference


def test_a_result_without_its_plan_is_a_difference():
    lines = small_trace()
    assert "without its plan" in replay([*lines[:3], lines[4]]).difference


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_last_line_cut_short_by_a_crash_is_left_out_and_said(cut):
    lines = [line + "\n" for line in small_trace()]
    lines[-1] = lines[-1][:cut]
    report = replay(lines)
    assert report.same
    assert report.truncated
    assert "cut short" in report.explain()


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("{", "line 3: not JSON"),
        ("[]", "line 3: not a record"),
        ('{"nonsense":{}}', "line 3: not a record"),
        ('{"submit":{"id":"a"}}', "line 3: submit: expected the fields"),
        ('{"abort":{"seq_id":"a","reason":"why","message":""}}', "line 3: abort"),
        ('{"result":{"step":"0","rows":[],"seconds":0}}', "line 3: result: expected"),
        ('{"result":{"step":0,"rows":[1.5],"seconds":0}}', "line 3: result: expected"),
        ('{"result":{"step":true,"rows":[],"seconds":0}}', "line 3: result: expected"),
        ('{"result":{"step":0,"rows":4,"seconds":0}}', "line 3: result: expected"),
    ],
)
def test_a_corrupt_line_is_named(broken, says):
    lines = small_trace()
    lines[2] = broken
    with pytest.raises(ConfigError, match=says):
        replay(lines)


def test_a_complete_last_line_that_is_no_json_is_corrupt_not_cut_short():
    with pytest.raises(ConfigError, match="not JSON"):
        replay([*small_trace(), '{"pl\n'])


@pytest.mark.parametrize("lines", [[], ['{"reset":{}}'], ["{"]])
def test_a_trace_without_a_header_is_none(lines):
    with pytest.raises(ConfigError, match="header"):
        replay(lines)


def test_another_version_is_refused():
    lines = small_trace()
    lines[0] = lines[0].replace(f'"version":{TRACE_VERSION}', '"version":1')
    with pytest.raises(ConfigError, match="version 1"):
        replay(lines)


def test_a_header_with_a_bad_configuration_is_corrupt():
    lines = small_trace()
    lines[0] = lines[0].replace('"num_blocks":32', '"num_blocks":0')
    with pytest.raises(ConfigError, match="line 1: penstock_trace: num_blocks"):
        replay(lines)


def test_a_plan_prints_its_parts():
    plan = StepPlan(0, (1,), (Admit(0, "a", (1,), (0,), 0, SamplingSpec(), 0),), (Row(0, 0, 1, (), True),))
    assert decode(trace.encode_plan(plan)) == plan
    stalled = dataclasses.replace(plan, stalls=(Stall("b", "no_slot", 1, 0),))
    assert decode(trace.encode_plan(stalled)).stalls[0].reason == "no_slot"
    assert decode(trace.encode_result(StepResult(0, (RowResult(0, failure="x"),)))).rows[0].failure == "x"


def test_a_record_says_when_it_happened_and_replays_the_same():
    plan = StepPlan(0, (), (), ())
    (stamped,) = trace.TraceReader([trace.stamped(trace.encode_plan(plan), 12.25)])
    assert stamped == (1, plan, 12.25)
    (bare,) = trace.TraceReader([trace.encode_plan(plan)])
    assert bare.at is None
    lines = small_trace()
    again = replay([trace.stamped(line, number / 8) for number, line in enumerate(lines)])
    assert again.same
    assert dataclasses.replace(again, seconds=0.0) == replay(lines)


@pytest.mark.parametrize("at", ['"noon"', "true", "[1]"])
def test_a_time_that_is_no_number_is_named(at):
    line = trace.encode_reset()[:-1] + f',"at":{at}}}'
    with pytest.raises(ConfigError, match="line 1: at: not a number of seconds"):
        list(trace.TraceReader([line]))
