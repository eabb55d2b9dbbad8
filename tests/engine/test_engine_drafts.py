"""An engine with a drafter, and one whose runner takes the next plan early: the same outputs, in fewer steps."""

from __future__ import annotations

from dataclasses import replace

import engine_harness as harness
import pytest
from engine_harness import finishes_of, terminal_of, tokens_of

from penstock.contract.errors import ConfigError
from penstock.contract.plan import Draft, Draftable
from penstock.core.replaying import replay
from penstock.engine import Engine

PROMPT = "hello"


class Foreseeing:
    """Knows what comes next, and says some of it wrong."""

    def __init__(self, bench: harness.Harness, right: bool, count: int = 3) -> None:
        self._bench, self._right, self._count = bench, right, count
        self.asked: list[int] = []
        self.forgotten: list[str] = []

    def draft(self, sequence: Draftable) -> tuple[Draft, ...]:
        self.asked.append(sequence.most)
        assert sequence.prompt_tokens == len(PROMPT)
        known = len(sequence.tokens) - len(PROMPT)
        coming = self._bench.expected(PROMPT, known + min(sequence.most, self._count))[known:]
        tokens = coming if self._right else tuple((token + 1) % 8 for token in coming)
        return (Draft(sequence.seq_id, tokens, "foreseeing"),) if tokens else ()

    def forget(self, seq_id: str) -> None:
        self.forgotten.append(seq_id)


def drafting(right: bool, **options) -> harness.Harness:
    bench = harness.build(**options)
    old = bench.engine
    bench.drafter = Foreseeing(bench, right)
    bench.engine = Engine(old.scheduler, bench.runner, bench.text, old._recorder, drafter=bench.drafter)
    return bench


def run(bench: harness.Harness, **rules) -> tuple[list, int]:
    one = bench.submit(PROMPT, **rules)
    bench.run()
    return bench.outputs[one], bench.engine.health().steps


@pytest.mark.parametrize(("right", "steps"), [(True, 6), (False, 21)])
def test_drafts_change_the_number_of_steps_and_nothing_else(right, steps, tmp_path):
    plain, _ = run(harness.build(), max_tokens=21)
    bench = drafting(right, record=tmp_path / "trace")
    outputs, taken = run(bench, max_tokens=21)
    assert tokens_of(outputs) == tokens_of(plain) == bench.expected(PROMPT, 21)
    assert (finishes_of(outputs), terminal_of(outputs).usage) == (finishes_of(plain), terminal_of(plain).usage)
    assert taken == steps
    assert bench.engine.health().generated_tokens == 21
    assert len(bench.drafter.forgotten) == 1
    ((drafter, count),) = bench.engine.measurements().drafts
    timings = terminal_of(outputs).timings
    assert (drafter, count.rows) == (
        "foreseeing",
        steps - 1 - (not right),
    )  # no row of a prompt, and none that may draw one token only
    assert count.tokens == timings.drafted > 0
    assert count.accepted == timings.accepted == (21 - steps if right else 0)
    bench.engine.close()
    report = replay((tmp_path / "trace").read_text().splitlines(keepends=True))
    assert report.same, report.explain()


def test_a_stop_string_among_right_drafts_ends_the_choice_there():
    bench = drafting(True)
    stop = bench.spelled(bench.expected(PROMPT, 9))[5:8]
    outputs, _ = run(bench, max_tokens=30, strings=(stop,))
    plain, _ = run(harness.build(), max_tokens=30, strings=(stop,))
    assert tokens_of(outputs) == tokens_of(plain)
    assert terminal_of(outputs).usage == terminal_of(plain).usage
    assert bench.engine.health().free_blocks == bench.config.num_blocks
    assert len(set(bench.drafter.forgotten)) == 1


def test_a_request_that_is_aborted_is_forgotten_by_who_guesses():
    bench = drafting(True)
    one = bench.submit(PROMPT, max_tokens=40)
    bench.step()
    bench.step()
    bench.collect(bench.engine.abort(one))
    assert len(bench.drafter.forgotten) == 1


@pytest.mark.parametrize("rules", [{"max_tokens": 21}, {"max_tokens": 50, "ignore_eos": False}])
def test_a_runner_that_overlaps_is_given_the_next_plan_early(rules, tmp_path):
    plain, _ = run(harness.build(), **rules)
    bench = harness.build(depth=2, record=tmp_path / "trace")
    outputs, _ = run(bench, **rules)
    assert tokens_of(outputs) == tokens_of(plain)
    assert terminal_of(outputs).usage == terminal_of(plain).usage
    assert bench.engine.health().free_blocks == bench.config.num_blocks
    assert not bench.engine.has_work
    bench.engine.close()
    lines = (tmp_path / "trace").read_text().splitlines(keepends=True)
    assert [line[2:6] for line in lines[2:5]] == ["plan", "plan", "resu"]
    report = replay(lines)
    assert report.same, report.explain()


def test_many_asks_on_an_overlapping_runner_are_answered_as_alone():
    bench = harness.build(depth=2, num_blocks=24)
    prompts = [f"prompt number {'x' * i}" for i in range(12)]
    requests = {prompt: bench.submit(prompt, max_tokens=15) for prompt in prompts}
    for _ in range(5):
        bench.step()
    bench.collect(bench.engine.abort(requests.pop(prompts[0])))
    bench.run()
    for prompt, one in requests.items():
        assert tokens_of(bench.outputs[one]) == bench.expected(prompt, 15)
    assert bench.engine.health().free_blocks == 24
    bench.engine.scheduler.check()


@pytest.mark.parametrize("step", [0, 3])
def test_a_step_that_raises_while_another_is_in_flight_changes_no_answer(step):
    bench = harness.build(depth=2)
    one = bench.submit(PROMPT, max_tokens=20)
    bench.runner.crash_at(step)
    bench.run()
    assert tokens_of(bench.outputs[one]) == bench.expected(PROMPT, 20)


def test_more_plans_than_the_runner_takes_are_refused():
    bench = harness.build(depth=2)

    class Plain:
        def run(self, plan):
            return bench.runner.run(plan)

    with pytest.raises(ConfigError, match="depth"):
        Engine(bench.engine.scheduler, Plain(), bench.text)


@pytest.mark.parametrize(("known", "most"), [(0, 61), (30, 40), (60, 12)])
@pytest.mark.parametrize("wrong_from", [None, 5])
def test_an_answer_that_is_known_takes_fewer_steps_and_a_wrong_one_changes_nothing(known, most, wrong_from):
    bench = harness.build()
    expected = bench.expected(PROMPT, 60)
    told = [token if wrong_from is None or at < wrong_from else (token + 1) % 8 for at, token in enumerate(expected)]
    resolved = bench.intake.resolve(harness.request_of("one", bench.text, PROMPT, max_tokens=60, n=2))
    bench.outputs["one"] = []
    bench.engine.submit(replace(resolved, expected=(tuple(told[:known]), ())))
    bench.run()
    assert tokens_of(bench.outputs["one"]) == expected
    assert tokens_of(bench.outputs["one"], 1) == bench.expected(PROMPT, 60, choice=1)
    assert not bench.engine._expected
    alone = harness.build()
    resolved = alone.intake.resolve(harness.request_of("one", alone.text, PROMPT, max_tokens=60))
    alone.outputs["one"] = []
    alone.engine.submit(replace(resolved, expected=(tuple(told[:known]),)))
    alone.run()
    assert tokens_of(alone.outputs["one"]) == expected
    if wrong_from is None:
        assert alone.engine.health().steps <= most
