"""`penstock bench speculate`: what it asks, that it compares every answer, and what it reports."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from penstock.bench.speculation import TaskRun, run_task, speculation_table, summary
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


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_prompts_and_forms_are_ready_before_the_clock_starts(task):
    asked: list[tuple[float, int]] = []  # when, and the form's size

    class Engine:
        def generate(self, prompts, sampling_params, *, use_tqdm):
            asked.append((clock[0], len(str(sampling_params.structured_outputs or ""))))
            clock[0] += 1.0
            answer = SimpleNamespace(error=None, outputs=[SimpleNamespace(token_ids=[1, 2])])
            return [answer for _ in prompts]

        chat = generate

    clock = [0.0]
    run = run_task(Engine(), task, 2, 500, lambda: 0, lambda: clock[0])
    assert run.seconds == 1.0
    *before, measured = [form for _, form in asked]
    assert measured in before if task.schema is not None else len(before) == 1


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
