"""The counter-based uniform against published vectors, and as a random number."""

from __future__ import annotations

import math

import pytest

from penstock.sampling.uniform import philox4x32, uniform

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "block"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter, key, block):
    assert philox4x32(counter, key) == block


def test_numbers_are_even_over_each_of_their_arguments():
    count, bins = 20_000, 50
    for draw in (lambda i: uniform(i, 0, 0), lambda i: uniform(-7, i, 3), lambda i: uniform(1 << 40, 2, i)):
        cells = [0] * bins
        for i in range(count):
            cells[int(draw(i) * bins)] += 1
        chi_square = sum((cell - count / bins) ** 2 / (count / bins) for cell in cells)
        assert chi_square < 93.2  # 49 degrees of freedom: exceeded once in 10,000 honest runs


def test_every_argument_matters():
    numbers = {uniform(seed, choice, at) for seed in (-1, 0, 1, 1 << 32, 1 << 62) for choice in (0, 1) for at in (0, 1)}
    assert len(numbers) == 20


def test_numbers_have_52_bits_and_their_product_stays_below_any_total():
    number = uniform(12345, 1, 2)
    assert 0.0 <= number < 1.0
    assert (number * 2**52).is_integer()
    largest = 1 - 2.0**-52
    for total in (0.5, 0.999, math.nextafter(1.0, 0.0), 1.0, math.nextafter(1.0, 2.0), 1.0000001, 1.9999):
        assert largest * total < total
