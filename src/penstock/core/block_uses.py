"""How the blocks of the prefix cache follow each other, how often each was found, and the tree that this makes.

Only for inspection: no plan depends on it. The pool keeps it in lists with one entry per block; these are copied
between two steps, and `prefix_tree` makes the tree from the copy, in any thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from penstock.contract.engine_views import PrefixNode, PrefixTree

__all__ = ["MOST_NODES", "BlockUses", "CachedBlocks", "prefix_tree"]

MOST_NODES = 200
_ROOT = -1


class CachedBlocks(NamedTuple):
    """The blocks that can be found at one moment. All but the first two are indexed by block.

    Attributes:
        block_size: positions of a block.
        keys: the key of each block that can be found.
        parents: the keys of the blocks before them.
        before: how many blocks are before them.
        hits: how often an admission found them.
        used: the number of the admission before which they were last sealed or found.
        holders: how many leases hold them.
        admissions: how many admissions there were.
    """

    block_size: int
    keys: Mapping[int, bytes]
    parents: Sequence[bytes]
    before: Sequence[int]
    hits: Sequence[int]
    used: Sequence[int]
    holders: Sequence[int]
    admissions: int


class BlockUses:
    """What is noted about each block since it was sealed. Owned by the pool.

    Args:
        num_blocks: number of blocks in the pool.
    """

    __slots__ = ("_admissions", "_before", "_hits", "_parents", "_used")

    def __init__(self, num_blocks: int) -> None:
        self._parents = [b""] * num_blocks
        self._before = [0] * num_blocks
        self._hits = [0] * num_blocks
        self._used = [0] * num_blocks
        self._admissions = 0

    def sealed(self, block: int, parent: bytes, before: int, heir_of: int | None = None) -> None:
        """A block can be found from now on; `heir_of` is the one that had its key until now."""
        self._parents[block] = parent
        self._before[block] = before
        self._hits[block] = 0 if heir_of is None else self._hits[heir_of]
        self._used[block] = self._admissions

    def found(self, blocks: Iterable[int]) -> None:
        """An admission found these blocks."""
        self._admissions += 1
        hits, used, now = self._hits, self._used, self._admissions
        for block in blocks:
            hits[block] += 1
            used[block] = now

    def cached(self, block_size: int, keys: dict[int, bytes], holders: list[int]) -> CachedBlocks:
        """Copy all of this, together with the pool's own columns."""
        columns = self._parents.copy(), self._before.copy(), self._hits.copy(), self._used.copy()
        return CachedBlocks(block_size, keys.copy(), *columns, holders.copy(), self._admissions)


def prefix_tree(cached: CachedBlocks, most: int = MOST_NODES) -> PrefixTree:
    """The tree of cached prefixes: a run of blocks between two branches is one node.

    A block whose parent is no longer cached begins a tree of its own. Takes about two microseconds per block.

    Args:
        cached: the blocks.
        most: the most nodes to return: the ones with the most blocks in and below them.
    """
    followers = _followers(cached)
    sizes = _sizes(cached, followers)
    coming = [(-sizes[block], block, _ROOT) for block in followers.get(_ROOT, ())]
    heapq.heapify(coming)
    nodes: list[PrefixNode] = []
    while coming and len(nodes) < most:
        _, first, parent = heapq.heappop(coming)
        chain = _chain(first, followers)
        nodes.append(_node(cached, chain, parent, sizes[first]))
        for block in followers.get(chain[-1], ()):
            heapq.heappush(coming, (-sizes[block], block, len(nodes) - 1))
    return PrefixTree(cached.block_size, len(cached.keys), tuple(nodes), -sum(size for size, _, _ in coming))


def _followers(cached: CachedBlocks) -> dict[int, list[int]]:
    """The blocks that follow each block; the ones listed for `_ROOT` follow no cached block."""
    blocks = {key: block for block, key in cached.keys.items()}
    followers: dict[int, list[int]] = {}
    for block in cached.keys:
        followers.setdefault(blocks.get(cached.parents[block], _ROOT), []).append(block)
    return followers


def _sizes(cached: CachedBlocks, followers: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """How many blocks are in and below each block."""
    sizes: dict[int, int] = {}
    for block in sorted(cached.keys, key=cached.before.__getitem__, reverse=True):
        sizes[block] = 1 + sum([sizes[each] for each in followers.get(block, ())])
    return sizes


def _chain(first: int, followers: Mapping[int, Sequence[int]]) -> list[int]:
    """The blocks from `first` to the next branch or end."""
    chain = [first]
    while len(following := followers.get(chain[-1], ())) == 1:
        chain.append(following[0])
    return chain


def _node(cached: CachedBlocks, chain: Sequence[int], parent: int, size: int) -> PrefixNode:
    return PrefixNode(
        parent=parent,
        start=cached.before[chain[0]] * cached.block_size,
        blocks=len(chain),
        held=sum([cached.holders[block] > 0 for block in chain]),
        hits=cached.hits[chain[0]],
        hit_tokens=sum([cached.hits[block] for block in chain]) * cached.block_size,
        idle=cached.admissions - max([cached.used[block] for block in chain]),
        below=size - len(chain),
    )
