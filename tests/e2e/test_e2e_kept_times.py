"""Step times that one server has learned and the next one begins with, and the file between them."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from served import FLEET, serve
from tiny_checkpoints import BYTE_VOCABULARY, VARIANTS, write_byte_tokenizer, write_checkpoint

from penstock.contract.known_times import KnownParts, KnownTimes
from penstock.core.replaying import replay
from penstock.core.trace import TraceReader
from penstock.kept_times import KeptTimes

ONE = KnownParts((0.25,), (0.5,), learned=7)
TWO = KnownParts((0.001, 0.0005), (0.002, 0.001), learned=9)
TIMES = KnownTimes(
    KnownParts((0.01, 2e-4, 0.001, 1e-7, 0.002, 1e-8), (0.001, 1e-4, 1e-4, 1e-8, 2e-4, 1e-9), learned=500),
    chunks=True,
    guessing=KnownParts((0.002, 0.0001), (0.1, 0.1), learned=3),
    drafts=((1, TWO), (3, TWO)),
    reading=ONE,
)
ABOUT = {"model": "abc", "threads": 2}


def damaged(path: Path, change) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_what_was_written_is_read_with_more_doubt(tmp_path):
    kept = KeptTimes(tmp_path / "folder", ABOUT)
    assert kept.read() is None
    kept.write(TIMES)
    found = KeptTimes(tmp_path / "folder", ABOUT).read()
    assert found == TIMES.later()
    assert found.steps.seconds == TIMES.steps.seconds
    assert all(later > earlier for later, earlier in zip(found.steps.doubts, TIMES.steps.doubts, strict=True))
    assert [path.name for path in (tmp_path / "folder").iterdir()] == [kept.path.name]


def test_another_model_or_number_of_threads_has_a_file_of_its_own(tmp_path):
    KeptTimes(tmp_path, ABOUT).write(TIMES)
    for other in ({**ABOUT, "model": "abd"}, {**ABOUT, "threads": 1}):
        kept = KeptTimes(tmp_path, other)
        assert kept.read() is None
        kept.write(replace(TIMES, reading=None))
        assert kept.read().reading is None
    assert KeptTimes(tmp_path, ABOUT).read() == TIMES.later()


def test_nothing_is_written_unless_something_was_learned(tmp_path):
    kept = KeptTimes(tmp_path, ABOUT)
    kept.write(None)
    assert not kept.path.exists()
    kept.write(TIMES)
    kept.path.unlink()
    kept.write(TIMES)
    assert not kept.path.exists()
    kept.write(replace(TIMES, steps=replace(TIMES.steps, learned=501)))
    assert kept.path.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("times"),
        lambda data: data["times"].pop("steps"),
        lambda data: data["times"]["steps"].update(seconds=[0.1, 0.2]),  # one of another number of parts
        lambda data: data["times"]["steps"].update(seconds=[-0.1] * 6),
        lambda data: data["times"]["steps"].update(doubts=["much"] * 6),
        lambda data: data["times"]["steps"].update(learned="many"),
        lambda data: data["times"].update(drafts=[[1]]),
        lambda data: data["times"].update(chunks="yes"),
        lambda data: data["times"]["guessing"].update(seconds=[float("nan"), 1]),
        lambda data: data["times"]["reading"].update(seconds=[10**400]),
    ],
)
def test_a_damaged_file_is_ignored_said_and_written_anew(tmp_path, change, caplog):
    kept = KeptTimes(tmp_path, ABOUT)
    kept.write(TIMES)
    damaged(kept.path, change)
    with caplog.at_level(logging.WARNING):
        assert kept.read() is None
    assert str(kept.path) in caplog.text
    later = KeptTimes(tmp_path, ABOUT)
    later.write(TIMES)
    assert later.read() == TIMES.later()


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00", "9" * 5000])
def test_what_is_no_such_file_is_ignored_and_said(tmp_path, text, caplog):
    kept = KeptTimes(tmp_path, ABOUT)
    kept.path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert kept.read() is None
    assert str(kept.path) in caplog.text


def test_a_file_of_another_version_is_ignored(tmp_path, monkeypatch, caplog):
    KeptTimes(tmp_path, ABOUT).write(TIMES)
    monkeypatch.setattr("penstock.kept_times.__version__", "99.0")
    with caplog.at_level(logging.INFO):
        assert KeptTimes(tmp_path, ABOUT).read() is None
    assert "another version" in caplog.text


def test_a_folder_that_cannot_be_written_costs_a_line_in_the_log(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    kept = KeptTimes(tmp_path / "file", ABOUT)
    kept.write(TIMES)
    assert kept.read() is None
    assert "not kept" in caplog.text


def test_the_eldest_files_make_way(tmp_path):
    for number in range(70):
        KeptTimes(tmp_path, {"model": str(number)}).write(TIMES)
    assert len(list(tmp_path.iterdir())) == 64
    assert KeptTimes(tmp_path, {"model": "69"}).read() is not None


@pytest.mark.skipif(bool(FLEET), reason="a fleet's replicas have a trace each")
def test_a_second_server_begins_with_what_the_first_has_learned_and_its_trace_is_replayed(tmp_path, monkeypatch):
    model, cache = tmp_path / "tiny", tmp_path / "cache"
    model.mkdir()
    write_checkpoint(model, "llama", VARIANTS["llama"][0], vocab_size=BYTE_VOCABULARY)
    write_byte_tokenizer(model)
    monkeypatch.setenv("PENSTOCK_CACHE", str(cache))
    options = ("--keep-step-times", "--threads", "1", "--max-num-seqs", "4", "--kv-cache-memory", "256KiB")
    known = []
    for name in ("first", "second"):
        with serve(tmp_path / name, str(model), *options) as served:
            body = {"prompt": [1, 2, 3], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            httpx.post(f"{served.url}/v1/completions", json=body).raise_for_status()
            metrics = httpx.get(f"{served.url}/metrics").text
        lines = (tmp_path / name).read_text().splitlines(keepends=True)
        known.append(TraceReader(lines).header().config.step_times)
        assert replay(lines).same
    first, second = known
    assert first is None or first.steps.learned == 0  # calculated, where the machine's limits can be measured
    assert second.steps.learned == 8
    assert min(second.steps.seconds) >= 0 < second.steps.seconds[0]
    assert float(re.search(r"^penstock:step_time_error_count\{.*\} (\S+)$", metrics, re.M)[1]) >= 11
    assert len(list((cache / "step-times").iterdir())) == 1
