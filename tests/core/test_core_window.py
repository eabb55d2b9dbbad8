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
    assert small.admitted["b"] == 0, "its beginning had to make room"


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


def test_a_window_sees_a_position_at_least():
    with pytest.raises(ConfigError) as refused:
        config(window=0)
    assert refused.value.option == "window"
