"""`penstock replay`: the same plans again, the first that differs, and clear errors for files that cannot be read."""

from __future__ import annotations

import gzip
import json

import pytest
from command_line import only_line, penstock
from core_harness import Harness, config, request

from penstock.core.trace import TRACE_VERSION, stamped


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """A record of five requests, a second apart."""
    harness = Harness(config())
    for number in range(5):
        harness.submit(request(f"{number}/0", range(number, number + 6), 5))
        harness.step()
    while harness.scheduler.has_work:
        harness.step()
    return [stamped(line, float(at)) + "\n" for at, line in enumerate(harness.trace)]


def test_a_record_replays_with_no_difference(tmp_path, lines):
    file = tmp_path / "record.jsonl"
    file.write_text("".join(lines))
    done = penstock("replay", str(file))
    assert done.returncode == 0, done.stderr
    steps = sum('"plan"' in line for line in lines)
    assert done.stdout.splitlines() == [
        f"5 requests, 25 tokens drawn over {len(lines) - 2} s",
        f"{steps} steps replayed: every plan is the same",
    ]


def test_a_compressed_record_is_read_whatever_its_name(tmp_path, lines):
    file = tmp_path / "record"
    file.write_bytes(gzip.compress("".join(lines).encode()))
    done = penstock("replay", str(file))
    assert "every plan is the same" in done.stdout, done.stderr


def test_the_first_difference_is_shown_and_the_exit_code_is_1(tmp_path, lines):
    changed = list(lines)
    place = next(at for at, line in enumerate(lines) if '"plan"' in line)
    record = json.loads(changed[place])
    record["plan"]["waiting"] += 1
    changed[place] = json.dumps(record) + "\n"
    file = tmp_path / "record.jsonl"
    file.write_text("".join(changed))
    done = penstock("replay", str(file))
    assert done.returncode == 1
    assert f"0 steps replayed: line {place + 1}: step 0: waiting was 1, is now 0" in done.stdout


def test_a_record_of_another_version_is_refused_by_name(tmp_path, lines):
    file = tmp_path / "old.jsonl"
    file.write_text(lines[0].replace(f'"version":{TRACE_VERSION}', '"version":19'))
    done = penstock("replay", str(file))
    assert done.returncode == 2
    assert only_line(done.stderr).endswith(f"old.jsonl: line 1: version 19; this Penstock reads {TRACE_VERSION}")


def test_a_last_line_that_was_cut_short_is_left_out_and_told(tmp_path, lines):
    file = tmp_path / "cut.jsonl"
    file.write_text("".join(lines)[:-20])
    done = penstock("replay", str(file))
    assert done.returncode == 0
    assert "the last line was cut short and left out" in done.stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1: not a Penstock trace: the header is missing"),
        (b"\xff\xfe\n", "is not text in UTF-8"),
        (gzip.compress(b"x" * 1000, mtime=0)[:20], "is gzip and ends too early"),
        (b"\x1f\x8b" + b"x" * 40, "is gzip and damaged"),
    ],
)
def test_files_that_cannot_be_read_are_refused_by_name(tmp_path, content, message):
    file = tmp_path / "record.jsonl"
    file.write_bytes(content)
    done = penstock("replay", str(file))
    assert done.returncode == 2
    assert "record.jsonl" in only_line(done.stderr)
    assert message in done.stderr
