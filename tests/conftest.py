"""What every room's tests may use."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
for folder in ("models", "server"):  # rooms whose tests lend something to others
    sys.path.insert(0, str(TESTS / folder))


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's file, fetched when it is not there: a test that needs it never skips."""
    from penstock.contract.config import DEFAULT_MODEL
    from penstock.weights.locate import default_cache_dir
    from penstock.weights.pull import pull

    return pull(DEFAULT_MODEL, default_cache_dir(os.environ), show_progress=True)
