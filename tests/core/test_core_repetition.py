"""A loop at the end of the output is seen where there is one, and nowhere else, and ends the sequence."""

from __future__ import annotations

from random import Random

import pytest

from penstock.contract.events import FinishReason
from penstock.contract.request import SequenceRequest, StopRules
from penstock.core.block_keys import KeyChain, root_key
from penstock.core.repetition import loops
from penstock.core.sequence import Seq


def by_definition(output, shortest, longest, count):
    for size in range(shortest, longest + 1):
        pattern = output[len(output) - size :]
        if len(output) >= size * count and output[len(output) - size * count :] == pattern * count:
            return True
    return False


def test_a_loop_is_copies_of_one_pattern_at_the_end():
    draw, seen = Random(1), {True: 0, False: 0}
    for _ in range(4000):
        prompt = [1] * draw.randint(1, 4)
        output = [draw.randrange(2) for _ in range(draw.randint(0, 14))]
        sizes = sorted((draw.randint(1, 5), draw.randint(1, 5)))
        count = draw.randint(2, 4)
        expected = by_definition(output, *sizes, count)
        assert loops(prompt + output, len(prompt), *sizes, count) == expected
        seen[expected] += 1
    assert min(seen.values()) > 500


@pytest.mark.parametrize(("min_tokens", "ends_at"), [(0, 6), (9, 10)])
def test_a_loop_ends_the_sequence_but_not_before_min_tokens(min_tokens, ends_at):
    rules = StopRules(max_tokens=50, min_tokens=min_tokens, repetition=(1, 4, 3))
    request = SequenceRequest("a", (5, 6), stop=rules)
    seq = Seq(request, (0.0,), 52, KeyChain(root_key(b"", ""), 4))
    for step in range(1, 50):
        seq.tokens.append(7 + step % 2 if step < 9 else 7)  # 8 7 8 7 8 7 8 7 7 7
        ending = seq.ending()
        if ending is not None:
            break
    assert (step, ending.reason) == (ends_at, FinishReason.REPETITION)
