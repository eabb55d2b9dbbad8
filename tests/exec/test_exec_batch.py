"""A step's tensors against the definition of each, token by token."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.contract.plan import Admit, Row
from penstock.contract.sampling import SamplingSpec
from penstock.exec.batch import SlotTables

GREEDY = SamplingSpec((("temperature", 0),))
BLOCK, LONGEST, SLOTS = 4, 30, 5  # the last block of a context is not full


def tokens_of(slot: int) -> list[int]:
    return [100 * slot + at for at in range(LONGEST)]


def blocks_of(slot: int) -> list[int]:
    return [(slot * 8 + at) * 3 % 40 for at in range(-(-LONGEST // BLOCK))]


@given(steps=st.lists(st.lists(st.integers(0, 9), min_size=SLOTS, max_size=SLOTS), min_size=1, max_size=12))
def test_a_batch_says_of_each_token_what_it_is_and_where_it_goes(steps):
    """Batches of the same shape and of others follow each other; a count of 0 leaves a slot out of a step."""
    tables = SlotTables(SLOTS, LONGEST, BLOCK)
    computed, has = [0] * SLOTS, [1] * SLOTS
    for slot in range(SLOTS):
        tables.admit(Admit(slot, str(slot), tuple(tokens_of(slot)), (blocks_of(slot)[0],), 0, GREEDY, 0))
    for counts in steps:
        rows = []
        for slot, wanted in enumerate(counts):
            count = min(wanted, LONGEST - computed[slot])
            if count:
                end = computed[slot] + count
                need = max(has[slot], -(-end // BLOCK))
                rows.append(Row(slot, computed[slot], count, tuple(blocks_of(slot)[has[slot] : need]), end == LONGEST))
                computed[slot], has[slot] = end, need
                tables.advance(rows[-1])
        if rows:
            check(tables, rows)


def check(tables: SlotTables, rows: list[Row]) -> None:
    batch = tables.batch(rows, torch.device("cpu"))
    places = [(row.slot, at) for row in rows for at in range(row.start, row.start + row.count)]
    assert batch.token_ids.tolist() == [tokens_of(slot)[at] for slot, at in places]
    assert batch.positions.tolist() == [at for _, at in places]
    assert batch.write_slots.tolist() == [blocks_of(slot)[at // BLOCK] * BLOCK + at % BLOCK for slot, at in places]
    assert batch.q_start.tolist() == [sum(row.count for row in rows[:r]) for r in range(len(rows) + 1)]
    assert batch.kv_len.tolist() == [row.start + row.count for row in rows]
    assert [t.dtype for t in (batch.q_start, batch.kv_len, batch.block_table)] == [torch.int32] * 3
    for row, listed in zip(rows, batch.block_table.tolist(), strict=True):
        used = -(-(row.start + row.count) // BLOCK)
        assert listed[:used] == blocks_of(row.slot)[:used]
