"""Randomness without state: the number behind each drawn token is a function of seed, choice and position.

Philox-4x32 with 10 rounds: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011),
section 3.3 and table 2. Its output for a counter depends on nothing else, so preemption, batching, replay and recovery
cannot change what is drawn.
"""

from __future__ import annotations

__all__ = ["philox4x32", "uniform"]

Words4 = tuple[int, int, int, int]

_ROUNDS = 10
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9  # the golden ratio
_WEYL_1 = 0xBB67AE85  # the square root of 3, less 1
_WORD = 0xFFFFFFFF


def philox4x32(counter: Words4, key: tuple[int, int]) -> Words4:
    """The block of four 32-bit words at `counter` under `key`; all arguments are 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (product_1 >> 32) ^ c1 ^ k0, product_1 & _WORD, (product_0 >> 32) ^ c3 ^ k1, product_0 & _WORD
        k0 = (k0 + _WEYL_0) & _WORD
        k1 = (k1 + _WEYL_1) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int, purpose: int = 0) -> float:
    """A number in [0, 1) with 52 random bits.

    52 and not 53, so that for every float64 `total` in the normal range `uniform(...) * total` rounds to less than
    `total`: drawing by the inverse distribution function then never runs past its end.

    Args:
        seed: any 64-bit integer, negative or not.
        choice: index of the choice in its request, below 2**32.
        position: index in the sequence of the token to be drawn, below 2**32.
        purpose: what the number is for, below 2**32: 0 draws the token; other random decisions there use other numbers.
    """
    key = (seed & _WORD, (seed >> 32) & _WORD)
    high, low, _, _ = philox4x32((position, choice, purpose, 0), key)
    return ((high << 20) | (low >> 12)) * 2.0**-52
