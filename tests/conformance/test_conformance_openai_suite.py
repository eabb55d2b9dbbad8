"""openai-python's own test suite, from a checkout that `OPENAI_SUITE` names, against the default command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai_suite import OURS, causes, run_suite

SUITE = os.environ.get("OPENAI_SUITE", "")
SERVE = (sys.executable, "-m", "penstock", "serve", "--port", "0", "--compat", "--served-model-name", "*")


@pytest.fixture
def url() -> Iterator[str]:
    """A server in a process of its own, whose short context ends answers that nothing else would end."""
    with subprocess.Popen([*SERVE, "--max-model-len", "256"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield next(line.split()[1] for line in server.stdout if line.startswith("listening "))
        finally:
            server.terminate()


@pytest.mark.deep
@pytest.mark.skipif(not SUITE, reason="there is no checkout of openai-python: make test-openai OPENAI_SUITE=CHECKOUT")
def test_no_endpoint_is_missing_and_no_field_is_refused(url, tmp_path, capsys):
    run_suite(Path(SUITE), url, tmp_path / "report.xml")
    counts = causes(tmp_path / "report.xml")
    with capsys.disabled():
        print(*(f"\n{count:5} {cause}" for cause, count in counts.most_common()), sep="")
    assert counts["passed"] > 0
    assert {cause: counts[cause] for cause in OURS if counts[cause]} == {}
