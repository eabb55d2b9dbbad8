"""Blocks that are saved and read back: what is planned, and what becomes of it when they are gone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_harness import Harness, config, request, run_workload, stored_prefix
from test_core_episodes import WORKLOADS, said_of

from penstock.contract.errors import ConfigError, EngineFault
from penstock.contract.plan import RowResult, StepResult
from penstock.core.replaying import replay

PROMPT = tuple(range(10)) + tuple(range(10)) + (3, 1, 4)  # five blocks of four, and three tokens


def harness(stored=None, **options) -> Harness:
    made = Harness(config(**{"storing": True, **options}))
    made.memory_of_disk = None
    made._look_up = lambda: look_up(made)
    if stored is not None:
        made.runner.stored = stored
    return made


def look_up(made: Harness) -> None:
    """A store that tells the truth."""
    for seq_id, present, keys in made.scheduler.unsought():
        made.note_stored(seq_id, present + stored_prefix(made.runner, keys))


def after_a_first(**options) -> Harness:
    """A process that has computed the prompt, and what it left."""
    first = harness(**options)
    first.submit(request("first", PROMPT, max_tokens=6))
    first.drain()
    return first


def test_full_blocks_are_saved_and_the_rest_is_not():
    first = after_a_first()
    saves = [save for plan in first.plans for save in plan.saves]
    assert [save.tokens for save in saves[:5]] == [PROMPT[at : at + 4] for at in range(0, 20, 4)]
    assert len(saves) == (len(PROMPT) + 6 - 1) // 4, "the last token is never computed"
    assert [save.parent for save in saves[1:]] == [save.key for save in saves[:-1]]
    assert [save.before for save in saves] == list(range(len(saves)))
    first.submit(request("again", PROMPT, max_tokens=6))
    first.drain()
    again = [save.key for plan in first.plans for save in plan.saves][len(saves) :]
    assert again == [save.key for save in saves[5:]], "what is generated is computed, and the store has it already"


def test_what_was_saved_is_read_by_the_next_process():
    first = after_a_first()
    second = harness(first.runner.stored)
    second.submit(request("second", PROMPT, max_tokens=6))
    second.drain()
    assert sum(plan.num_tokens for plan in second.plans) == 3 + 5, "the rest of the prompt, and tokens but the last"
    assert second.admitted["second"] == 20
    assert second.scheduler.stats.restored_tokens == second.scheduler.stats.sought_tokens == 20
    assert second.tokens["second"] == first.tokens["first"]
    assert replay(line + "\n" for line in second.trace).difference == ""


def test_memory_comes_first():
    first = after_a_first()
    first.submit(request("again", (*PROMPT[:12], 7, 7, 7, 7, 7), max_tokens=2))
    first.drain()
    assert first.scheduler.stats.restored_tokens == 0
    assert first.admitted["again"] == 12


def test_a_preempted_sequence_reads_what_memory_has_forgotten_meanwhile():
    """All its blocks were there when it was preempted; then the sequence that went on took them."""
    both = harness(num_blocks=16, max_num_seqs=2)
    both.submit(request("a", PROMPT, max_tokens=24))
    both.submit(request("b", PROMPT[7:], max_tokens=24))
    both.drain()
    assert both.scheduler.stats.preemptions == 1
    (again,) = [admit for plan in both.plans for admit in plan.admits if len(admit.tokens) > admit.prompt_tokens]
    reads = [(row.start, row.count) for plan in both.plans for row in plan.rows if row.stored]
    assert sum(count for _, count in reads) == (len(again.tokens) - 1) // 4 * 4 - again.computed > 0
    assert replay(line + "\n" for line in both.trace).difference == ""


def test_who_waits_for_a_shared_prefix_waits_while_it_is_read():
    stored = after_a_first().runner.stored
    second = harness(stored, max_num_seqs=2)
    for name in "ab":
        second.submit(request(name, PROMPT, max_tokens=3))
    second.drain()
    assert second.scheduler.stats.restored_tokens == 20
    assert second.admitted == {"a": 20, "b": 20}


@pytest.mark.parametrize("gone", range(5))
def test_what_is_gone_is_computed(gone):
    first = after_a_first()
    second = harness(first.runner.stored)
    key = [save.key for plan in first.plans for save in plan.saves][gone]
    second.submit(request("second", PROMPT, max_tokens=6))
    second._look_up = lambda: None
    second.note_stored("second", 5)
    del second.runner.stored[key]
    second.drain()
    assert second.scheduler.stats.restored_tokens == 4 * gone
    assert second.admitted["second"] == 4 * gone
    assert second.tokens["second"] == first.tokens["first"]
    assert key in second.runner.stored, "it is saved again"


def test_a_step_reads_as_much_as_it_may():
    stored = after_a_first().runner.stored
    second = harness(stored, max_num_batched_tokens=8, max_num_seqs=2, step_target_ms=10)
    second.submit(request("other", (9, 9, 9), max_tokens=12))
    second.step()
    second.submit(request("second", PROMPT, max_tokens=6))
    second.drain()
    assert [len(row.stored) for plan in second.plans for row in plan.rows if row.stored] == [2, 2, 1]


def test_reading_that_takes_longer_than_computing_is_not_done_but_now_and_then():
    second, done = harness(after_a_first().runner.stored, max_num_seqs=1), []
    timed = second._timed

    def slow(result):
        reads = second.flights[0].num_restored > 0
        done.extend([number] if reads else [])
        return replace(timed(result), seconds=1.001 if reads else 0.001, restoring=1.0 if reads else 0.0)

    second._timed = slow
    for number in range(40):
        second.submit(request(f"s{number}", PROMPT, max_tokens=3))
        second.drain()
        second.reset()
    assert 0 in done
    assert 1 < len(done) < 5


def test_lost_memory_is_not_saved():
    """A block that was sealed in a step, and is in no plan yet when the process that holds it ends."""
    first = harness()
    first.submit(request("first", PROMPT, max_tokens=6))
    first.step()
    assert first.scheduler._restoring.pending
    first.kill()
    assert not first.scheduler._restoring.pending
    first.drain()


def test_nothing_is_looked_for_while_suspects_are_computed_alone():
    first = harness(after_a_first().runner.stored, max_num_seqs=2)
    first.poison("bad")
    first.submit(request("bad", (8, 8), max_tokens=3))
    first.submit(request("good", PROMPT, max_tokens=3))
    first.plan()
    first.commit()
    assert first.finds_out
    assert first.scheduler.unsought() == []
    first.drain()


def test_a_result_that_says_more_of_a_reading_row_is_refused():
    second = harness(after_a_first().runner.stored)
    second.submit(request("second", PROMPT))
    plan = second.plan()
    (row,) = plan.rows
    assert row.stored
    for wrong in (RowResult(0, restored=5), RowResult(0, restored=-1), RowResult(0, waits=True)):
        with pytest.raises(EngineFault):
            second.scheduler.commit(plan, StepResult(plan.step, (wrong,)))


@pytest.mark.parametrize("options", [{"window": 8}, {"prefix_caching": False}])
def test_it_is_refused_where_it_cannot_be(options):
    with pytest.raises(ConfigError):
        config(storing=True, **options)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("checkpoints", [None, 1, 8])
def test_a_store_changes_no_event(depth, checkpoints):
    for seed in range(WORKLOADS):
        options = {"checkpoints": checkpoints, "prefix_caching": True}
        plain, other = run_workload(seed, **options), run_workload(seed, depth, storing=True, **options)
        assert said_of(other) == said_of(plain), f"run_workload({seed}, {depth}, checkpoints={checkpoints})"
