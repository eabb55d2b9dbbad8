"""A case of `kernels`: one call to time. Also the sizes that cases share, which are the default model's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = [
    "BLOCK",
    "CONTEXT",
    "HEAD_DIM",
    "HIDDEN",
    "INNER",
    "KV_HEADS",
    "LAYERS",
    "Q_HEADS",
    "ROWS",
    "VOCABULARY",
    "Case",
]

HIDDEN, INNER, Q_HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCABULARY = 576, 1536, 9, 3, 64, 30, 49152
ROWS = (1, 8, 32, 256)
CONTEXT, BLOCK = 512, 16


@dataclass(frozen=True, slots=True)
class Case:
    """One call to time, with its bytes and operations; `arithmetic` is "" if operations do not matter."""

    kernel: str
    form: str
    rows: int
    bytes: int
    ops: int
    arithmetic: str
    call: Callable[[], object]
