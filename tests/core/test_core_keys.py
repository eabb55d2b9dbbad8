"""Block keys: equal exactly when model, salt and every token up to the block's end are equal."""

from __future__ import annotations

import hashlib
import struct

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.block_keys import KeyChain, block_key, root_key

tokens = st.lists(st.integers(0, 2**63 - 1) | st.integers(0, 3), max_size=12)


def keys_of(root: bytes, salt: str, block_size: int, sequence: list[int]) -> list[bytes]:
    chain = KeyChain(root_key(root, salt), block_size)
    chain.follow(sequence)
    return chain.keys


@given(tokens, tokens, st.sampled_from(["", "a", "b"]), st.sampled_from(["", "a", "b"]), st.integers(1, 4))
def test_keys_are_equal_exactly_for_equal_prefixes(one, other, salt_one, salt_other, size):
    keys_one, keys_other = keys_of(b"m", salt_one, size, one), keys_of(b"m", salt_other, size, other)
    for index, (key_one, key_other) in enumerate(zip(keys_one, keys_other, strict=False)):
        end = (index + 1) * size
        same = salt_one == salt_other and one[:end] == other[:end]
        assert (key_one == key_other) == same


@given(st.binary(max_size=4), st.text(max_size=3), st.binary(max_size=4), st.text(max_size=3))
def test_roots_do_not_confuse_the_model_with_the_salt(root_one, salt_one, root_other, salt_other):
    same = (root_one, salt_one) == (root_other, salt_other)
    assert (root_key(root_one, salt_one) == root_key(root_other, salt_other)) == same


@given(st.text(max_size=3), st.text(max_size=3), st.sampled_from(["", "1a", "1b"]), st.sampled_from(["", "1a"]))
def test_an_adapter_has_roots_of_its_own(salt_one, salt_other, adapter_one, adapter_other):
    same = (salt_one, adapter_one) == (salt_other, adapter_other)
    assert (root_key(b"m", salt_one, adapter_one) == root_key(b"m", salt_other, adapter_other)) == same


def test_without_an_adapter_a_root_is_as_it_always_was():
    """Blocks that an earlier version stored are found."""
    message = struct.pack("<Q", 1) + b"m" + struct.pack("<Q", 1) + b"s"
    assert root_key(b"m", "s") == hashlib.blake2b(message, digest_size=32, person=b"penstock root").digest()


def test_token_ids_have_a_fixed_width():
    assert block_key(b"p" * 32, [1, 256]) != block_key(b"p" * 32, [256, 1])
    assert block_key(b"p" * 32, [0x0101]) != block_key(b"p" * 32, [1, 1])


def test_only_full_blocks_have_keys():
    assert [len(keys_of(b"", "", 4, list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


@given(tokens, st.integers(1, 4))
def test_growing_token_by_token_gives_the_same_keys(sequence, size):
    chain = KeyChain(root_key(b"m", ""), size)
    for end in range(len(sequence) + 1):
        chain.follow(sequence[:end])
    assert chain.keys == keys_of(b"m", "", size, sequence)


def test_a_salt_may_be_any_text():
    assert root_key(b"", "\ud800") != root_key(b"", "\udfff")
