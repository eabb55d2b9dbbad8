"""`penstock explain`: from a record, and from a server."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from command_line import only_line, penstock
from engine_harness import build, terminal_of
from scripted_engine import ScriptedEngine, always, delta, stop
from server_harness import running

from penstock.cli.explain import WORDS
from penstock.contract.events import RequestFinished, Usage
from penstock.contract.measurements import PARTS, LatencyParts, Timings
from penstock.core import Scheduler
from penstock.engine import Engine, Recorder


@pytest.fixture
def recorded(tmp_path) -> tuple[Path, LatencyParts]:
    """A record of two requests, and the parts that the engine reported for the second."""
    path, harness = tmp_path / "run.trace", build(max_num_seqs=1)
    recorder = Recorder(path, harness.config, harness.clock)
    harness.engine = Engine(Scheduler(harness.config), harness.runner, harness.text, recorder, clock=harness.clock)
    harness.submit("hello", max_tokens=20)
    second = harness.submit("there", max_tokens=4)
    harness.run()
    harness.engine.close()
    return path, terminal_of(harness.outputs[second]).timings.parts


def test_every_part_has_its_words():
    assert tuple(WORDS) == PARTS


def test_a_record_gives_the_parts_that_the_engine_gave(recorded):
    path, parts = recorded
    found = json.loads(penstock("explain", "request-1", "--record", str(path), "--json").stdout)
    for name in PARTS:
        assert found["parts_ms"][name] == pytest.approx(1000 * getattr(parts, name), abs=0.02), name
    assert found["behind"] == ["request-0/0"]
    assert (found["sequence"], found["over"]) == ("request-1/0", True)


def test_people_get_a_line_for_each_part_the_largest_first(recorded):
    path, _ = recorded
    head, first, *rest = penstock("explain", "request-1/0", "--record", str(path)).stdout.splitlines()
    assert head.startswith("request-1/0: ")
    assert "queue" in first
    assert any("for no_slot" in line for line in rest)
    assert rest[-1] == "It waited in the queue behind request-0/0."


def test_perfetto_gets_the_steps_and_what_took_them(recorded, tmp_path):
    path, parts = recorded
    out = tmp_path / "life.json"
    penstock("explain", "request-1", "--record", str(path), "--perfetto", str(out))
    events = json.loads(out.read_text(encoding="utf-8"))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    tracks = [[event for event in spans if event["tid"] == track] for track in (0, 1)]
    for track in tracks:
        assert track[0]["ts"] == 0.0
        assert sum(event["dur"] for event in track) == pytest.approx(1e6 * parts.total, rel=1e-3)
        for event, following in pairwise(track):
            assert event["ts"] + event["dur"] == pytest.approx(following["ts"], abs=0.01)
    assert any(event["name"] == "step 20" and "rows" in event["args"]["plan"] for event in tracks[0])
    decoded = sum(event["dur"] for event in tracks[1] if event["name"] == "decode")
    assert decoded == pytest.approx(1e6 * parts.decode, rel=1e-3)


def test_one_that_goes_on_is_explained_so_far(recorded, tmp_path):
    path, _ = recorded
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    cut = tmp_path / "cut.trace"
    cut.write_text("".join(lines[: len(lines) // 2]), encoding="utf-8")
    assert penstock("explain", "request-1", "--record", str(cut)).stdout.splitlines()[0].endswith(", and it goes on")


def test_mistakes_are_one_line(recorded, tmp_path):
    path, _ = recorded
    untimed = tmp_path / "untimed.trace"
    lines = path.read_text(encoding="utf-8").splitlines()
    untimed.write_text("\n".join(line.rpartition(',"at"')[0] + "}" for line in lines) + "\n", encoding="utf-8")
    for arguments, word in (
        (["nobody", "--record", str(path)], "there is no nobody in it"),
        (["request-1", "--record", str(untimed)], "says no time"),
        (["request-1", "--perfetto", str(tmp_path / "x.json")], "--perfetto: needs --record"),
        (["request-1", "--record", str(path), "--perfetto", str(tmp_path / "no" / "x.json")], "cannot be written"),
    ):
        said = penstock("explain", *arguments)
        assert said.returncode == 2, said
        assert word in only_line(said.stderr)


def test_a_server_is_asked():
    now = time.monotonic()
    life = Timings(now, now, now, now, now, parts=LatencyParts(decode=0.002, behind=("somebody/0",)))
    engine = ScriptedEngine(script=always(delta("Hi"), stop(), RequestFinished(Usage(3, 1), life)))
    with running(engine) as url:
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "Hi"})
        said = penstock("explain", answer.json()["id"], "--base-url", url).stdout
        unknown = penstock("explain", "cmpl-nobody", "--base-url", url)
    assert f"{answer.json()['id']}: " in said
    assert "got its tokens" in said
    assert "behind somebody/0" in said
    assert unknown.returncode == 2
    assert "No such request is remembered" in only_line(unknown.stderr)
