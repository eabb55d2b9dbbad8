"""What every room's tests may use."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from served import Served

TESTS = Path(__file__).parent
for folder in ("models", "server", "engine", "e2e", "conformance"):  # rooms whose tests lend something to others
    sys.path.insert(0, str(TESTS / folder))


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's file, fetched when it is not there: a test that needs it never skips."""
    from penstock.contract.config import DEFAULT_MODEL
    from penstock.weights.locate import default_cache_dir
    from penstock.weights.pull import pull

    return pull(DEFAULT_MODEL, default_cache_dir(os.environ), show_progress=True)


@pytest.fixture(scope="session")
def default_server(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`penstock serve` with no flags but the port, in a process of its own, for all tests that ask for nothing else."""
    from served import serve

    with serve(tmp_path_factory.mktemp("default") / "trace.jsonl") as served:
        yield served
