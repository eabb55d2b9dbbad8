"""`penstock certify` and `penstock verify --certificate` as people use them: files, lines and exit codes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import msgspec
import pytest
from certificate_makers import certificate as of_another_model

from needs import COMPILED
from penstock.certificates import read, seal, write
from penstock.cli import main
from penstock.kernels import native

pytestmark = pytest.mark.skipif(not native.available(), reason=COMPILED)

SIZES = ("--kv-cache-memory", "4MB", "--threads", "1")


@pytest.fixture
def run(monkeypatch, capsys, tmp_path, model):
    """Run a command on the model; (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(command, *arguments):
        monkeypatch.setattr(sys, "argv", ["penstock", command, str(model), *SIZES, *arguments])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code or 0, out, err

    return call


def test_one_prompt_is_certified_on_standard_output_and_confirmed(run, tmp_path):
    code, out, _ = run("certify", "--prompt", "the sea", "--max-tokens", "5", "--seed", "3")
    assert code == 0
    made = read(out.encode())
    assert (len(made.answer[0].tokens), made.request.sampling["seed"]) == (5, 3)
    (tmp_path / "made.json").write_text(out)
    code, out, _ = run("verify", "--certificate", "made.json")
    assert code == 0
    assert out.splitlines()[-2:] == [
        "made.json: equal (1 choices, 5 tokens)",
        "1 of 1 certified answers confirmed, 0 refuted, 0 undecided",
    ]


def test_many_are_certified_in_their_order_and_each_is_judged_by_its_line(run, tmp_path):
    prompts = [
        {"prompt": "a", "max_tokens": 9},
        {"messages": [{"role": "user", "content": "b"}]},
        {"prompt": "c", "n": 2},
    ]
    lines = [json.dumps({"max_tokens": 3, "seed": at} | each) for at, each in enumerate(prompts)]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, json.dumps({"prompt": "d", "n": 0})]))
    code, _, err = run("certify", "--input", "in.jsonl", "--output", "out.jsonl")
    assert code == 1
    assert "4: line 4: n" in err
    made = [read(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert [each.request.sampling["seed"] for each in made] == [0, 1, 2]
    first = made[0].answer[0]
    forged = msgspec.structs.replace(first, tokens=(*first.tokens[:-1], (first.tokens[-1] + 1) % 200))
    lies = seal(made[0].contract, made[0].request, (forged,))
    changed = write(made[1]).replace(b'"choices":1', b'"choices":2')
    elsewhere = seal(replace(made[2].contract, kernels="0" * 32), made[2].request, made[2].answer)
    (tmp_path / "judged.jsonl").write_bytes(b"\n".join([write(made[0]), write(lies), changed, write(elsewhere), b""]))
    code, out, _ = run("verify", "--certificate", "judged.jsonl")
    assert code == 1
    said = {line.split(":")[1]: line for line in out.splitlines() if line.startswith("judged.jsonl:")}
    assert said["1"].startswith("judged.jsonl:1: equal (")
    assert f"differs at choice 0, token {len(first.tokens) - 1}, token: " in said["2"]
    assert "its digest is not that of the rest" in said["3"]
    assert "equal, although" in said["4"]
    assert out.splitlines()[-1] == "1 of 4 certified answers confirmed, 2 refuted, 1 undecided"
    (tmp_path / "elsewhere.json").write_bytes(write(elsewhere))
    assert run("verify", "--certificate", "elsewhere.json")[0] == 3


def test_what_cannot_be_judged_is_a_mistake_of_the_caller(run, tmp_path):
    (tmp_path / "other.json").write_bytes(write(of_another_model()))
    code, _, err = run("verify", "--certificate", "other.json")
    assert code == 2
    assert "is of another model: its model is 5e5e" in err
    assert run("verify", "--certificate", "missing.json")[0] == 2
    for option, value in (("--dtype", "float32"), ("--schedules", "3")):
        code, _, err = run("verify", "--certificate", "other.json", option, value)
        assert code == 2
        assert option in err


def test_a_file_of_nothing_is_refuted_without_the_model(run, tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.verify.recomputing.assemble", None)
    (tmp_path / "empty.json").write_bytes(b"")
    code, out, _ = run("verify", "--certificate", "empty.json")
    assert code == 1
    assert out.splitlines()[0].startswith("empty.json: differs: it is no certificate")
