"""Whether a model fits, and what is said if it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.contract.errors import ConfigError
from penstock.exec.memory_plan import RESERVE, Alternative, MemoryNeeds, check_fits

MIB = 1 << 20
NEEDS = MemoryNeeds(weights=1000 * MIB, packing=50 * MIB, step=100 * MIB, block=MIB, block_tokens=16, blocks=64)


def test_the_highest_moment_counts():
    assert NEEDS.total == (1000 + 64 + 100) * MIB + RESERVE
    assert replace(NEEDS, packing=300 * MIB).total == 1300 * MIB + RESERVE


def test_tokens_are_what_the_rest_leaves_room_for():
    assert NEEDS.tokens_within(NEEDS.total) == 64 * 16
    assert NEEDS.tokens_within(NEEDS.total - 1) == 63 * 16
    assert NEEDS.tokens_within(1000 * MIB + RESERVE) == 0  # weights could not be packed
    assert replace(NEEDS, packing=300 * MIB).tokens_within(1200 * MIB + RESERVE) == 0


def test_angles_of_positions_are_counted_and_said():
    with_angles = replace(NEEDS, angles=32 * MIB)
    assert with_angles.total == NEEDS.total + 32 * MIB
    assert with_angles.tokens_within(NEEDS.total) == 32 * 16
    assert "angles of positions 32.0 MiB" in with_angles.text()
    assert "angles" not in NEEDS.text()


def test_what_fits_to_the_byte_is_taken_and_a_byte_less_is_not():
    check_fits("model", NEEDS, NEEDS.total, [])
    with pytest.raises(ConfigError):
        check_fits("model", NEEDS, NEEDS.total - 1, [])


def test_a_refusal_has_the_numbers_and_what_would_fit():
    free = 700 * MIB + RESERVE
    small = Alternative("--quantization int4", replace(NEEDS, weights=500 * MIB))
    large = Alternative("--quantization int8", replace(NEEDS, weights=900 * MIB))
    with pytest.raises(ConfigError) as refused:
        check_fits("model", NEEDS, free, [large, small])
    assert refused.value.option == "model"
    assert str(refused.value) == (
        "model: 1.2 GiB of memory are needed and 796.0 MiB are free: weights 1000.0 MiB, and 50.0 MiB while they are"
        " packed; KV cache 64.0 MiB for 1,024 tokens; steps 100.0 MiB; 96.0 MiB for the rest. What fits:"
        " --quantization int4 (1,600 tokens)"
    )


def test_a_smaller_kv_cache_is_advised_first():
    with pytest.raises(ConfigError, match=r"What fits: a KV cache of 40\.0 MiB \(640 tokens\); smaller \(8,640"):
        check_fits(
            "kv_cache_memory", NEEDS, 1140 * MIB + RESERVE, [Alternative("smaller", replace(NEEDS, weights=500 * MIB))]
        )


def test_where_nothing_fits_it_says_so():
    with pytest.raises(ConfigError, match="take a smaller model"):
        check_fits("model", NEEDS, 100 * MIB, [Alternative("--quantization int4", NEEDS)])
