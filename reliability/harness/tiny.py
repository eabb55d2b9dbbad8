"""Writes a tiny random model with a byte tokenizer, for rows of thousands of requests: its text means nothing."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["tiny_model"]

_PROGRAM = Path(__file__).resolve().parent.parent.parent / "bench" / "make_random_checkpoint.py"
_SIZES = ("--hidden", "64", "--layers", "2", "--heads", "4", "--kv-heads", "2", "--inner", "128")


@contextmanager
def tiny_model(positions: int = 4096) -> Iterator[Path]:
    """Yield a folder with the model; it is removed after the block.

    Args:
        positions: most tokens of a sequence.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-tiny-") as folder:
        target = Path(folder) / "tiny"
        sizes = [*_SIZES, "--vocabulary", "300", "--positions", str(positions)]
        command = [sys.executable, str(_PROGRAM), str(target), *sizes]
        subprocess.run(command, check=True, capture_output=True)
        yield target
