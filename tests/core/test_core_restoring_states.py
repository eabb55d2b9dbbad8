"""Recurrent state that is saved and read back with the blocks before it: all of a prefix counts, or nothing of it."""

from __future__ import annotations

import pytest
from core_harness import Harness, request
from test_core_restoring import harness

from penstock.core.replaying import replay

PROMPT = tuple((3 * index) % 7 for index in range(50))


def stateful(before: Harness | None = None, **options) -> Harness:
    options = {"num_blocks": 48, "checkpoints": 8, "checkpoint_interval": 16, **options}
    made = harness(None if before is None else before.runner.stored, **options)
    if before is not None:
        made.runner.stored_states = before.runner.stored_states
    return made


def after_a_first(tokens: int = 8) -> Harness:
    """A process that has answered the prompt, and what it left."""
    first = stateful()
    first.submit(request("first", PROMPT, max_tokens=tokens))
    first.drain()
    return first


def saved_at(made: Harness) -> list[int]:
    return [4 * (save.before + 1) for plan in made.plans for save in plan.state_saves]


def read_rows(made: Harness) -> list[tuple[int, int, bool]]:
    """Start, count and whether a state is read, of each row that reads."""
    return [(row.start, row.count, bool(row.state)) for plan in made.plans for row in plan.rows if row.stored]


def test_states_of_prompts_are_saved_when_they_are_kept_and_of_answers_the_last():
    assert saved_at(after_a_first()) == [16, 32, 48, 56], "not the one at 52, which 56 followed"


def test_an_answer_whose_last_state_is_at_the_interval_saves_it_once():
    first = stateful()
    first.submit(request("first", PROMPT[:26], max_tokens=8))
    first.drain()
    assert saved_at(first) == [16, 24, 32]


def test_the_next_process_reads_blocks_and_the_state_behind_them():
    first = after_a_first()
    second = stateful(first)
    second.submit(request("second", PROMPT, max_tokens=8))
    second.drain()
    assert second.admitted["second"] == 48
    assert read_rows(second) == [(0, 48, True)]
    assert sum(plan.num_tokens for plan in second.plans) == 2 + 7
    assert second.tokens["second"] == first.tokens["first"]
    assert replay(line + "\n" for line in second.trace).difference == ""


def test_a_next_turn_goes_on_from_the_end_of_the_answer():
    first = after_a_first()
    second = stateful(first)
    second.submit(request("turn", (*PROMPT, *first.tokens["first"], 5, 5, 5), max_tokens=2))
    second.drain()
    assert second.admitted["turn"] == 56


def test_an_edit_goes_on_from_the_state_before_it():
    second = stateful(after_a_first())
    second.submit(request("edited", (*PROMPT[:30], 6, 6, 6, 6, 6), max_tokens=2))
    second.drain()
    assert second.admitted["edited"] == 16


def test_what_was_read_is_found_in_memory_then():
    second = stateful(after_a_first())
    for name in ("one", "two"):
        second.submit(request(name, PROMPT, max_tokens=2))
        second.drain()
    assert read_rows(second) == [(0, 48, True)]
    assert second.admitted == {"one": 48, "two": 48}
    assert 48 not in saved_at(second), "what was read is not saved again"


def test_a_prefix_is_read_in_several_steps_and_counts_at_the_end():
    second = stateful(after_a_first(), max_num_batched_tokens=8, max_num_seqs=2, step_target_ms=10)
    second.submit(request("other", (6, 6, 6), max_tokens=20))
    second.step()
    second.submit(request("second", PROMPT, max_tokens=2))
    second.drain()
    assert read_rows(second) == [(start, 8, start == 40) for start in range(0, 48, 8)]
    assert second.admitted["second"] == 48


@pytest.mark.parametrize("gone", ["first block", "last block", "state"])
@pytest.mark.parametrize("cached", [0, 16])
def test_where_anything_is_gone_all_is_computed_from_where_memory_ended(gone, cached):
    first = after_a_first()
    keys = [save.key for plan in first.plans for save in plan.saves]
    second = stateful(first, max_num_batched_tokens=8, max_num_seqs=2)
    if cached:
        second.submit(request("begins", PROMPT[: cached + 1], max_tokens=1))
        second.drain()
    second._look_up = lambda: None
    second.submit(request("second", PROMPT, max_tokens=8))
    second.note_stored("second", 12)
    at = {"first block": cached // 4, "last block": 11, "state": 11}[gone]
    del (second.runner.stored_states if gone == "state" else second.runner.stored)[keys[at]]
    second.drain()
    assert any(row[0] == cached for row in read_rows(second))
    assert second.admitted["second"] == cached
    assert second.tokens["second"] == first.tokens["first"]
    assert keys[at] in second.runner.stored
    assert keys[at] in second.runner.stored_states or gone != "state"


def test_blocks_without_a_state_are_not_read():
    first = after_a_first()
    first.runner.stored_states.clear()
    second = stateful(first)
    second.submit(request("second", PROMPT, max_tokens=2))
    second.drain()
    assert read_rows(second) == []


def test_a_preempted_sequence_reads_its_newest_state():
    """Its blocks were taken by others, and are in the store."""
    both = stateful(num_blocks=16, max_num_seqs=2, checkpoints=3, checkpoint_interval=0)
    both.submit(request("a", PROMPT[:24], max_tokens=24))
    both.submit(request("b", PROMPT[7:29], max_tokens=24))
    both.drain()
    assert both.scheduler.stats.preemptions == 1
    (again,) = [admit for plan in both.plans for admit in plan.admits if len(admit.tokens) > admit.prompt_tokens]
    assert again.computed == 0, "memory has forgotten it"
    ((start, count, state),) = read_rows(both)
    assert (start, state) == (0, True)
    assert count > again.prompt_tokens, "what it had generated is read too"


def test_lost_memory_saves_no_state():
    first = stateful()
    first.submit(request("first", PROMPT, max_tokens=6))
    while not first.scheduler._restoring._state_saves:
        first.step()
    first.kill()
    assert not first.scheduler._restoring.pending
    first.drain()
