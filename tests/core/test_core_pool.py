"""The block pool: atomic acquisition, sharing, sealing, eviction, release."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from penstock.contract.errors import EngineFault
from penstock.core.block_keys import KeyChain, root_key
from penstock.core.block_pool import BlockPool, Lease


def keys(tokens, block_size=2, salt=""):
    chain = KeyChain(root_key(b"m", salt), block_size)
    chain.follow(tokens)
    return chain.keys


def lease_all(pool: BlockPool, tokens) -> Lease:
    """Acquire for `tokens`, compute them and seal every full block."""
    names = keys(tokens, pool.block_size)
    lease = pool.acquire(names, len(tokens))
    assert lease is not None
    for index in range(lease.sealed, len(names)):
        pool.seal(lease, index, names[index])
    pool.check()
    return lease


def test_a_failed_acquire_takes_nothing():
    pool = BlockPool(4, 2)
    pool.release(lease_all(pool, [1, 2, 3, 4]))
    before = (pool.free, pool.evictable, pool.referenced, pool.query_tokens, pool.hit_tokens)
    assert pool.acquire(keys([1, 2, 3, 4, 5, 6, 7, 8, 9]), 9) is None
    assert (pool.free, pool.evictable, pool.referenced, pool.query_tokens, pool.hit_tokens) == before
    pool.check()


def test_a_failed_extend_takes_nothing():
    pool = BlockPool(3, 2)
    lease = pool.acquire([], 4)
    assert not pool.extend(lease, 2)
    assert (len(lease.blocks), pool.free) == (2, 1)
    assert pool.extend(lease, 1)
    assert len(set(lease.blocks)) == 3


def test_spare_blocks_are_left():
    pool = BlockPool(4, 2)
    assert pool.acquire([], 6, spare=2) is None
    assert pool.acquire([], 6, spare=1) is not None


def test_revived_blocks_are_not_counted_twice():
    pool = BlockPool(3, 2)
    pool.release(lease_all(pool, [1, 2, 3, 4, 5, 6]))
    quote = pool.quote(keys([1, 2, 3, 4, 5, 6, 7]), 7)
    assert (quote.cached, quote.need, quote.have) == (3, 1, 0)
    assert pool.acquire(keys([1, 2, 3, 4, 5, 6, 7]), 7) is None


@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_a_full_hit_leaves_one_position_in_a_private_block(block_size):
    pool = BlockPool(12, block_size)
    tokens = list(range(2 * block_size))
    first = lease_all(pool, tokens)
    second = pool.acquire(keys(tokens, block_size), len(tokens))
    assert second.cached == 1
    assert second.blocks[0] == first.blocks[0]
    assert second.blocks[1] != first.blocks[1]


def test_a_single_token_is_never_cached():
    pool = BlockPool(4, 1)
    lease_all(pool, [5])
    assert pool.acquire(keys([5], 1), 1).cached == 0


def test_blocks_of_a_finished_lease_stay_findable():
    pool = BlockPool(4, 2)
    first = lease_all(pool, [1, 2, 3, 4, 5])
    blocks = first.blocks[:2]
    pool.release(first)
    second = pool.acquire(keys([1, 2, 3, 4, 9]), 5)
    assert (second.cached, second.blocks[:2]) == (2, blocks)
    assert pool.hit_tokens == 4


def test_matching_stops_at_the_first_gap():
    pool = BlockPool(8, 2)
    names = keys([1, 2, 3, 4, 5, 6])
    lease = pool.acquire(names, 6)
    for index in range(2):
        pool.seal(lease, index, names[index])
    other = keys([9, 9, 3, 4, 5, 6, 7])
    assert pool.quote([names[0], other[1], names[1]], 7).cached == 1


def test_eviction_takes_free_blocks_first_then_the_oldest_chain_from_its_tail():
    pool = BlockPool(6, 2)
    old, new = lease_all(pool, [1, 1, 2, 2]), lease_all(pool, [3, 3, 4, 4])
    old_blocks, new_blocks = list(old.blocks), list(new.blocks)
    pool.release(old)
    pool.release(new)
    order = [pool.acquire([], 1).blocks[0] for _ in range(6)]
    assert set(order[:2]).isdisjoint(old_blocks + new_blocks)
    assert order[2:] == [old_blocks[1], old_blocks[0], new_blocks[1], new_blocks[0]]


def test_a_hit_makes_a_chain_young_again():
    pool = BlockPool(4, 2)
    one, two = lease_all(pool, [1, 1, 2]), lease_all(pool, [3, 3, 4])
    stays, goes = one.blocks[0], two.blocks[0]
    pool.release(one)
    pool.release(two)
    pool.release(pool.acquire(keys([1, 1, 2]), 3))
    taken = [pool.acquire([], 1).blocks[0] for _ in range(3)]
    assert goes in taken
    assert stays not in taken


def test_an_evicted_block_is_not_found():
    pool = BlockPool(2, 2)
    pool.release(lease_all(pool, [1, 1, 2, 2]))
    pool.release(pool.acquire([], 4))
    assert pool.quote(keys([1, 1, 2, 2, 3]), 5).cached == 0


def test_a_held_block_is_never_evicted():
    pool = BlockPool(3, 2)
    held = lease_all(pool, [1, 1, 2])
    assert pool.acquire([], 4) is None
    assert set(pool.acquire([], 2).blocks).isdisjoint(held.blocks)


def test_a_duplicate_of_a_held_block_stays_private():
    pool = BlockPool(8, 2)
    first = lease_all(pool, [1, 2, 3, 4])
    second = lease_all(pool, [1, 2, 3, 4])
    assert pool.key_of(first.blocks[1]) is not None
    assert pool.key_of(second.blocks[1]) is None
    assert second.sealed == 2
    pool.release(second)
    assert pool.quote(keys([1, 2, 3, 4, 5]), 5).cached == 2


def test_a_duplicate_of_an_unheld_block_takes_its_place():
    pool = BlockPool(8, 2)
    pool.release(lease_all(pool, [1, 2, 3, 4]))
    second = lease_all(pool, [1, 2, 3, 4])
    assert pool.key_of(second.blocks[1]) is not None
    assert (pool.referenced, pool.evictable, pool.free) == (2, 0, 6)
    assert pool.acquire(keys([1, 2, 3, 4, 5]), 5).blocks[:2] == second.blocks


def test_double_release_raises_and_changes_nothing():
    pool = BlockPool(4, 2)
    lease, other = lease_all(pool, [1, 2, 3]), lease_all(pool, [1, 2, 3])
    pool.release(lease)
    with pytest.raises(EngineFault):
        pool.release(lease)
    pool.check()
    assert pool.referenced == len(other.blocks)


@pytest.mark.parametrize("use", [lambda p, x: p.extend(x, 1), lambda p, x: p.seal(x, 0, b"k")])
def test_a_released_lease_is_of_no_use(use):
    pool = BlockPool(4, 2)
    lease = pool.acquire([], 2)
    pool.release(lease)
    with pytest.raises(EngineFault):
        use(pool, lease)


def test_a_lease_of_another_pool_is_refused():
    with pytest.raises(EngineFault):
        BlockPool(4, 2).release(BlockPool(4, 2).acquire([], 2))


@pytest.mark.parametrize("index", [1, 2, -1])
def test_blocks_are_sealed_in_order(index):
    pool = BlockPool(4, 2)
    lease = pool.acquire([], 4)
    with pytest.raises(EngineFault):
        pool.seal(lease, index, b"k")


def test_without_caching_nothing_is_found():
    pool = BlockPool(8, 2, caching=False)
    pool.release(lease_all(pool, [1, 2, 3, 4]))
    assert pool.free == 8
    assert pool.quote(keys([1, 2, 3, 4, 5]), 5).cached == 0


def test_reset_forgets_everything_and_harms_no_lease():
    pool = BlockPool(8, 2)
    pool.release(lease_all(pool, [7, 7, 8, 8]))
    names = keys([1, 2, 3, 4])
    lease = pool.acquire(names, 4)
    pool.seal(lease, 0, names[0])
    pool.reset_prefix_cache()
    pool.check()
    assert (pool.evictable, pool.referenced) == (0, 2)
    pool.seal(lease, 1, names[1])
    assert pool.key_of(lease.blocks[1]) is None, "it continues KV that was to be forgotten"
    pool.release(lease)
    assert pool.free == 8


@pytest.mark.parametrize(
    "damage",
    [
        lambda p, x: p._free.append(x.blocks[0]),
        lambda p, x: p._holders.__setitem__(x.blocks[0], 2),
        lambda p, x: p._free.pop(),
        lambda p, x: setattr(x, "sealed", 9),
        lambda p, x: x.blocks.append(x.blocks[0]),
        lambda p, x: p._index.clear(),
        lambda p, x: p._keys.__setitem__(x.blocks[-1], b"k"),
        lambda p, x: setattr(x, "released", True),
        lambda p, x: p._unheld.__setitem__(x.blocks[0], None),
    ],
)
def test_check_finds_damage(damage):
    pool = BlockPool(8, 2)
    lease = lease_all(pool, [1, 2, 3])
    damage(pool, lease)
    with pytest.raises(EngineFault):
        pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Random use of a pool, against a model that knows what every block holds."""

    leases = Bundle("leases")

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(7, 2)
        self.content = {}
        self.tokens = {}

    @rule(target=leases, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), spare=st.integers(0, 2))
    def acquire(self, tokens, spare):
        available = self.pool.available
        lease = self.pool.acquire(keys(tokens), len(tokens), spare)
        if lease is None:
            assert self.pool.available == available
            return None
        assert self.pool.available >= spare
        assert lease.cached * 2 < len(tokens)
        for index, block in enumerate(lease.blocks[: lease.cached]):
            assert self.content[block] == tuple(tokens[: (index + 1) * 2]), "a hit holds what it is named for"
        for block in lease.blocks[lease.cached :]:
            self.content[block] = None
        self.tokens[lease] = tokens
        return lease

    @rule(lease=leases)
    def seal(self, lease):
        if lease is None or lease.released or (lease.sealed + 1) * 2 > len(self.tokens[lease]):
            return
        index = lease.sealed
        self.content[lease.blocks[index]] = tuple(self.tokens[lease][: (index + 1) * 2])
        self.pool.seal(lease, index, keys(self.tokens[lease])[index])

    @rule(lease=leases, more=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def extend(self, lease, more):
        if lease is None or lease.released:
            return
        grown = self.tokens[lease] + more
        before = len(lease.blocks)
        if self.pool.extend(lease, max(0, -(-len(grown) // 2) - before)):
            self.tokens[lease] = grown
            for block in lease.blocks[before:]:
                self.content[block] = None

    @rule(lease=consumes(leases))
    def release(self, lease):
        if lease is not None and not lease.released:
            self.pool.release(lease)

    @rule()
    def reset(self):
        self.pool.reset_prefix_cache()

    @invariant()
    def lawful(self):
        self.pool.check()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
