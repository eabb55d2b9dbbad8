"""Writes `gguf_grids.bin`: the points that GGUF's grid formats number, as the `gguf` package has them.

Run it when a format with a grid is added: `.venv/bin/python tests/weights/write_gguf_grids.py`.
"""

from __future__ import annotations

import numpy as np
from gguf import quants

from penstock.weights.gguf_grid_blocks import GRID_FILE, GRID_POINTS


def grid_bytes() -> bytes:
    """The whole file, laid out as `GRID_FILE` says."""
    return b"".join(_words(getattr(quants, name)).tobytes() for name in GRID_POINTS)


def _words(kind: type) -> np.ndarray:
    """Uint16 `[points]`."""
    kind.init_grid()
    points = kind.grid.reshape(kind.grid_shape)
    numbers = np.searchsorted(np.array(kind.grid_map), points).astype(np.uint16)
    width = 16 // numbers.shape[1]
    shifted = numbers << np.arange(0, 16, width, dtype=np.uint16)
    return np.bitwise_or.reduce(shifted, axis=1).astype("<u2")


if __name__ == "__main__":
    GRID_FILE.write_bytes(grid_bytes())
