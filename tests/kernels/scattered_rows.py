"""Rows of a step over scattered blocks, some with one query and some with several; what they may not look at is NaN."""

from __future__ import annotations

import torch

__all__ = ["BLOCK", "COUNTS", "HEADS", "KV_HEADS", "LENGTHS", "drawn", "step"]

BLOCK, HEADS, KV_HEADS = 4, 6, 2
LENGTHS, COUNTS = [1, 9, 23, 12, 17, 30], [1, 1, 5, 12, 1, 2]


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def step(rows, width, value_width):
    """The arguments of attention for `rows`; what they may not look at is NaN, or a block that is not there."""
    blocks = [-(-length // BLOCK) for length in LENGTHS]
    order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(3)).tolist()
    tables = [order[sum(blocks[:at]) : sum(blocks[: at + 1])] for at in range(len(blocks))]
    k = drawn(len(order), BLOCK, KV_HEADS, width, seed=1)
    v = drawn(len(order), BLOCK, KV_HEADS, value_width, seed=2)
    for table, length in zip(tables, LENGTHS, strict=True):
        for cache in (k, v):
            cache[table[-1], (length - 1) % BLOCK + 1 :] = float("nan")
    q = torch.cat([drawn(COUNTS[row], HEADS, width, seed=10 + row) for row in rows])
    bounds = torch.tensor([0, *(COUNTS[row] for row in rows)]).cumsum(0).int()
    wide = max(len(tables[row]) for row in rows)
    table = torch.tensor([tables[row] + [0] * (wide - len(tables[row])) for row in rows]).int()
    return q, k, v, bounds, torch.tensor([LENGTHS[row] for row in rows]).int(), table
