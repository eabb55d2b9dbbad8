"""Planted violations of law 1 are found, and the record of the schedule replays."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import verify_fakes as fakes
from verify_fakes import SMALL, BatchLM, RowLM, ThreadLM, fake_target, target_of, wrapped

from penstock.contract.config import EngineConfig
from penstock.contract.errors import EngineFault
from penstock.core import BlockPool, block_keys
from penstock.core.replaying import replay
from penstock.verify import ScheduleCrashed, requests, verify


def found(target, kinds=None, budget=SMALL):
    """The report on a target that must be found guilty, in some of the schedules of `kinds` and in no other."""
    report = verify(target, budget, EngineConfig())
    assert not report.exact
    assert report.tally.mismatches > 0
    assert report.tally.requests > 0
    assert report.verdict_line().startswith(f"not exact: {report.tally.mismatches} mismatching tokens of ")
    guilty = [verdict for verdict in report.verdicts if verdict.first is not None]
    assert guilty[0] is report.first_failed
    for verdict in report.verdicts:
        assert bool(verdict.trace) == (verdict in guilty)
        assert kinds is None or verdict not in guilty or kinds(verdict)
    for verdict in guilty:
        outcome = replay(verdict.trace)
        assert outcome.same, outcome.explain()
        assert outcome.steps == verdict.steps
    return report


def test_a_kernel_that_looks_at_the_number_of_rows():
    report = found(target_of(BatchLM()))
    assert 0 < report.tally.largest < 1e-2  # last bits, not another computation


def test_a_kernel_that_looks_at_the_number_of_threads():
    found(target_of(ThreadLM()), kinds=lambda verdict: verdict.schedule.threads > 1)


def test_rounding_that_depends_on_where_a_chunk_begins():
    report = found(target_of(RowLM(), split_at_chunk=True))
    assert 0 < report.tally.largest < 1e-2


def test_a_generator_with_a_state(monkeypatch):
    state = random.Random(0)
    monkeypatch.setattr("penstock.exec.sampler.uniform", lambda seed, choice, position: state.random())
    report = found(target_of(RowLM()))
    greedy = {request.id for request in report.requests if request.sampling.get("temperature", 1.0) == 0}
    assert not greedy & {verdict.first.request for verdict in report.verdicts if verdict.first}


def test_a_block_table_with_a_stale_entry():
    found(wrapped(target_of(RowLM()), fakes.keep_a_stale_block))


def test_block_keys_that_forget_what_came_before(monkeypatch):
    named = block_keys.block_key
    monkeypatch.setattr(block_keys, "block_key", lambda parent, tokens: named(b"", tokens))
    found(target_of(RowLM()), kinds=lambda verdict: verdict.hit_tokens)


def test_a_sampler_that_looks_at_the_slot():
    found(wrapped(fake_target(), fakes.choose_by_slot))


def test_a_preempted_sequence_that_draws_anew():
    found(wrapped(fake_target(), fakes.choose_anew_after_preemption), kinds=lambda verdict: verdict.preemptions)


def test_penalties_that_take_recomputed_output_for_prompt(monkeypatch):
    for share in ("_GREEDY_SHARE", "_SHIFTED_SHARE"):
        monkeypatch.setattr(requests, share, 1.0)
    monkeypatch.setattr(requests, "_draw_shifts", lambda *_: {"presence_penalty": 1.0, "frequency_penalty": -0.5})
    monkeypatch.setattr(requests, "RAW", "processed_logprobs")
    guilty = wrapped(target_of(RowLM()), fakes.mistake_output_for_prompt)
    found(guilty, kinds=lambda verdict: verdict.preemptions or verdict.losses)


@pytest.mark.parametrize(("spoil", "what"), [(fakes.misplace_ranks, "ranks"), (fakes.misread_prompts, "prompt")])
def test_what_is_told_beside_the_tokens_is_compared_too(monkeypatch, spoil, what):
    monkeypatch.setattr(requests, "_SCORED_SHARE", 1.0)
    report = found(wrapped(target_of(RowLM()), spoil=spoil), budget=replace(SMALL, schedules=2))
    assert (report.tally.ids, report.tally.logprobs) == (0, 0)
    assert report.tally.others > 0
    assert f"the tokens are the same, but not its {what}" in report.first_failed.first.explain()


def test_a_prefix_hit_that_matters():
    found(wrapped(fake_target(), fakes.choose_otherwise_after_a_hit), kinds=lambda verdict: verdict.hit_tokens)


def test_log_probabilities_one_unit_off_in_the_last_place():
    report = found(wrapped(fake_target(), spoil=fakes.nudge_logprobs))
    assert report.tally.ids == 0
    assert 0 < report.tally.largest < 1e-15


def test_a_request_that_fails_in_company_only():
    report = found(wrapped(fake_target(), spoil=fakes.fail_in_company))
    assert report.first_failed.first.difference.here is None
    assert "here none (not finite)" in report.first_failed.first.explain()


def test_a_request_that_fails_even_alone_leaves_nothing_to_compare_with():
    def fail(plan, result):
        rows = tuple(fakes.RowResult(row.slot, failure="not finite") for row in plan.rows if row.sample)
        return fakes.replace(result, rows=rows)

    with pytest.raises(EngineFault, match="0/0 fails even alone: not finite"):
        verify(wrapped(fake_target(), spoil=fail), SMALL, EngineConfig())


def test_the_first_mismatch_names_both_sides_to_the_last_bit():
    report = found(wrapped(fake_target(), spoil=fakes.nudge_logprobs))
    first = report.first_failed.first
    alone, here = first.difference.alone, first.difference.here
    assert alone[0] == here[0]
    assert alone[1] != here[1]
    assert f"request {first.request} in run {first.run}, generated token {first.difference.at}" in first.explain()
    assert repr(alone[1]) in first.explain()
    assert repr(here[1]) in first.explain()


def crash_in_company(plan, result):
    assert len(plan.rows) < 4, "four rows\nare too many"
    return result


def test_a_schedule_that_crashes_says_where_and_why_and_its_record_replays(caplog):
    with pytest.raises(
        ScheduleCrashed, match=r"^schedule 0 crashed after \d+ steps: AssertionError: four rows are"
    ) as it:
        verify(wrapped(fake_target(), spoil=crash_in_company), SMALL, EngineConfig())
    report = replay(it.value.trace)
    assert report.same
    assert f"after {report.steps} steps" in str(it.value)
    assert "four rows" in caplog.text


def test_blocks_that_never_come_back_are_a_crash(monkeypatch):
    released = BlockPool.release

    def leak(pool, lease):
        block = lease.blocks[-1]
        released(pool, lease)
        if pool.key_of(block) is None:
            pool._free.remove(block)

    alone = fake_target()
    monkeypatch.setattr(BlockPool, "release", leak)
    with pytest.raises(EngineFault):
        verify(alone, SMALL, EngineConfig())
