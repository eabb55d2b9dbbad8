"""Fills the inputs of a captured step in one kernel; separate copies would take a launch each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton_attention import PLACES

__all__ = ["fill_step"]


@triton.jit
def _fill(
    token_ids,
    positions,
    write_slots,
    table,
    rows,
    into_ids,
    into_positions,
    into_slots,
    into_places,
    into_table,
    tokens,
    width,
    into_width,
    HAS_ROWS: tl.constexpr,
    SIZE: tl.constexpr,
):
    at = tl.program_id(0)
    there = at < tokens
    position = tl.load(positions + at, mask=there, other=0)
    tl.store(into_ids + at, tl.load(token_ids + at, mask=there, other=0))
    tl.store(into_positions + at, position)
    tl.store(into_slots + at, tl.load(write_slots + at, mask=there, other=-1))
    tl.store(into_places + at * PLACES, at)
    tl.store(into_places + at * PLACES + 1, there.to(tl.int32))
    tl.store(into_places + at * PLACES + 2, at)
    tl.store(into_places + at * PLACES + 3, position.to(tl.int32))
    tl.store(into_places + at * PLACES + 4, position.to(tl.int32) + 1)
    row = at.to(tl.int64)
    if HAS_ROWS:
        row = tl.load(rows + at, mask=there, other=0).to(tl.int64)
    for start in range(0, width, SIZE):
        column = start + tl.arange(0, SIZE)
        inside = (column < width) & there
        block = tl.load(table + row * width + column, mask=inside, other=0)
        tl.store(into_table + at.to(tl.int64) * into_width + column, block, mask=inside)


def fill_step(
    token_ids: Tensor,
    positions: Tensor,
    write_slots: Tensor,
    table: Tensor,
    rows: Tensor | None,
    into: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Fill a captured step's inputs for T tokens, and mark its other N - T as absent.

    Args:
        token_ids: `[T]` int64.
        positions: `[T]` int64.
        write_slots: `[T]` int64.
        table: `[R, M]` int32, contiguous.
        rows: `[T]` int32, the row of the table that belongs to each token; None if each row has one token.
        into: token ids, positions, write slots (-1 where there is no token), `[N]` int64 each; places as in
            `triton_attention.Tiles`, one tile per token; and tables `[N, M or more]` int32.
    """
    tables = into[-1]
    assert table.shape[1] <= tables.shape[1], "a row of the table is longer than what was captured"
    size = min(triton.next_power_of_2(max(table.shape[1], 1)), 1024)
    given = write_slots if rows is None else rows  # a pointer that is not read
    _fill[(len(tables),)](
        token_ids,
        positions,
        write_slots,
        table,
        given,
        *into,
        len(token_ids),
        table.shape[1],
        tables.shape[1],
        HAS_ROWS=rows is not None,
        SIZE=size,
        num_warps=1,
    )
