"""Which lease owns which KV block, and which blocks can be found again by what they hold.

Decides which block is handed out next and which cached block is forgotten for it. Does not know sequences, steps or
what is inside a block. Invariants, verified by `BlockPool.check`: every block is free, or cached and unheld, or held; a
block's holder count is the number of leases that list it; a block that may still be written has one holder and no key.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence, Set
from dataclasses import dataclass

from penstock.contract.errors import EngineFault
from penstock.core.block_uses import BlockUses, CachedBlocks
from penstock.core.cache_log import CacheLog
from penstock.core.checkpoints import NO_CHECKPOINT, Checkpoints

__all__ = ["BlockPool", "Lease", "Quote"]

_GONE = 0
"""Placeholder in a lease for a block that the window had already left before the lease began."""


class Lease:
    """The only proof of owning blocks. Made, changed and ended by its `BlockPool`; its holder only reads it.

    Attributes:
        blocks: block ids in order of position; the first `left` are no longer owned.
        cached: how many leading blocks came from the prefix cache, with their KV.
        sealed: how many leading blocks are full and will never be written again; at least `cached`.
        left: how many leading blocks were given back because no later position sees them.
        released: whether it has ended.
        era: the pool's cache era in which it began; see `BlockPool.reset_prefix_cache`.
        checkpoint: the slot of the recurrent state after the cached blocks; -1 if there is none.
    """

    __slots__ = ("blocks", "cached", "checkpoint", "era", "left", "released", "sealed")

    def __init__(
        self, blocks: list[int], cached: int, era: int, left: int = 0, checkpoint: int = NO_CHECKPOINT
    ) -> None:
        self.blocks = blocks
        self.cached = cached
        self.sealed = cached
        self.left = left
        self.released = False
        self.era = era
        self.checkpoint = checkpoint

    @property
    def held(self) -> list[int]:
        """The blocks that are owned, in order of position."""
        return self.blocks[self.left :]


@dataclass(frozen=True, slots=True)
class Quote:
    """What an `acquire` would take: `cached` blocks found by key, `need` new ones, out of the `have` it could get."""

    cached: int
    need: int
    have: int


class BlockPool:
    """All KV blocks of an engine, and the prefix cache, which is only an index over them. Owned by the scheduler.

    Args:
        num_blocks: number of blocks.
        block_size: positions that each holds.
        caching: whether full blocks can be found again.
        window: see `SchedulerConfig.window`.
        most: the most blocks a lease begins with; it is extended later. None for as many as its tokens need.
        checkpoints: where recurrent state is kept; a prefix then ends at the last kept state. None for models
            without recurrent state.
        log: is told which keys leave the index; None for no log.

    Attributes:
        query_tokens: positions for which a lease was granted, since the start.
        hit_tokens: how many of these came out of the prefix cache.
        given_back: blocks that leases gave back before they ended, since the start.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        caching: bool = True,
        window: int | None = None,
        most: int | None = None,
        checkpoints: Checkpoints | None = None,
        log: CacheLog | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.query_tokens = 0
        self.hit_tokens = 0
        self.given_back = 0
        self._caching = caching
        self._window = window
        self._most = most
        self._checkpoints = checkpoints
        self._log = log
        self._era = 0
        self._leases: set[Lease] = set()
        self._holders = [0] * num_blocks
        self._free = list(reversed(range(num_blocks)))
        self._unheld: OrderedDict[int, None] = OrderedDict()  # cached and held by no lease, first to be forgotten first
        self._index: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._uses = BlockUses(num_blocks)  # for views of the cache; decides nothing

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def evictable(self) -> int:
        """Blocks that are cached and held by no lease."""
        return len(self._unheld)

    @property
    def available(self) -> int:
        """Blocks that can be handed out now: free ones and evictable ones."""
        return len(self._free) + len(self._unheld)

    @property
    def referenced(self) -> int:
        """Blocks that some lease holds."""
        return self.num_blocks - self.available

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def quote(self, keys: Sequence[bytes], num_tokens: int) -> Quote:
        """What `acquire` with the same arguments would take now."""
        return self._quote_of(self._match(keys, num_tokens), num_tokens)

    def acquire(self, keys: Sequence[bytes], num_tokens: int, spare: int = 0) -> Lease | None:
        """Lease blocks for `num_tokens` known tokens: the longest cached prefix, and new blocks for the rest.

        With a window, only the visible part of the prefix must be present and is held, and no more new blocks are
        taken than one step needs.

        At least one position is left to compute, in a block that only this lease holds: a fully cached sequence gets a
        new last block instead of writing into one that others read.

        Args:
            keys: of the sequence's full blocks, in order; more than the tokens fill are ignored.
            num_tokens: at least 1.
            spare: blocks that must still be available afterwards.

        Returns:
            The lease, or None if there are too few blocks; then nothing has changed.
        """
        found = self._match(keys, num_tokens)
        quote = self._quote_of(found, num_tokens)
        if quote.need + spare > quote.have:
            return None
        left = self._left_behind(len(found) * self.block_size)
        for block in found[left:]:
            self._hold(block)
        blocks = found + [self._take() for _ in range(quote.need)]
        lease = Lease(blocks, len(found), self._era, left, self._restore(keys[: len(found)]))
        self._leases.add(lease)
        self._uses.found(found[left:])
        self.query_tokens += num_tokens
        self.hit_tokens += len(found) * self.block_size
        return lease

    def present(self, keys: Sequence[bytes], num_tokens: int) -> int:
        """How many leading blocks of `num_tokens` known tokens are cached, whether or not a recurrent state is."""
        return len(self._match(keys, num_tokens, with_state=False))

    def extend(self, lease: Lease, count: int) -> bool:
        """Append `count` new blocks to the lease. Returns False and changes nothing if there are too few."""
        self._require_live(lease)
        if count > self.available:
            return False
        lease.blocks += [self._take() for _ in range(count)]
        return True

    def leave_behind(self, lease: Lease, computed: int) -> None:
        """Give back the leading blocks that no position from `computed` on sees; as after `release`, they are findable.

        Without a window nothing is given back.
        """
        self._require_live(lease)
        left = self._left_behind(computed)
        for block in reversed(lease.blocks[lease.left : left]):
            self._drop(block)
            self.given_back += 1
        lease.left = max(left, lease.left)

    def seal(self, lease: Lease, index: int, key: bytes, parent: bytes = b"") -> bool:
        """Declare block number `index` of the lease full and final, and let others find it under `key`.

        If another block already has the key (two sequences computed the same tokens), a held block keeps it and ours
        stays private; an unheld one loses it to ours, which is used more recently.

        Args:
            lease: whose block it is.
            index: its place in the lease.
            key: its name.
            parent: the key of the block before it, or the root of its chain; b"" if it is not needed.

        Returns:
            Whether `key` finds a block that it did not find before.

        Raises:
            EngineFault: blocks are not sealed in order, each once.
        """
        self._require_live(lease)
        if index != lease.sealed or index >= len(lease.blocks):
            raise EngineFault(
                f"block {index} of a lease sealed out of order: {lease.sealed} of {len(lease.blocks)} are"
            )
        lease.sealed += 1
        if not self._caching or lease.era != self._era:
            return False
        other = self._index.get(key)
        if other is not None:
            if self._holders[other] > 0:
                return False
            self._forget(other)
            del self._unheld[other]
            self._free.append(other)
        self._uses.sealed(lease.blocks[index], parent, index, heir_of=other)
        self._index[key] = lease.blocks[index]
        self._keys[lease.blocks[index]] = key
        return other is None

    def keep_state(self, lease: Lease, key: bytes, slot: int) -> None:
        """Let the state in checkpoint `slot`, at the end of the lease's block `key`, be found, as `seal` does KV."""
        self._require_live(lease)
        assert self._checkpoints is not None, "a model without state has none to keep"
        if self._caching and lease.era == self._era:
            self._checkpoints.keep(key, slot)
        else:
            self._checkpoints.give_back(slot)

    def release(self, lease: Lease) -> None:
        """End the lease. Sealed blocks stay findable until they are needed; the tail of a chain is forgotten first.

        Raises:
            EngineFault: the lease was released before.
        """
        self._require_live(lease)
        self._leases.remove(lease)
        lease.released = True
        for block in reversed(lease.held):
            self._drop(block)

    def freed_by(self, lease: Lease, keys: Set[bytes]) -> int:
        """The fewest blocks that the end of the lease frees, not counting those of `keys`, which the caller shares."""
        return sum(self._holders[block] == 1 and self._keys.get(block) not in keys for block in lease.held)

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV. Leases go on, but what they seal later is not indexed: it continues forgotten KV."""
        self._era += 1
        self._index.clear()
        self._keys.clear()
        self._free += self._unheld
        self._unheld.clear()
        if self._checkpoints is not None:
            self._checkpoints.reset()
        if self._log is not None:
            self._log.cleared()

    def key_of(self, block: int) -> bytes | None:
        """The key under which `block` can be found; None if it cannot be found."""
        return self._keys.get(block)

    def cached(self) -> CachedBlocks:
        """Copy what is known of the blocks that can be found. Takes a few nanoseconds per block."""
        return self._uses.cached(self.block_size, self._keys, self._holders)

    def check(self) -> None:
        """Verify the pool's invariants.

        Raises:
            EngineFault: one does not hold.
        """
        held = Counter(block for lease in self._leases for block in lease.held)
        written = Counter(b for lease in self._leases for b in lease.blocks[max(lease.sealed, lease.left) :])
        invariants = {
            "a block's holders are the leases that list it": all(
                self._holders[block] == held[block] for block in range(self.num_blocks)
            ),
            "free + evictable + held == total": len(self._free) + len(self._unheld) + len(held) == self.num_blocks,
            "every block is free, evictable or held": len({*self._free, *self._unheld, *held}) == self.num_blocks,
            "a writable block has one holder and no key": all(
                held[block] == 1 and block not in self._keys for block in written
            ),
            "evictable blocks have keys and free ones none": self._keys.keys() >= self._unheld.keys()
            and self._keys.keys().isdisjoint(self._free),
            "keys and index agree": self._index == {key: block for block, key in self._keys.items()},
            "no live lease is marked released": not any(lease.released for lease in self._leases),
            "cached <= sealed <= blocks": all(
                lease.cached <= lease.sealed <= len(lease.blocks) for lease in self._leases
            ),
        }
        for invariant, holds in invariants.items():
            if not holds:
                raise EngineFault(f"block pool: not so: {invariant}")
        if self._checkpoints is not None:
            self._checkpoints.check()

    def _quote_of(self, found: Sequence[int], num_tokens: int) -> Quote:
        kept = found[self._left_behind(len(found) * self.block_size) :]
        need = self.blocks_for(num_tokens) - len(found)
        if self._most is not None:
            need = min(need, self._most - len(kept))
        return Quote(len(found), need, self.available - sum(self._holders[block] == 0 for block in kept))

    def _left_behind(self, computed: int) -> int:
        """How many leading blocks no position from `computed` on sees: it sees `computed - window + 1` and later."""
        return 0 if self._window is None else max(0, computed - self._window + 1) // self.block_size

    def _restore(self, keys: Sequence[bytes]) -> int:
        """The checkpoint slot at the end of a prefix that was matched."""
        return NO_CHECKPOINT if self._checkpoints is None or not keys else self._checkpoints.restore(keys[-1])

    def _match(self, keys: Sequence[bytes], num_tokens: int, with_state: bool = True) -> list[int]:
        """The cached blocks of the longest prefix that can be continued, and leaves a position to compute.

        All of its blocks must be there, or, with a window, its last one and all that the next position sees. A block
        that is gone is replaced by a number that is never read. If the model carries state and `with_state` is set, the
        prefix also ends at a checkpoint.
        """
        states = self._checkpoints if with_state else None
        wanted = keys[: (num_tokens - 1) // self.block_size]
        longest = run = 0
        for count, key in enumerate(wanted, start=1):
            run = run + 1 if key in self._index else 0
            if run >= max(1, count - self._left_behind(count * self.block_size)):
                longest = count if states is None or key in states else longest
            elif self._window is None:
                break
        return [self._index.get(key, _GONE) for key in wanted[:longest]]

    def _take(self) -> int:
        """Hand out a block that no lease holds, forgetting the least recently used cached one if there is no other."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._unheld.popitem(last=False)
            if self._log is not None:
                self._log.removed(self._keys[block])
            self._forget(block)
        self._holders[block] = 1
        return block

    def _hold(self, block: int) -> None:
        if self._holders[block] == 0:
            del self._unheld[block]
        self._holders[block] += 1

    def _drop(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block] > 0:
            return
        if block in self._keys:
            self._unheld[block] = None
        else:
            self._free.append(block)

    def _forget(self, block: int) -> None:
        """Take a block out of the index."""
        del self._index[self._keys.pop(block)]

    def _require_live(self, lease: Lease) -> None:
        if lease.released or lease not in self._leases:
            raise EngineFault("a lease that is not live was used: released before, or of another pool")
