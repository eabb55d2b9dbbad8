"""Drafts of a model that carries state: the state before each draft is kept, and the row goes on from one of these."""

from __future__ import annotations

import pytest
from core_harness import FakeDrafter, Harness, config, request

from penstock.contract.errors import ConfigError, EngineFault
from penstock.core.spare_states import NO_SPARE, SpareStates

PROMPT = [(3 * index) % 7 for index in range(10)]


class Script(FakeDrafter):
    """Says how many of four drafts are right, call by call."""

    def __init__(self, *right):
        super().__init__(1.0, count=4)
        self._script = list(right)

    def draft(self, req, known, cfg):
        right = self._script.pop(0) if self._script else 0
        golden = super().draft(req, known, cfg)
        return tuple(token if at < right else (token + 1) % 11 for at, token in enumerate(golden))


def stateful(*right, spares=8, **options):
    options = {"checkpoints": 8, "checkpoint_interval": 16, **options}
    return Harness(config(48, spare_states=spares, **options), Script(*right))


def rows_of(harness):
    """Start, number of drafts and resumed place of each row that could have drafts."""
    return [(row.start, len(row.drafts), row.resume) for plan in harness.plans for row in plan.rows if row.start]


def test_a_row_resumes_from_the_state_before_the_first_wrong_draft():
    harness = stateful(2, 4, 0)
    harness.submit(request("a", PROMPT, max_tokens=15))
    harness.drain()
    first, second, third, fourth = rows_of(harness)[:4]
    spares = [row.spares for plan in harness.plans for row in plan.rows if row.drafts]
    assert first == (10, 4, NO_SPARE)
    assert second == (13, 4, spares[0][2]), "the state before the third draft, which was wrong"
    assert third == (18, 4, NO_SPARE), "all drafts were right: its own place"
    assert fourth == (19, 4, spares[2][0])
    assert all(len(set(each)) == len(each) for each in spares)


def test_a_place_that_a_row_resumes_from_is_not_written_in_the_same_plan():
    harness = stateful(0, 0, 0, 0, spares=4)
    harness.submit(request("a", PROMPT, max_tokens=12))
    harness.drain()
    drafts = [count for _, count, _ in rows_of(harness)]
    assert drafts[:3] == [4, 3, 3], "one place is held, and may be written again from the next plan on"
    for plan in harness.plans:
        for row in plan.rows:
            assert row.resume not in row.spares


def test_drafts_share_the_places_that_are_free():
    harness = stateful(4, 4, 4, 4, spares=5)
    for name in "ab":
        harness.submit(request(name, PROMPT, max_tokens=9))
    harness.drain()
    counts = [sum(len(row.drafts) for row in plan.rows) for plan in harness.plans]
    assert max(counts) == 5


def test_without_spare_places_nothing_is_drafted():
    harness = stateful(4, spares=0)
    harness.submit(request("a", PROMPT))
    harness.step()
    assert list(harness.scheduler.draftable()) == []


@pytest.mark.parametrize("ends", ["abort", "drop", "fail"])
def test_places_are_free_again_however_a_sequence_leaves(ends):
    harness = stateful(1, 1)
    harness.submit(request("a", PROMPT, max_tokens=20))
    for _ in range(2):
        harness.step()
    assert harness.scheduler._states.spares.available == 7, "it will resume from one"
    harness.plan()
    if ends == "drop":
        harness.drop()
        assert harness.scheduler._states.spares.available == 8
    elif ends == "abort":
        harness.abort("a")
        assert harness.scheduler._states.spares.available == 8 - 4, "a plan in flight still writes to these"
    else:
        harness.fail("a")
    harness.drain()
    assert harness.scheduler._states.spares.available == 8


def test_a_block_that_right_drafts_fill_is_continued_by_the_next_turn():
    """Its state is kept although its key is known only once the drafts are judged."""
    harness = stateful(4, 4, 4)
    harness.submit(request("a", PROMPT, max_tokens=11))
    harness.drain()
    kept = [kept.position for plan in harness.plans for row in plan.rows for kept in row.checkpoints]
    assert kept == [8, 12, 16, 20]
    turn = [*PROMPT, *harness.tokens["a"], 5, 5]
    harness.submit(request("b", turn))
    harness.drain()
    assert harness.admitted["b"] == 20


def test_a_state_behind_a_wrong_draft_is_not_kept():
    harness = stateful(1)
    harness.submit(request("a", PROMPT, max_tokens=3))
    harness.step()
    harness.step()  # positions 10 to 14, of which 10 and 11 count
    states = harness.scheduler._pool._checkpoints
    assert (len(states), len(states.pending)) == (2, 0), "after 8 and 12 positions, and none after a wrong one"
    harness.drain()


def test_a_row_behind_one_that_waits_has_no_drafts():
    """It draws where the earlier row waits, from the state behind that place, which has moved on."""
    harness = stateful(3, 4, 4)
    harness.submit(request("a", PROMPT, max_tokens=12))
    harness.step()
    harness.let_wait("a", 2)  # once one draft was right, and again
    harness.drain()
    assert rows_of(harness)[:4] == [(10, 4, NO_SPARE), (11, 0, 1), (11, 0, NO_SPARE), (12, 4, NO_SPARE)]


def test_places_are_handed_out_settled_and_given_back():
    spares = SpareStates(4)
    taken = spares.take(3)
    spares.check([])
    spares.settle(taken, taken[1])
    spares.check([taken[1]])
    assert spares.available == 3
    with pytest.raises(EngineFault, match="spare states"):
        spares.check([])
    spares.give_back(taken[1])
    spares.take(2)
    spares.drop_written()
    assert spares.available == 4


def test_spare_places_need_a_model_that_carries_state():
    with pytest.raises(ConfigError, match="spare_states"):
        config(8, spare_states=1)
    with pytest.raises(ConfigError, match="spare_states"):
        config(8, checkpoints=1, spare_states=-1)
