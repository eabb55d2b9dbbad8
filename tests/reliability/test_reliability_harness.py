"""The harness itself: it tells a right answer from a wrong one, counts what it says it counts, and hides no miss."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scripted_engine import ScriptedEngine, always, delta, finished, stop
from server_harness import running

import run
from harness import processes, record
from harness.batches import difference
from harness.client import Answer, Event, ask, said
from harness.requests import KINDS, mixed_requests
from harness.row import Depth, Measured, Outcome, Row, judge
from harness.server import Server
from penstock.exec import drawing
from planted import runner as planted_runner
from planted.faults import FAULTS, fault_in, mark
from rows.overload import percentile
from rows.soak import slope
from rows.sockets import SEEDS, mutated, passed_the_guard
from rows.table import ROWS, chosen
from rows.tests import read_summary, run_tests

TEXTS = ("The", " sea", " was", " calm.")


def answer(*texts, end="stop", done=True):
    chunks = [{"choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in texts]
    chunks.append({"choices": [{"index": 0, "text": "", "finish_reason": end}]})
    chunks.append({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": len(texts)}})
    events = [Event(0.1 * number, json.dumps(chunk)) for number, chunk in enumerate(chunks)]
    return Answer(status=200, events=[*events, *([Event(1.0, "[DONE]")] if done else [])])


# ---- answers


def test_an_answer_in_other_pieces_says_the_same_and_any_other_byte_is_told():
    [request] = mixed_requests(1, 8)
    want = said(answer(*TEXTS))
    other_pieces = answer("The sea", " was calm.", end="stop")
    other_pieces.events[-2] = answer(*TEXTS).events[-2]
    assert difference(request, want, other_pieces) == ""
    for wrong in (
        ("The", " sea", " sea", " was", " calm."),
        ("The", " was", " calm."),
        ("The", " sea", " was", " calm"),
    ):
        assert "text of choice 0" in difference(request, want, answer(*wrong))
    assert "finish of choice 0" in difference(request, want, answer(*TEXTS, end="length"))
    assert "did not finish" in difference(request, want, answer(*TEXTS, done=False))
    assert "completion_tokens" in difference(request, want, answer("The sea", *TEXTS[2:]))


def test_calls_and_log_probabilities_are_joined():
    parts = [
        {"tool_calls": [{"index": 0, "function": {"name": "set", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '":1}'}}]},
    ]
    chunks = [{"choices": [{"index": 0, "delta": part, "logprobs": {"content": [{"logprob": -1}]}}]} for part in parts]
    got = said(Answer(status=200, events=[Event(0.0, json.dumps(chunk)) for chunk in chunks]))
    assert got["choices"]["0"]["calls"] == {"0": {"name": "set", "arguments": '{"a":1}'}}
    assert got["choices"]["0"]["logprobs"] == [{"logprob": -1}] * 3


def test_a_stream_is_read_to_its_end_with_its_first_token():
    with running(ScriptedEngine(script=always(*map(delta, TEXTS), stop(), finished()))) as url:
        whole = asyncio.run(ask(url, "/v1/completions", {"prompt": "x", "stream": True}))
        refused = asyncio.run(ask(url, "/v1/completions", {"prompt": 5.5}))
    assert whole.finished
    assert said(whole)["choices"]["0"]["text"] == "".join(TEXTS)
    assert 0 < whole.first_token <= whole.ended - whole.sent
    assert (refused.finished, refused.status, refused.error["param"]) == (False, 400, "prompt")


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: {}\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
    ],
)
def test_an_answer_that_breaks_off_is_not_finished(sent):
    async def broken() -> Answer:
        async def serve(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(sent)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await ask(f"http://127.0.0.1:{port}", "/", seconds=10)

    assert not asyncio.run(broken()).finished


def test_an_error_event_is_no_finished_stream():
    failed = answer(*TEXTS)
    failed.events.insert(2, Event(0.2, '{"error":{"code":"request_poisoned"}}'))
    assert not failed.finished
    assert failed.error["code"] == "request_poisoned"


def test_requests_are_of_every_kind_and_random_ones_have_a_seed():
    requests = mixed_requests(3 * len(KINDS), 16)
    assert [each.kind for each in requests] == [*KINDS] * 3
    assert all("seed" in each.body or each.body["temperature"] == 0 for each in requests)
    assert len({json.dumps(each.body) for each in requests}) == len(requests)


# ---- faults and fuzz


def test_a_marked_request_goes_wrong_in_every_runner_and_no_other_does(monkeypatch):
    runs = []
    inner = SimpleNamespace(run=lambda plan: runs.append(plan.step), reset=lambda: False)
    faulty = planted_runner.FaultyRunner(inner)

    def plan(step, rows, admits=(), releases=()):
        made = [SimpleNamespace(slot=slot, tokens=tokens) for slot, tokens in admits]
        return SimpleNamespace(
            step=step, releases=releases, admits=made, rows=[SimpleNamespace(slot=row) for row in rows]
        )

    faulty.run(plan(0, [0], [(0, [1, 2, 3]), (1, [7, *mark("raises"), 8])]))
    with pytest.raises(ValueError, match="planted"):
        faulty.run(plan(1, [0, 1]))
    faulty.run(plan(2, [0]))
    faulty.run(plan(3, [1], [(1, [5])], releases=[1]))
    assert runs == [0, 2, 3]


def test_the_logits_of_a_marked_sequence_are_lost_wherever_its_row_stands(monkeypatch):
    given = []
    monkeypatch.setattr(drawing.Drawing, "draw", lambda _self, _rows, logits, _pending: given.append(logits.isnan()))
    planted_runner.lose_numbers({4: planted_runner.NO_NUMBER, 2: "", 7: "raises"})
    rows = [SimpleNamespace(slot=slot, drafts=drafts) for slot, drafts in ((7, (1,)), (4, (1, 2)), (2, ()))]
    drawing.Drawing.draw(None, rows, torch.zeros(6, 5), None)
    assert given[0].all(dim=1).tolist() == [False, False, True, True, True, False]
    assert int(given[0].sum()) == 3 * 5


def test_every_fault_has_its_mark_and_nothing_else_is_one():
    assert [fault_in([5, *mark(fault), 6]) for fault in FAULTS] == list(FAULTS)
    assert fault_in(mark(FAULTS[0])[:2]) == fault_in([1, 2, 3]) == fault_in([]) == ""


JSON_OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n"


def test_what_a_caller_without_a_key_is_given_is_found():
    refused = b"HTTP/1.1 401 Unauthorized\r\ncontent-type: application/json\r\n\r\n{}"
    page = b"HTTP/1.1 200 OK\r\ncontent-type: text/html; charset=utf-8\r\n\r\n<html>"
    live = JSON_OK + b'{"status":"live"}'
    assert [passed_the_guard(b"x", each) for each in (b"", refused, page, live, refused + live)] == [""] * 5
    assert "without a key" in passed_the_guard(b"x", JSON_OK + b'{"object":"list"}')
    assert "without a key" in passed_the_guard(b"x", refused + JSON_OK + b'{"object":"list"}')
    assert "HTTP 500" in passed_the_guard(b"x", b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: a\r\n\r\n")


def test_changed_requests_are_changed_and_never_have_a_key():
    chance = random.Random(0)
    changed = [mutated(seed, chance) for seed in SEEDS for _ in range(20)]
    assert sum(each not in SEEDS for each in changed) > len(changed) / 2
    assert not any(b"reliability-key" in each for each in changed)


# ---- numbers


def test_depths_growth_and_percentiles():
    assert (Depth.DEEP.of(50), Depth.QUICK.of(50), Depth.QUICK.of(5), Depth.QUICK.of(9, 2)) == (50, 5, 1, 2)
    assert slope([5, 7, 9, 11]) == pytest.approx(2)
    assert slope([5]) == 0
    assert percentile([float(each) for each in range(100)], 0.99) == 99


def test_verdicts_of_pytest_are_read_once_each():
    lines = [
        "tests/core/test_a.py::test_one PASSED   [ 33%]\n",
        "tests/core/test_a.py::test_two[a b] FAILED   [ 66%]\n",
        "tests/core/test_a.py::test_three SKIPPED (no)   [100%]\n",
        "FAILED tests/core/test_a.py::test_two[a b] - AssertionError\n",
    ]
    assert read_summary(lines) == ({"passed": 1, "failed": 1, "skipped": 1}, ["tests/core/test_a.py::test_two[a b]"])


def test_tests_are_counted_under_the_options_of_this_project(tmp_path):
    file = tmp_path / "test_counted.py"
    file.write_text("def test_right(): pass\ndef test_wrong(): assert False\n")
    progress = Counted()
    counts, failed = run_tests(progress, [str(file)])
    assert (counts, len(failed)) == ({"passed": 1, "failed": 1, "skipped": 0}, 1)
    assert (progress.expected, progress.done) == (2, 2)
    file.write_text("import pytest\n@pytest.mark.skip\ndef test_skipped(): pass\n")
    with pytest.raises(RuntimeError, match="told of no test"):
        run_tests(progress, [str(file)])


class Counted:
    def __init__(self):
        self.expected = self.done = 0

    def expect(self, total):
        self.expected += total

    def update(self, count=1):
        self.done += count


# ---- the table


def row(run_row=None, **more):
    return Row("R0", "title", "target", "peers", run_row, **more)


def entry(outcome, **more):
    return {"id": "R0", "outcome": outcome, "figure": "3 of 4", "misses": ["one | lost"], "busy": 0.0} | more


def test_a_table_hides_nothing():
    about = {"depth": "quick", "taken": "2026-01-02T03:04:05Z", "commit": "abc"}
    assert "| not measured |" in record.table([row()], {})
    assert "| not measured yet on an idle machine |" in record.table([row(run.try_row, timed=True)], {})
    assert "| because |" in record.table([row(instead="because")], {})
    missed = record.table([row()], {"R0": entry("missed") | about})
    assert "**missed**: 3 of 4 (quick, 2026-01-02, `abc`); one \\| lost" in missed
    assert "the row itself failed" in record.table([row()], {"R0": entry("failed") | about})
    assert "preliminary" in record.table([row(timed=True)], {"R0": entry("reached", busy=0.5) | about})
    assert "preliminary" not in record.table([row()], {"R0": entry("reached", busy=0.5) | about})


def test_a_deep_record_stays_until_there_is_a_newer_deep_one():
    def taken(depth, day, figure):
        return {"depth": depth, "taken": day, "commit": "c", "rows": [entry("reached", figure=figure)]}

    records = [taken("quick", "1", "a"), taken("deep", "2", "b"), taken("quick", "3", "c")]
    assert record.newest(records)["R0"]["figure"] == "b"
    assert record.newest([*records, taken("deep", "4", "d")])["R0"]["figure"] == "d"
    assert record.newest(records[:1] + records[2:])["R0"]["figure"] == "c"


def test_a_row_that_breaks_off_has_failed_and_others_go_on(capsys):
    def broken(depth, progress):
        raise RuntimeError("no server")

    rows = [row(broken), row(lambda depth, progress: judge("fine", [])), row()]
    found = run.measure(rows, Depth.QUICK)
    assert [each["outcome"] for each in found["rows"]] == ["failed", "reached", "not measured"]
    assert "RuntimeError: no server" in found["rows"][0]["figure"]
    assert json.dumps(found)
    assert "not measured" in capsys.readouterr().out


def test_a_miss_is_a_miss_however_many_there_are():
    measured = judge("a", (str(number) for number in range(100)))
    assert measured.outcome is Outcome.MISSED
    assert (len(measured.misses), measured.values["misses"]) == (8, 100)
    assert Measured("a").outcome is Outcome.REACHED


def test_rows_are_chosen_by_name_and_no_two_have_the_same():
    assert len({each.id for each in ROWS}) == len(ROWS)
    assert [each.id for each in chosen("R12,R11, R7")] == ["R7", "R11", "R12"]
    assert chosen("") == list(ROWS)
    with pytest.raises(ValueError, match="no row R99; rows are R1, "):
        chosen("R7,R99")


def test_the_page_shows_what_the_records_say():
    page = run.PAGE.read_text(encoding="utf-8")
    text = record.table(ROWS, record.newest(record.read_records(run.RESULTS)))
    assert record.published(page, text) == page, "run .venv/bin/python reliability/run.py --publish"


def test_the_runner_is_the_process_that_calls_itself_so_and_not_the_one_that_forks_it():
    code = (
        "import os, sys\n"
        "def call(name): open('/proc/self/comm', 'w').write(name)\n"
        "call('penstock-zygote')\n"
        "if os.fork():\n"
        "    os.wait()\n"
        "    print(flush=True)\n"
        "else:\n"
        "    call('penstock-runner')\n"
        "    print(os.getpid(), flush=True)\n"
        "sys.stdin.read(1)\n"
    )
    command = [sys.executable, "-c", code, "penstock.runner_process"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as zygote:
        here = Server("", SimpleNamespace(pid=zygote.pid), Path())
        runner = int(zygote.stdout.readline())
        assert here.runner() == runner != zygote.pid
        assert processes.family(zygote.pid) == [zygote.pid, runner]
        os.kill(runner, signal.SIGKILL)
        zygote.stdout.readline()
        assert here.runner() == 0
        zygote.communicate(b"x")
