"""`penstock bench speculate`: what it asks, that it compares every answer, and what it reports."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from penstock.bench.speculation import TaskRun, run_both, speculation_table, summary
from penstock.bench.speculation_tasks import TASKS
from penstock.cli import penstock
from penstock.contract.errors import EngineFault


def test_no_two_streams_ask_the_same():
    for task in TASKS:
        asked = [task.ask(stream, 500) for stream in range(8)]
        assert len({str(each) for each in asked}) == 8, task.name


def test_runs_are_compared_in_pairs():
    plain = [TaskRun(2.0, 10, ((1, 2), (3,))), TaskRun(4.0, 10, ((1, 2), (3,)))]
    guessed = [TaskRun(1.0, 5, ((1, 2), (3,))), TaskRun(1.0, 6, ((1, 2), (3,)))]
    row = summary("a task", 2, plain, guessed)
    assert (row["tokens"], row["ratio_lowest"], row["ratio"], row["ratio_highest"]) == (3, 2.0, 3.0, 4.0)
    assert "a task" in speculation_table([row])


class Engine:
    """Answers `[1, 2, 3, 4]` to everything, some tokens a step, each of which takes `seconds`."""

    def __init__(self, clock, order, seconds, a_step):
        self.clock, self.order, self.seconds, self.a_step = clock, order, seconds, a_step
        self.scheduler = SimpleNamespace(stats=SimpleNamespace(steps=0))
        self.forms, self.prompts, self.given = [], {}, {}

    def generate(self, prompts, sampling_params, *, use_tqdm):
        self.clock[0] += 100.0
        self.forms.append(str(sampling_params.structured_outputs or ""))
        return [SimpleNamespace(prompt_token_ids=[7, at]) for at, _ in enumerate(prompts)]

    chat = generate

    def add_request(self, prompt, sampling_params):
        self.prompts[str(len(self.prompts))] = prompt
        self.given[str(len(self.given))] = 0
        self.asked = str(sampling_params.structured_outputs or "")
        return str(len(self.given) - 1)

    def has_unfinished_requests(self):
        return any(given < 4 for given in self.given.values())

    def step(self):
        self.clock[0] += self.seconds
        self.order.append(self.a_step)
        self.scheduler.stats.steps += 1
        moved = []
        for request_id, given in self.given.items():
            self.given[request_id] = min(4, given + self.a_step)
            tokens = [1, 2, 3, 4][: self.given[request_id]]
            outputs = [SimpleNamespace(token_ids=tokens)]
            moved.append(SimpleNamespace(request_id=request_id, error="", outputs=outputs))
        return moved


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_engines_take_turns_and_what_comes_before_costs_nothing(task):
    clock, order = [0.0], []
    engines = Engine(clock, order, 1.0, 1), Engine(clock, order, 1.5, 2)
    plain, guessed = run_both(*engines, task, 2, 500, lambda: clock[0])
    assert plain == TaskRun(4.0, 4, ((1, 2, 3, 4),) * 2)
    assert guessed == TaskRun(3.0, 2, ((1, 2, 3, 4),) * 2)
    assert order == [1, 2, 1, 1, 2, 1]  # the engine with fewer tokens goes next; on a tie, the first
    for engine in engines:
        assert list(engine.prompts.values()) == [[7, 0], [7, 1]]
        assert engine.asked in engine.forms if task.schema is not None else len(engine.forms) == 1


def test_a_failed_answer_is_no_figure():
    clock, order = [0.0], []
    broken = Engine(clock, order, 1.0, 1)
    broken.step = lambda: [SimpleNamespace(request_id="0", error="it broke", outputs=[])]
    with pytest.raises(EngineFault, match="chat: it broke"):
        run_both(broken, Engine(clock, order, 1.0, 1), TASKS[3], 1, 500, lambda: clock[0])


def test_an_answer_that_differs_is_no_figure():
    with pytest.raises(EngineFault, match="changed an answer"):
        summary("a task", 1, [TaskRun(1.0, 2, ((1, 2),))], [TaskRun(1.0, 2, ((1, 3),))])


@pytest.mark.deep
def test_the_command_measures_every_task_and_writes_a_record(tmp_path):
    target = tmp_path / "record.json"
    ran = CliRunner().invoke(
        penstock, ["bench", "speculate", "--streams", "2", "--repeats", "1", "--json", str(target)]
    )
    assert ran.exit_code == 0, ran.output
    assert "every answer is the same" in ran.output
    record = json.loads(target.read_text())
    assert [row["task"] for row in record["rows"]] == [task.name for task in TASKS]
    assert all(row["ratio"] > 0 and row["tokens"] > 0 for row in record["rows"])
    steps = {row["task"]: (row["plain_steps"], row["guessed_steps"][0]) for row in record["rows"]}
    assert steps["code edit"][1] < steps["code edit"][0]
