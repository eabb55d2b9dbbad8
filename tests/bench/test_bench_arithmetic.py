"""Percentiles, spreads and what a record says of the machine."""

from __future__ import annotations

import json
import re
import subprocess

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.arithmetic import Spread, percentile, percentiles
from penstock.bench.machine import commit, provenance
from penstock.processor import processor_name

SAMPLES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(SAMPLES, st.floats(0, 100))
def test_percentiles_are_numpys(samples, percent):
    assert percentile(samples, percent) == pytest.approx(float(numpy.percentile(samples, percent)), rel=1e-9, abs=1e-6)


def test_percentiles_by_name():
    assert percentiles([4.0, 1.0, 2.0, 3.0]) == {
        "mean": 2.5,
        "p50": 2.5,
        "p90": pytest.approx(3.7),
        "p95": 3.85,
        "p99": 3.97,
    }
    assert percentiles([]) == {}


@pytest.mark.parametrize(("samples", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_what_has_no_percentile_is_refused(samples, percent):
    with pytest.raises(ValueError, match=r"samples|outside"):
        percentile(samples, percent)


def test_a_spread_is_the_median_and_the_extremes():
    assert Spread.of([9.0, 1.0, 2.0]) == Spread(2.0, 1.0, 9.0)
    with pytest.raises(ValueError, match="no samples"):
        Spread.of([])


def test_provenance_is_json_and_names_the_machine():
    head = json.loads(json.dumps(provenance()))
    assert set(head) == {"penstock", "commit", "taken", "machine"}
    assert head["machine"]["cpus"] >= 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", head["taken"])


def test_the_processor_is_read_from_the_system_where_it_tells(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Acme 9000\n")
    assert processor_name(cpuinfo) == "Acme 9000"
    assert processor_name(tmp_path / "missing")


def test_the_commit_says_when_the_tree_was_changed(tmp_path):
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.hooksPath=/dev/null"]
        return subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True
        ).stdout.decode()

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "one")
    clean = git("rev-parse", "--short=12", "HEAD").strip()
    assert commit(tmp_path) == clean
    (tmp_path / "file").write_text("2")
    assert commit(tmp_path) == f"{clean}-dirty"
    assert commit(tmp_path / "nowhere") == ""
