"""What the tests of measurements share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer of bytes; not to be changed."""
    from quality_harness import write_tiny

    return write_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """A text of 516 bytes: eight chunks of 64 tokens of `tiny`'s tokenizer."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over a lazy dog; " * 12, encoding="utf-8")
    return tmp_path / "text.txt"
