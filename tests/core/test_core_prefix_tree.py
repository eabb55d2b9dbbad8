"""The prefix cache as a tree: every cached block in one node, in its place, with what it was good for."""

from __future__ import annotations

from collections import Counter

from core_harness import Harness, config, request
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.contract.engine_views import PrefixNode, PrefixTree
from penstock.core.block_keys import KeyChain, root_key
from penstock.core.block_pool import BlockPool, Lease
from penstock.core.block_uses import prefix_tree

SIZE = 2


def held(pool: BlockPool, text: str, salt: str = "") -> Lease:
    """Acquire blocks for a text with a token for each letter, and seal all that it fills."""
    chain = KeyChain(root_key(b"m", salt), SIZE)
    chain.follow([ord(letter) for letter in text])
    lease = pool.acquire(chain.keys, len(text))
    assert lease is not None
    for index in range(lease.sealed, len(chain.keys)):
        pool.seal(lease, index, chain.keys[index], chain.keys[index - 1] if index else chain.root)
    return lease


def cached(pool: BlockPool, *texts: str) -> None:
    for text in texts:
        pool.release(held(pool, text))


def tree_of(pool: BlockPool, most: int = 200) -> PrefixTree:
    return prefix_tree(pool.cached(), most)


def test_what_two_prompts_share_is_one_node_and_each_goes_on_below_it():
    pool = BlockPool(32, SIZE)
    cached(pool, "aabbccdde", "aabbxxyyzz")
    tree = tree_of(pool)
    assert tree.nodes == (
        PrefixNode(parent=-1, start=0, blocks=2, held=0, hits=1, hit_tokens=4, idle=0, below=5),
        PrefixNode(parent=0, start=4, blocks=3, held=0, hits=0, hit_tokens=0, idle=0, below=0),
        PrefixNode(parent=0, start=4, blocks=2, held=0, hits=0, hit_tokens=0, idle=1, below=0),
    )
    assert (tree.block_size, tree.blocks, tree.left_out) == (SIZE, 7, 0)


def test_salts_do_not_meet_and_blocks_in_use_are_told():
    pool = BlockPool(32, SIZE)
    held(pool, "aabbc", salt="one")
    pool.release(held(pool, "aabbc", salt="two"))
    assert sorted(tree_of(pool).nodes) == [
        PrefixNode(-1, 0, 2, held=0, hits=0, hit_tokens=0, idle=0, below=0),
        PrefixNode(-1, 0, 2, held=2, hits=0, hit_tokens=0, idle=1, below=0),
    ]


def test_how_long_ago_a_prefix_was_of_use_is_counted_in_admissions():
    pool = BlockPool(32, SIZE)
    cached(pool, "aabbc", "xxyyz", "xxyyz", "uuvvw")
    idle = {(node.hits, node.idle) for node in tree_of(pool).nodes}
    assert idle == {(0, 3), (1, 1), (0, 0)}


def test_a_block_that_takes_over_a_key_takes_over_what_it_was_good_for():
    pool = BlockPool(32, SIZE)
    cached(pool, "aabbc", "aabbc")
    assert [node.hits for node in tree_of(pool).nodes] == [1]
    lease = pool.acquire([], 5)  # computes the same without looking it up
    chain = KeyChain(root_key(b"m", ""), SIZE)
    chain.follow([ord(letter) for letter in "aabbc"])
    parent = chain.root
    for index, key in enumerate(chain.keys):
        pool.seal(lease, index, key, parent)
        parent = key
    (node,) = tree_of(pool).nodes
    assert (node.blocks, node.held, node.hits) == (2, 2, 1)


def test_a_block_that_is_used_again_for_something_else_begins_anew():
    pool = BlockPool(3, SIZE)
    cached(pool, "aabbc", "aabbc", "xxyyz")
    (node,) = tree_of(pool).nodes[:1]
    assert node.hits == 0


def test_a_tail_whose_beginning_is_gone_is_a_tree_of_its_own_in_its_place():
    pool = BlockPool(8, SIZE, window=4)
    lease = held(pool, "aabbccdde")
    pool.leave_behind(lease, 8)
    pool.release(lease)
    taken = pool.acquire([], 10)  # all that was free, and what the window left first
    assert taken is not None
    assert pool.extend(taken, pool.free + 1)
    nodes = tree_of(pool).nodes
    assert [node.parent for node in nodes] == [-1]
    assert nodes[0].start > 0


def test_the_largest_are_told_and_the_rest_is_summed_up():
    pool = BlockPool(64, SIZE)
    cached(pool, "aabbccddeeffg", "xxyyzz1", "xxyy112233445", "uuv", "pppp1")
    tree = tree_of(pool, most=3)
    assert len(tree.nodes) == 3
    assert sum(node.blocks for node in tree.nodes) + tree.left_out == tree.blocks == 6 + 3 + 4 + 1 + 2
    assert tree.nodes[0].below == 5
    assert tree_of(pool, most=0).left_out == tree.blocks


texts = st.lists(st.text("ab", min_size=1, max_size=14), max_size=12)


@settings(max_examples=200, deadline=None)
@given(texts, st.integers(1, 9))
def test_every_cached_block_is_in_one_node_in_its_place(prompts, most):
    pool = BlockPool(256, SIZE)
    cached(pool, *prompts)
    prefixes = {text[:end] for text in prompts for end in range(SIZE, len(text) + 1, SIZE)}
    assert tree_of(pool).blocks == len(prefixes)
    by_start = Counter[int]()
    for node in (tree := tree_of(pool, 10_000)).nodes:
        for index in range(node.blocks):
            by_start[node.start + index * SIZE] += 1
        children = [each for each in tree.nodes if each.parent == tree.nodes.index(node)] if node.below else []
        assert len(children) != 1, "a chain of single children is one node"
        if node.parent >= 0:
            parent = tree.nodes[node.parent]
            assert parent.start + parent.blocks * SIZE == node.start
    assert by_start == Counter(len(prefix) - SIZE for prefix in prefixes)
    assert sum(node.hit_tokens for node in tree.nodes) == pool.hit_tokens
    part = tree_of(pool, most)
    assert sum(node.blocks for node in part.nodes) + part.left_out == part.blocks
    assert all(node.parent < index for index, node in enumerate(part.nodes))


def test_answers_that_share_a_prompt_branch_off_where_it_ends():
    run = Harness(config(num_blocks=32, block_size=2))
    run.submit(request("one", (1, 2, 3, 4, 5), max_tokens=6))
    run.drain()
    run.submit(request("two", (1, 2, 3, 4, 6), max_tokens=6))
    run.drain()
    tree = prefix_tree(run.scheduler.cached_blocks())
    first, *others = tree.nodes
    assert (first.parent, first.start, first.blocks, first.hits, first.hit_tokens) == (-1, 0, 2, 1, 4)
    assert [(node.parent, node.start, node.blocks) for node in others] == [(0, 4, 3), (0, 4, 3)]
    run.scheduler.reset_prefix_cache()
    assert prefix_tree(run.scheduler.cached_blocks()) == PrefixTree(2, 0, (), 0)
