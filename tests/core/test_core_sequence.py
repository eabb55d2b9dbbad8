"""A sequence's own laws: legal changes of state, and what ends it."""

from __future__ import annotations

import itertools

import pytest
from core_harness import request

from penstock.contract.errors import EngineFault
from penstock.contract.events import Finished, FinishReason
from penstock.core.block_keys import KeyChain
from penstock.core.block_pool import Lease
from penstock.core.sequence import TRANSITIONS, Seq, SeqState


def seq(limit=10, **options) -> Seq:
    return Seq(request("s", **options), (0.0, 0), limit, KeyChain(b"", 4))


MOVES = {
    SeqState.RUNNING: lambda s: s.admit(Lease([0], 0, 0), 0, 0),
    SeqState.WAITING: lambda s: s.preempt(),
    SeqState.FINISHED: lambda s: s.finish(),
}


def in_state(state: SeqState) -> Seq:
    made = seq()
    if state is not SeqState.WAITING:
        MOVES[state](made)
    return made


@pytest.mark.parametrize(("start", "end"), list(itertools.product(SeqState, SeqState)))
def test_only_the_tables_transitions_are_legal(start, end):
    made = in_state(start)
    if end in TRANSITIONS[start]:
        MOVES[end](made)
        assert made.state is end
    else:
        with pytest.raises(EngineFault):
            MOVES[end](made)
        assert made.state is start


@pytest.mark.parametrize("state", [SeqState.WAITING, SeqState.FINISHED])
def test_who_does_not_run_has_neither_lease_nor_slot(state):
    made = in_state(state)
    assert made.holds_nothing
    with pytest.raises(EngineFault):
        _ = made.lease
    with pytest.raises(EngineFault):
        _ = made.slot


def test_preemption_keeps_the_tokens_and_nothing_else():
    made = seq()
    made.admit(Lease([0], 0, 0), 0, 0)
    made.computed = 3
    made.tokens.append(9)
    made.preempt()
    assert (made.tokens, made.computed, made.remaining) == ([1, 2, 3, 9], 0, 4)


@pytest.mark.parametrize(
    ("generated", "min_tokens", "expected"),
    [
        ([5], 0, None),
        ([9], 0, Finished("s", FinishReason.STOP, stop_token=9)),
        ([9], 1, Finished("s", FinishReason.STOP, stop_token=9)),
        ([9], 2, None),
        ([5, 9], 2, Finished("s", FinishReason.STOP, stop_token=9)),
        ([9, 5], 2, None),
        ([5, 5, 5, 5], 0, Finished("s", FinishReason.LENGTH)),
        ([5, 5, 5, 9], 0, Finished("s", FinishReason.STOP, stop_token=9)),
        ([5, 5, 5, 9], 5, Finished("s", FinishReason.LENGTH)),
    ],
)
def test_a_sequence_ends_by_a_stop_id_or_by_its_limit(generated, min_tokens, expected):
    made = seq(limit=7, max_tokens=4, min_tokens=min_tokens, token_ids=(9,))
    made.tokens += generated
    assert made.ending() == expected
