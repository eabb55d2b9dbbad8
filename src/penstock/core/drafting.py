"""Drafts in a plan: whose next row could carry some, and how many a row may.

Drafts take what is left: they never displace a row, an admission or a block that somebody may need. Knows nothing of
who guesses, nor whether the guess was right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from penstock.contract.plan import Draft
from penstock.core.block_pool import BlockPool
from penstock.core.sequence import Seq
from penstock.core.steps import PlanBuilder

__all__ = ["Draftable", "add_drafts", "draftable"]


class Draftable(NamedTuple):
    """A sequence whose next row could carry drafts.

    Attributes:
        tokens: all of it; to be read before the scheduler is called again.
        most: more drafts could not be of use.
    """

    seq_id: str
    tokens: Sequence[int]
    most: int


def draftable(running: Iterable[Seq], max_tokens: int) -> Iterator[Draftable]:
    """The sequences whose next row could carry drafts: they decode, and their last token is known.

    Args:
        running: sequences that hold a slot.
        max_tokens: of a step.
    """
    for seq in running:
        most = min(max_tokens - 1, seq.limit - len(seq.tokens) - 1)
        if most > 0 and seq.remaining == 1 and not seq.drawing and seq.request.embedding is None:
            yield Draftable(seq.id, seq.tokens, most)


def add_drafts(builder: PlanBuilder, drafts: Sequence[Draft], pool: BlockPool, spare: int) -> None:
    """Let rows carry drafts, as far as budget and blocks are left.

    Nothing is drafted from a stop id on: what follows it is never wanted, and who watches a row (a grammar) need not
    know how to go on past its end.

    Args:
        builder: holds all rows of the plan.
        drafts: at most one a sequence.
        pool: whose blocks drafted positions take.
        spare: blocks that must still be available afterwards.
    """
    guesses = {draft.seq_id: draft.tokens for draft in drafts}
    for index, seq in enumerate(builder.seqs):
        row = builder.rows[index]
        if seq.id not in guesses or not row.sample or seq.drawing > 1:  # its last token is not known
            continue
        tokens = _before(seq.stop_ids, guesses[seq.id])
        end, blocks = row.start + row.count, len(seq.lease.blocks)
        room = (blocks + max(0, pool.available - spare)) * pool.block_size - end
        count = min(len(tokens), builder.draft_budget, room, seq.limit - len(seq.tokens) - 1)
        if count > 0:
            pool.extend(seq.lease, max(0, pool.blocks_for(end + count) - blocks))
            builder.add_drafts(index, tokens[:count], tuple(seq.lease.blocks[blocks:]))


def _before(stop_ids: frozenset[int], tokens: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens in front of the first stop id."""
    return tuple(takewhile(lambda token: token not in stop_ids, tokens))
