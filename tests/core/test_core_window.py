"""Blocks that a window has left behind: given back in time, never too early, and found again while they last."""

from __future__ import annotations

import pytest
from core_harness import Harness, config, request

from penstock.contract.errors import ConfigError, NeverFits
from penstock.core.block_pool import BlockPool

PROMPT = [(3 * index) % 7 for index in range(50)]


def keys_of(count):
    return [bytes([index]) for index in range(count)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("window", "num_blocks"), [(1, 2), (2, 3), (5, 3), (6, 4), (9, 4)])
def test_a_long_sequence_needs_only_what_it_sees_and_what_a_step_computes(window, num_blocks, depth):
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 4, "depth": depth}
    harness = Harness(config(num_blocks, window=window, **options))
    assert harness.config.most_blocks(64) == num_blocks
    harness.submit(request("a", PROMPT, max_tokens=14))
    harness.drain()
    assert len(harness.tokens["a"]) == 14
    assert harness.scheduler.stats.preemptions == 0
    for config_of in ({"window": window, "num_blocks": num_blocks - 1}, {"window": None, "num_blocks": num_blocks}):
        tight = Harness(config(**config_of, **options))
        with pytest.raises(NeverFits):
            tight.submit(request("a", PROMPT, max_tokens=14))


def test_more_sequences_run_at_once_with_a_window():
    def most_running(window):
        harness = Harness(config(20, window=window, max_num_batched_tokens=8))
        for name in "abcd":
            harness.submit(request(name, [ord(name), *PROMPT[:39]], max_tokens=24))
        running = []
        while harness.scheduler.has_work:
            harness.step()
            running.append(harness.scheduler.num_running)
        assert harness.scheduler.stats.preemptions == 0
        return max(running)

    assert (most_running(None), most_running(5)) == (1, 4)


def test_what_was_left_behind_is_found_until_it_is_needed():
    harness = Harness(config(32, window=5))
    harness.submit(request("a", PROMPT))
    harness.step()
    harness.step()
    assert harness.scheduler.stats.cached_blocks == 7, "29 positions are seen by none to come: 32 are computed"
    harness.submit(request("b", PROMPT))
    harness.drain()
    assert harness.admitted["b"] == 48
    small = Harness(config(6, window=5, max_num_batched_tokens=8, max_num_seqs=1))
    for name in "ab":
        small.submit(request(name, PROMPT))
        small.drain()
    assert small.admitted["b"] == 48, "its beginning had to make room, but its last window is there"


def test_a_prefix_is_held_as_far_as_it_is_seen():
    pool = BlockPool(8, 4, window=6, most=4)
    first = pool.acquire(keys_of(7), 28)
    assert (first.left, len(first.blocks)) == (0, 4)
    for index in range(4):
        pool.seal(first, index, keys_of(7)[index])
    pool.leave_behind(first, 16)
    assert (first.left, pool.referenced, pool.evictable) == (2, 2, 2)
    second = pool.acquire(keys_of(7), 28)
    assert (second.cached, second.left, len(second.held)) == (4, 2, 4)
    assert second.blocks[:4] == first.blocks
    pool.check()
    pool.leave_behind(second, 17)
    assert second.left == 3, "position 17 sees 12 and later"
    pool.leave_behind(second, 16)
    assert second.left == 3, "what was given back is not taken again"
    for lease in (first, second):
        pool.release(lease)
    pool.check()
    assert pool.available == 8


def lose(pool, *indices):
    """Forget these blocks of the chain, as if others had needed them."""
    for index in indices:
        block = pool._index[keys_of(20)[index]]
        pool._forget(block)
        del pool._unheld[block]
        pool._free.append(block)


def cached_pool(window):
    """A pool of 4 positions a block, in which 8 blocks of a chain are cached and held by nobody."""
    pool = BlockPool(10, 4, window=window)
    lease = pool.acquire(keys_of(8), 33)
    for index in range(8):
        pool.seal(lease, index, keys_of(8)[index])
    pool.release(lease)
    return pool


@pytest.mark.parametrize(
    ("window", "gone", "cached"),
    [
        (None, (0,), 0),
        (None, (5,), 5),
        (1, range(7), 8),  # a position sees only itself; the last block shows that the prefix was computed
        (1, range(8), 0),
        (5, range(7), 8),  # position 32 sees 28 to 32
        (6, range(7), 0),  # and now 27 too, in block 6
        (6, range(6), 8),
        (6, (7,), 7),
        (6, (6,), 6),
        (6, (6, 3), 6),
        (6, (6, 4), 4),  # position 24 would see 19, which lies in block 4
        (33, (), 8),
        (33, (0,), 0),
    ],
)
def test_a_prefix_is_found_without_the_blocks_that_its_last_window_left(window, gone, cached):
    pool = cached_pool(window)
    lose(pool, *gone)
    quote = pool.quote(keys_of(8), 33)
    lease = pool.acquire(keys_of(8), 33)
    assert (lease.cached, quote.cached) == (cached, cached)
    assert len(lease.blocks) == 9, "every position has its place in the table"
    kept = [pool.key_of(block) for block in lease.blocks[lease.left : cached]]
    assert kept == keys_of(8)[lease.left : cached]
    pool.check()
    pool.release(lease)
    pool.check()
    assert pool.available == 10


def test_a_preempted_sequence_goes_on_from_its_last_window():
    harness = Harness(config(5, window=6, max_num_seqs=1, max_num_batched_tokens=8))
    harness.submit(request("a", PROMPT, max_tokens=14))
    for step in range(12):
        harness.step()
        if step > 6:
            harness.scheduler._preempt(harness.scheduler._running[-1])
    harness.drain()
    again = [admit for plan in harness.plans for admit in plan.admits if len(admit.tokens) > 50]
    assert len(again) == harness.resumed == 5
    assert [admit.computed for admit in again] == [(len(admit.tokens) - 1) // 4 * 4 for admit in again]


def test_a_window_sees_a_position_at_least():
    with pytest.raises(ConfigError) as refused:
        config(window=0)
    assert refused.value.option == "window"
