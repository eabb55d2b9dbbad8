"""The first place where two answers differ, and the fields in which two contracts do."""

from __future__ import annotations

import struct
from dataclasses import replace

import msgspec
import pytest
from certificate_makers import ANSWER, CONTRACT, choice

from penstock.certificates import Trail, contract_differences, first_difference
from penstock.contract.events import FinishReason


def test_equal_answers_differ_nowhere():
    assert first_difference(ANSWER, ANSWER) is None


@pytest.mark.parametrize(
    ("computed", "explained"),
    [
        ((ANSWER[0],), "number of choices: certified 2, computed 1"),
        ((choice([5, 8, 7], [-0.5, -0.25, -3.0]), ANSWER[1]), "choice 0, token 1, token: certified 6, computed 8"),
        ((choice([5, 6], [-0.5, -0.25]), ANSWER[1]), "choice 0, number of tokens: certified 3, computed 2"),
        (
            (ANSWER[0], choice([5, 2], [-0.5, -1.0], finish_reason=FinishReason.LENGTH, stop="Ende ü")),
            "choice 1, finish reason: certified stop, computed length",
        ),
        (
            (ANSWER[0], choice([5, 2], [-0.5, -1.0], finish_reason=FinishReason.STOP, stop=2)),
            "choice 1, what stopped it: certified 'Ende ü', computed 2",
        ),
        (
            (msgspec.structs.replace(ANSWER[0], logprobs="0" * 64), ANSWER[1]),
            f"choice 0, hash of the log probabilities: certified {ANSWER[0].logprobs}, computed {'0' * 64}",
        ),
    ],
)
def test_the_first_place_is_named(computed, explained):
    found = first_difference(ANSWER, computed)
    assert found is not None
    assert found.explain() == explained


def test_a_log_probability_is_named_by_its_place_and_left_alone_on_request():
    computed = (choice([5, 6, 7], [-0.5, -0.2500001, -3.0]), ANSWER[1])
    found = first_difference(ANSWER, computed)
    assert found is not None
    assert (found.choice, found.position, found.what) == (0, 1, "log probability (mark)")
    assert first_difference(ANSWER, computed, tokens_only=True) is None


def test_every_bit_of_every_log_probability_and_rank_is_in_the_hash():
    def digest(logprob: float, rank: int) -> str:
        trail = Trail()
        trail.add(3, logprob, rank)
        trail.add(4, -1.0, 1)
        return trail.digest

    whole = digest(-0.5, 1)
    assert digest(-0.5, 2) != whole
    (bits,) = struct.unpack("<I", struct.pack("<f", -0.5))
    for bit in range(32):
        (changed,) = struct.unpack("<f", struct.pack("<I", bits ^ 1 << bit))
        assert digest(changed, 1) != whole


def test_contracts_differ_field_by_field():
    assert contract_differences(CONTRACT, CONTRACT) == []
    here = replace(CONTRACT, form="int8", max_model_len=512)
    assert contract_differences(CONTRACT, here) == [("form", "bf16", "int8"), ("max_model_len", "0", "512")]
