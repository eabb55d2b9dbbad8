"""`penstock verify` as people use it: its table, its last line, its files and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from verify_fakes import TEXT, BatchLM, RowLM, loaded

from penstock.bench.machine import provenance
from penstock.cli import main
from penstock.core.replaying import replay

SIZES = ("--requests", "6", "--schedules", "3", "--prompt-tokens", "16", "--new-tokens", "6")


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run the command on a toy in place of the model; (exit code, lines of stdout, stderr)."""
    monkeypatch.setattr("penstock.verify.proof.open_text", lambda source: TEXT)
    monkeypatch.setattr("penstock.loading.find_model", lambda config: config.model)
    monkeypatch.chdir(tmp_path)

    def call(model, *arguments):
        monkeypatch.setattr("penstock.rank_loading.load_on_ranks", lambda config, files, announce: loaded(model))
        monkeypatch.setattr(sys, "argv", ["penstock", "verify", "toy", "--threads", "1", *arguments])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return call


def test_an_exact_model_is_exit_code_0_and_says_so_last(run, tmp_path):
    code, lines, err = run(RowLM(), *SIZES, "--json", "found.json")
    assert (code, err) == (0, "")
    assert lines[-1].startswith("exact: 0 mismatching tokens of ")
    assert lines[-1].endswith(", largest logprob difference 0")
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["exact"], found["tally"]["mismatches"], found["trace"]) == (True, 0, None)
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


def test_a_model_that_is_not_exact_is_exit_code_1_and_leaves_a_trace_that_replays(run, tmp_path):
    code, lines, err = run(BatchLM(), *SIZES, "--json", "found.json", "--trace", "kept.jsonl")
    assert (code, err) == (1, "")
    assert lines[-1].startswith("not exact: ")
    assert any(line.startswith("first mismatch: schedule ") and "generated token" in line for line in lines)
    assert any(line.endswith(": kept.jsonl") for line in lines)
    with (tmp_path / "kept.jsonl").open() as trace:
        report = replay(trace)
    assert report.same
    command = [sys.executable, "-m", "penstock", "replay", "kept.jsonl"]  # as docs/tuning.md says
    said = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert report.explain() in said.stdout, said.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["exact"], found["trace"]) == (False, "kept.jsonl")
    failed = [schedule for schedule in found["schedules"] if schedule["first_mismatch"]]
    assert failed[0]["steps"] == report.steps
    assert f"schedule {failed[0]['schedule']}, request {failed[0]['first_mismatch']['request']}" in "\n".join(lines)
    assert found["tally"]["mismatches"] == sum(schedule["tally"]["mismatches"] for schedule in found["schedules"]) > 0


def test_a_proof_without_a_preemption_is_exit_code_1_and_says_what_was_missing(run):
    code, lines, _ = run(RowLM(), *SIZES, "--requests", "1")
    assert code == 1
    assert lines[-2].startswith("seen: 0 preemptions")
    assert lines[-1].startswith("not proved: schedule 1 was built to preempt")


def test_fail_fast_stops_after_the_first_schedule_that_differs(run, tmp_path):
    code, lines, _ = run(BatchLM(), *SIZES, "--fail-fast", "--json", "found.json")
    found = json.loads((tmp_path / "found.json").read_text())["schedules"]
    assert code == 1
    assert lines[-1].startswith("not exact: ")
    assert [bool(schedule["first_mismatch"]) for schedule in found] == [False] * (len(found) - 1) + [True]
    assert len(found) < 3


def test_the_table_has_a_line_for_each_schedule_with_what_it_did(run, tmp_path):
    _, lines, _ = run(RowLM(), *SIZES, "--json", "found.json")
    heading = next(index for index, line in enumerate(lines) if "schedule" in line and "preempted" in line)
    rows = [line.split() for line in lines[heading + 1 : heading + 4]]
    found = json.loads((tmp_path / "found.json").read_text())["schedules"]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert [row[5] for row in rows] == [schedule["cache"] for schedule in found] == ["warm", "cold", "off"]
    names = ("steps", "plain_steps", "preemptions", "recomputed", "hit_tokens")
    assert [row[-10:-5] for row in rows] == [[str(schedule[name]) for name in names] for schedule in found]


def test_the_engine_s_options_shape_the_first_schedule(run, tmp_path):
    arguments = (*SIZES, "--block-size", "3", "--max-num-seqs", "2", "--max-num-batched-tokens", "9")
    run(RowLM(), *arguments, "--no-prefix-caching", "--json", "found.json")
    first = json.loads((tmp_path / "found.json").read_text())["schedules"][0]
    sizes = (first["block_size"], first["max_num_seqs"], first["max_num_batched_tokens"], first["cache"])
    assert sizes == (3, 2, 9, "off")


def test_the_record_says_of_which_code_machine_and_kernels_it_speaks(run, tmp_path):
    run(RowLM(), *SIZES, "--json", "found.json")
    found, others = json.loads((tmp_path / "found.json").read_text()), provenance()
    assert (found["kind"], found["penstock"], found["commit"]) == ("verify", others["penstock"], others["commit"])
    assert found["machine"].keys() == others["machine"].keys()
    assert (found["dtype"], found["isa"]) == ("float32", "torch")


def test_the_seed_decides_what_is_drawn(run, tmp_path):
    records = []
    for seed in ("1", "1", "2"):
        run(RowLM(), *SIZES, "--seed", seed, "--json", "found.json")
        records.append(json.loads((tmp_path / "found.json").read_text())["prompt_tokens"])
    assert records[0] == records[1] != records[2]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--requests", "0"), "--requests"),
        (("--block-size", "0"), "--block-size"),
        (("--new-tokens", "64"), "--new-tokens"),
        ((*SIZES, "--json", "no/such/folder.json"), "--json"),
    ],
)
def test_mistakes_are_exit_code_2_and_name_the_option(run, arguments, says):
    code, _, err = run(RowLM(), *arguments)
    assert code == 2
    assert says in err
    assert "Traceback" not in err


def test_a_trace_that_cannot_be_written_names_its_option(run):
    code, _, err = run(BatchLM(), *SIZES, "--trace", "no/such/folder.jsonl")
    assert code == 2
    assert "--trace" in err


def test_a_crash_is_exit_code_1_and_leaves_its_trace(run, tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.verify.requests._SCORED_SHARE", 0.0)  # a scored prompt is many rows even alone

    class Fragile(RowLM):
        def logits(self, hidden):
            if len(hidden) > 2:
                raise RuntimeError("too many rows")
            return super().logits(hidden)

    code, lines, err = run(Fragile(), *SIZES)
    assert code == 1
    assert lines[-1] == "trace of schedule 0: penstock-verify.jsonl"
    assert "schedule 0 crashed after" in err.splitlines()[-1]
    assert "too many rows" in err.splitlines()[-1]
    with (tmp_path / "penstock-verify.jsonl").open() as trace:
        assert replay(trace).same


def test_help_says_what_is_proved_and_loads_no_torch():
    code = "import sys; sys.argv = ['penstock', 'verify', '--help']\nimport penstock.cli\n"
    code += "try:\n    penstock.cli.main()\nexcept SystemExit:\n    pass\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for option in ("--requests", "--schedules", "--seed", "--json", "--trace", "--dtype", "--device", "--threads"):
        assert option in done.stdout
    assert "bit for bit" in done.stdout
    assert "--record" not in done.stdout  # an option that would do nothing here
