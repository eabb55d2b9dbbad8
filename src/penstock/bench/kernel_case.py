"""A case of `kernels`: one call to time, and the sizes that cases share: those of the default model."""

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
    """One thing to time: bytes and operations of a call; `arithmetic` is "" where operations are beside the point."""

    kernel: str
    form: str
    rows: int
    bytes: int
    ops: int
    arithmetic: str
    call: Callable[[], object]
