"""The scheduler's laws, each on the smallest case that shows it; every answer is compared with the golden model."""

from __future__ import annotations

import pytest
from core_harness import Harness, answer, config, request

from penstock.contract.errors import EngineFault, InvalidParameter, NeverFits, PromptTooLong
from penstock.contract.events import Admitted, Finished, FinishReason, Generated
from penstock.contract.plan import Row, RowResult, SampledToken, StallReason, StepResult
from penstock.contract.sampling import SamplingSpec
from penstock.core.sequence import SeqState
from penstock.sim.fake_model import log_probability


def rows_of(harness: Harness, plan) -> dict[str, Row]:
    """The plan's rows by sequence id; to be called before the step is run."""
    names = {seq.slot: seq.id for seq in harness.scheduler._running}
    return {names[row.slot]: row for row in plan.rows}


def stall_of(plan):
    return plan.stalls[0] if plan.stalls else None


# ---- a life


def test_a_request_is_computed_in_chunks_then_token_by_token():
    harness = Harness(config(max_num_batched_tokens=4))
    harness.submit(request("a", range(10), max_tokens=3))
    shapes = []
    while harness.scheduler.has_work:
        (row,) = harness.plan().rows
        shapes.append((row.start, row.count, row.sample))
        harness.commit()
    assert shapes == [(0, 4, False), (4, 4, False), (8, 2, True), (10, 1, True), (11, 1, True)]
    harness.drain()


def test_events_come_in_order_and_once():
    harness = Harness(config())
    req = request("a", (1, 2, 3), max_tokens=2)
    harness.submit(req)
    first, second = answer(req, config())[0]
    one, two = harness.step(), harness.step()
    assert one == (Admitted("a", 0), Generated("a", first, log_probability(first)))
    assert two == (Generated("a", second, log_probability(second)), Finished("a", FinishReason.LENGTH))


def test_finishing_on_the_first_token_gives_the_blocks_back():
    harness = Harness(config())
    harness.submit(request("a", range(9), max_tokens=1))
    harness.step()
    assert not harness.scheduler.has_work
    assert harness.scheduler.stats.free_blocks == 32
    assert harness.plan().releases == (0,)


def test_a_stop_id_is_generated_and_named():
    req = request("a", (1, 2, 3), max_tokens=20)
    third = answer(req, config())[0][2]
    harness = Harness(config())
    harness.submit(request("a", (1, 2, 3), max_tokens=20, token_ids=(third,), min_tokens=3))
    harness.drain()
    assert harness.finished["a"] == Finished("a", FinishReason.STOP, stop_token=third)
    assert harness.tokens["a"][-1] == third


def test_the_context_ends_a_sequence_by_length():
    harness = Harness(config(max_model_len=6))
    harness.submit(request("a", (1, 2, 3), max_tokens=50))
    harness.drain()
    assert (len(harness.tokens["a"]), harness.finished["a"].reason) == (3, FinishReason.LENGTH)


def test_a_prompt_exactly_at_the_limit_yields_one_token():
    harness = Harness(config(max_model_len=6))
    harness.submit(request("a", range(5), max_tokens=50))
    harness.drain()
    assert len(harness.tokens["a"]) == 1


@pytest.mark.parametrize("block_size", [1, 2, 5])
def test_any_block_size_gives_the_same_answer(block_size):
    harness = Harness(config(block_size=block_size, num_blocks=64))
    for number in range(3):
        harness.submit(request(f"s{number}", range(10), max_tokens=9))
    harness.drain()


def test_chunks_and_decodes_share_a_step_and_no_decode_is_starved():
    harness = Harness(config(max_num_batched_tokens=4))
    harness.submit(request("long", range(30), max_tokens=2, arrival=0.0))
    harness.submit(request("short", (7, 8), max_tokens=9, arrival=0.0))
    harness.step()
    assert harness.tokens["short"] == []
    harness = Harness(config(max_num_batched_tokens=4, policy="priority"))
    harness.submit(request("short", (7, 8), max_tokens=20, priority=1))
    harness.step()
    harness.submit(request("long", range(30), max_tokens=2, priority=0))
    for _ in range(8):
        rows = rows_of(harness, harness.plan())
        assert (rows["short"].count, rows["short"].sample) == (1, True)
        assert rows["long"].count == 3
        harness.commit()
    harness.drain()


# ---- refusals


def test_never_fits_names_both_numbers():
    harness = Harness(config(num_blocks=4))
    with pytest.raises(NeverFits) as caught:
        harness.submit(request("a", range(10), max_tokens=7))
    assert (caught.value.need_blocks, caught.value.have_blocks) == (5, 4)
    harness.submit(request("b", range(10), max_tokens=6))
    harness.drain()


def test_never_fits_counts_what_the_context_allows_not_what_was_asked():
    harness = Harness(config(num_blocks=4, max_model_len=16))
    harness.submit(request("a", range(10), max_tokens=1_000_000))
    harness.drain()


def test_a_prompt_without_room_for_a_token_is_too_long():
    with pytest.raises(PromptTooLong) as caught:
        Harness(config(max_model_len=6)).submit(request("a", range(6)))
    assert (caught.value.prompt_tokens, caught.value.max_model_len) == (6, 6)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"prompt": ()}, "prompt"),
        ({"prompt": (1, -1)}, "prompt"),
        ({"prompt": (2**63,)}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"arrival": float("nan")}, "arrival"),
        ({"priority": 1}, "priority"),
    ],
)
def test_a_field_that_cannot_be_used_is_named(options, param):
    harness = Harness(config())
    with pytest.raises(InvalidParameter) as caught:
        harness.submit(request("a", **options))
    assert caught.value.param == param
    assert not harness.scheduler.has_work


def test_a_live_id_is_refused_and_a_finished_one_is_free():
    harness = Harness(config())
    harness.submit(request("a"))
    with pytest.raises(InvalidParameter):
        harness.scheduler.submit(request("a"))
    harness.scheduler.abort("a")
    harness.scheduler.submit(request("a"))


# ---- order


def test_first_come_first_served_by_arrival_then_submission():
    harness = Harness(config(max_num_seqs=1))
    for name, arrival in [("late", 2.0), ("b", 1.0), ("c", 1.0)]:
        harness.submit(request(name, max_tokens=1, arrival=arrival))
    harness.drain()
    assert list(harness.finished) == ["b", "c", "late"]


def test_priority_goes_first_then_arrival():
    harness = Harness(config(max_num_seqs=1, policy="priority"))
    for name, priority in [("low", 5), ("first", 0), ("second", 0), ("urgent", -1)]:
        harness.submit(request(name, max_tokens=1, priority=priority))
    harness.drain()
    assert list(harness.finished) == ["urgent", "first", "second", "low"]


def test_a_full_house_and_an_empty_budget_are_told_apart():
    harness = Harness(config(max_num_seqs=2, max_num_batched_tokens=8))
    for name in "abc":
        harness.submit(request(name, [ord(name)] * 8, max_tokens=3))
    assert stall_of(harness.plan()).reason is StallReason.NO_BUDGET
    harness.commit()
    harness.plan()
    harness.commit()
    stall = stall_of(harness.plan())
    assert (stall.reason, stall.seq_id, stall.need, stall.have) == (StallReason.NO_SLOT, "c", 1, 0)
    harness.commit()
    harness.drain()


def hungry_head(max_bypasses: int) -> Harness:
    """`big` needs 6 of 8 blocks while `holder` keeps 3 of them for long; small ones queue up behind."""
    harness = Harness(config(num_blocks=8, max_bypasses=max_bypasses, prefix_caching=False))
    harness.submit(request("holder", range(9), max_tokens=20))
    harness.step()
    harness.submit(request("big", range(100, 122), max_tokens=2))
    for number in range(6):
        harness.submit(request(f"small{number}", (number,), max_tokens=1))
    return harness


@pytest.mark.parametrize("max_bypasses", [0, 1, 2, 4])
def test_a_head_that_does_not_fit_is_passed_at_most_so_often(max_bypasses):
    harness = hungry_head(max_bypasses)
    passed = 0
    while "big" not in harness.admitted:
        plan = harness.plan()
        if "big" not in [admit.seq_id for admit in plan.admits]:
            stall = stall_of(plan)
            assert (stall.seq_id, stall.reason) == ("big", StallReason.NO_BLOCKS)
            assert stall.need > stall.have
            passed += len(plan.admits)
        harness.commit()
    assert passed == max_bypasses
    harness.drain()


def test_an_admission_leaves_a_block_for_each_who_may_grow():
    harness = Harness(config(num_blocks=4, prefix_caching=False))
    harness.submit(request("a", range(4), max_tokens=8))
    harness.step()
    harness.submit(request("b", range(8), max_tokens=1))
    stall = stall_of(harness.plan())
    assert (stall.reason, stall.need, stall.have) == (StallReason.NO_BLOCKS, 3, 2), "two would fit, but a may grow"
    harness.commit()
    harness.drain()
    assert harness.scheduler.stats.preemptions == 0


# ---- preemption


def crowded(num_blocks: int = 6) -> Harness:
    """Two sequences that fit at first and outgrow the pool together."""
    harness = Harness(config(num_blocks=num_blocks))
    harness.submit(request("old", range(4), max_tokens=18))
    harness.submit(request("young", range(50, 54), max_tokens=18))
    return harness


def test_the_youngest_is_preempted_and_the_eldest_gets_on():
    harness = crowded()
    while not harness.scheduler.stats.preemptions:
        before = harness.scheduler.stats.running
        plan = harness.plan()
        rows = rows_of(harness, plan)
        harness.commit()
    assert before == 2
    assert list(rows) == ["old"]
    assert plan.releases == (1,)
    assert harness.scheduler._seqs["young"].state is SeqState.WAITING
    harness.drain()
    assert harness.admitted == {"old": 0, "young": 0}, "a second admission is not announced"


def test_what_a_preempted_sequence_sealed_is_found_again_and_sealing_goes_on_through_the_new_lease():
    harness = crowded(num_blocks=7)
    while not harness.scheduler.stats.preemptions:
        harness.step()
    second = None
    while harness.scheduler.has_work:
        plan = harness.plan()
        second = next((admit for admit in plan.admits if admit.seq_id == "young"), second)
        if second is not None and "young" in harness.live:
            lease = harness.scheduler._seqs["young"].lease
            assert lease.cached * 4 == second.computed
        harness.commit()
        if second is not None and "young" in harness.live:
            seq = harness.scheduler._seqs["young"]
            assert seq.lease.sealed == seq.computed // 4
            sealed = seq.lease.blocks[: seq.lease.sealed]
            assert [harness.scheduler._pool.key_of(b) for b in sealed] == seq.chain.keys[: len(sealed)]
    assert second.computed > 0
    assert len(second.tokens) > 4, "generated tokens are kept"
    harness.drain()


def test_generated_blocks_are_found_by_the_next_turn():
    harness = Harness(config())
    first = request("turn1", range(6), max_tokens=7)
    harness.submit(first)
    harness.drain()
    conversation = (*first.prompt, *harness.tokens["turn1"])
    harness.submit(request("turn2", (*conversation, 1, 2)))
    harness.drain()
    assert harness.admitted["turn2"] == 12, "13 tokens, the last of them never computed: three full blocks"


def test_preemption_without_a_cache_recomputes_everything():
    harness = Harness(config(num_blocks=6, prefix_caching=False))
    harness.submit(request("old", range(4), max_tokens=18))
    harness.submit(request("young", range(50, 54), max_tokens=18))
    harness.drain()
    assert harness.scheduler.stats.preemptions > 0
    assert harness.scheduler.stats.hit_tokens == 0


# ---- the prefix cache


def test_a_fully_cached_prompt_leaves_one_position_to_compute():
    harness = Harness(config())
    harness.submit(request("a", range(8), max_tokens=1))
    harness.drain()
    harness.submit(request("b", range(8), max_tokens=1))
    (row,) = harness.plan().rows
    assert (row.start, row.count) == (4, 4), "the last block is computed anew, in a block of its own"
    harness.commit()
    harness.drain()
    assert harness.admitted["b"] == 4


@pytest.mark.parametrize(("salt", "cached"), [("", 8), ("mine", 0)])
def test_salts_do_not_share(salt, cached):
    harness = Harness(config())
    harness.submit(request("a", range(9), max_tokens=1))
    harness.drain()
    harness.submit(request("b", range(9), max_tokens=1, cache_salt=salt))
    harness.drain()
    assert harness.admitted["b"] == cached


def test_models_do_not_share_blocks():
    keys = []
    for root in (b"model-a", b"model-b"):
        harness = Harness(config(model_digest=root))
        harness.submit(request("a", range(9)))
        keys.append(harness.scheduler._seqs["a"].chain.keys)
    assert set(keys[0]).isdisjoint(keys[1])


def test_a_reset_cache_has_no_hits():
    harness = Harness(config())
    harness.submit(request("a", range(9), max_tokens=6))
    harness.step()
    harness.reset()
    harness.drain()
    harness.submit(request("b", range(9), max_tokens=1))
    harness.drain()
    assert harness.admitted["b"] == 0


# ---- sharing a prefix that is being computed


def sharers(count: int = 3, prompt=range(13), **options) -> Harness:
    harness = Harness(config(**options))
    for number in range(count):
        harness.submit(request(f"s{number}", prompt, max_tokens=3, choice=number))
    return harness


def test_choices_of_one_prompt_compute_it_once():
    harness = sharers(4)
    first = harness.plan()
    assert [admit.seq_id for admit in first.admits] == ["s0"]
    stall = stall_of(first)
    assert (stall.seq_id, stall.reason, stall.need, stall.have) == ("s1", StallReason.SHARED_PREFIX, 3, 0)
    harness.commit()
    second = harness.plan()
    assert [(admit.seq_id, admit.computed) for admit in second.admits] == [("s1", 12), ("s2", 12), ("s3", 12)]
    harness.commit()
    harness.drain()
    assert sum(row.count for plan in harness.plans for row in plan.rows) == 13 + 3 * 1 + 4 * 2


def test_without_a_cache_nobody_waits_for_a_shared_prefix():
    harness = sharers(3, max_num_batched_tokens=64, prefix_caching=False)
    assert len(harness.plan().admits) == 3
    harness.commit()
    harness.drain()


def test_others_pass_those_who_share_and_it_is_no_bypass():
    harness = sharers(3, max_bypasses=0, max_num_batched_tokens=32)
    harness.submit(request("other", (9, 9), max_tokens=1))
    assert [admit.seq_id for admit in harness.plan().admits] == ["s0", "other"]
    assert all(seq.bypasses == 0 for seq in harness.scheduler._seqs.values())
    harness.commit()
    harness.drain()


def test_other_salts_do_not_wait():
    harness = sharers(2, max_num_batched_tokens=32)
    harness.submit(request("salted", range(13), cache_salt="x"))
    assert [admit.seq_id for admit in harness.plan().admits] == ["s0", "salted"]
    harness.commit()
    harness.drain()


@pytest.mark.parametrize("when", ["before the plan", "between plan and commit", "failure"])
def test_when_the_computing_sequence_goes_the_next_one_takes_over(when):
    harness = sharers(3, prompt=range(22), max_num_batched_tokens=16)
    harness.step()
    if when == "before the plan":
        harness.abort("s0")
    else:
        assert stall_of(harness.plan()).reason is StallReason.SHARED_PREFIX
        if when == "failure":
            harness.fail("s0")
        else:
            harness.abort("s0")
        harness.commit()
    assert [(admit.seq_id, admit.computed) for admit in harness.plan().admits] == [("s1", 16)]
    stall = stall_of(harness.plans[-1])
    assert (stall.seq_id, stall.reason, stall.need, stall.have) == ("s2", StallReason.SHARED_PREFIX, 5, 4)
    harness.commit()
    harness.drain()


def test_when_the_computing_sequence_is_preempted_its_pending_blocks_are_withdrawn():
    harness = Harness(config(num_blocks=10, max_num_batched_tokens=4, policy="priority"))
    harness.submit(request("elder", range(60, 72), max_tokens=20, priority=0))
    for _ in range(4):
        harness.step()
    harness.submit(request("maker", range(20), max_tokens=2, priority=2))
    harness.step()
    assert any(seq.id == "maker" for seq in harness.scheduler._pending_blocks.makers.values())
    taken = harness.scheduler._pool.acquire([], 4 * harness.scheduler._pool.available)
    while not harness.scheduler.stats.preemptions:
        plan = harness.scheduler.plan()
        result = harness.runner.run(plan)
        harness._note_writes(plan)
        harness.note(harness.scheduler.commit(plan, result))
    assert not any(seq.id == "maker" for seq in harness.scheduler._pending_blocks.makers.values())
    harness.scheduler._pool.release(taken)
    harness.drain()


def test_a_sequence_that_waits_for_a_shared_prefix_can_be_aborted():
    harness = sharers(3, max_num_batched_tokens=16)
    harness.plan()
    harness.abort("s1")
    harness.commit()
    harness.abort("s2")
    harness.drain()
    assert harness.admitted.keys() == {"s0"}


def test_a_reset_lets_those_who_share_compute_for_themselves():
    harness = sharers(2, max_num_batched_tokens=16)
    harness.plan()
    harness.reset()
    harness.commit()
    assert [admit.computed for admit in harness.plan().admits] == [0]
    harness.commit()
    harness.drain()


# ---- abort and failure


@pytest.mark.parametrize("when", ["queued", "planned", "computed", "decoding"])
def test_an_abort_is_legal_at_any_time_and_gives_everything_back(when):
    harness = Harness(config(max_num_batched_tokens=4))
    harness.submit(request("a", range(6), max_tokens=9))
    harness.submit(request("b", range(20, 26), max_tokens=9))
    if when != "queued":
        harness.plan()
    if when in ("computed", "decoding"):
        harness.commit()
    if when == "decoding":
        for _ in range(4):
            harness.step()
    free = harness.scheduler.stats.free_blocks
    harness.abort("a")
    assert harness.scheduler.stats.free_blocks > free or when == "queued"
    assert harness.finished["a"] == Finished("a", FinishReason.ABORT)
    harness.drain()


def test_an_id_may_be_used_again_while_its_old_row_is_still_computed():
    harness = Harness(config())
    harness.submit(request("a", (1, 2), max_tokens=3))
    plan = harness.plan()
    harness.scheduler.abort("a")
    harness.scheduler.submit(request("a", (5, 6, 7), max_tokens=3))
    assert harness.scheduler.commit(plan, harness.runner.finish()) == ()
    assert harness.scheduler.plan().admits[0].tokens == (5, 6, 7)


def test_unknown_and_finished_ids_are_no_error():
    harness = Harness(config())
    assert harness.scheduler.abort("nobody") == ()
    harness.submit(request("a", max_tokens=1))
    harness.drain()
    assert harness.scheduler.abort("a") == ()


def test_an_abort_may_carry_another_reason():
    harness = Harness(config())
    harness.submit(request("a"))
    assert harness.scheduler.abort("a", FinishReason.STOP) == (Finished("a", FinishReason.STOP),)


def test_a_failed_row_ends_its_sequence_alone():
    harness = Harness(config(max_num_batched_tokens=64))
    for number in range(3):
        harness.submit(request(f"s{number}", (number, 1), max_tokens=5))
    harness.step()
    harness.fail("s1")
    harness.step()
    assert harness.finished == {"s1": Finished("s1", FinishReason.ERROR, message="planted")}
    harness.drain()


# ---- the contract of plan and commit


def test_a_second_plan_before_the_commit_is_a_fault():
    harness = Harness(config())
    harness.submit(request("a"))
    harness.plan()
    with pytest.raises(EngineFault):
        harness.scheduler.plan()


def drew(slot: int, *tokens: int) -> RowResult:
    """The result of a row that drew `tokens`, one by default."""
    return RowResult(slot, tuple(map(SampledToken, tokens or (1,))))


@pytest.mark.parametrize(
    "result",
    [
        StepResult(1, (drew(0), drew(1))),
        StepResult(0, (drew(0),)),
        StepResult(0, (drew(0), drew(1, 1, 1))),
        StepResult(0, (drew(0), drew(1, 1, 1), drew(2))),
        StepResult(0, (drew(0), drew(0))),
        StepResult(0, (drew(0), drew(1), drew(1))),
        StepResult(0, (drew(0), RowResult(1))),
        StepResult(0, (drew(0), RowResult(1, (SampledToken(1),), embedding=b""))),
        StepResult(0, (drew(0), drew(1), RowResult(7, failure="x"))),
        StepResult(0, (RowResult(0, failure="x"), RowResult(0, failure="y"))),
    ],
)
def test_a_result_that_does_not_match_changes_nothing(result):
    harness = Harness(config(max_num_batched_tokens=32))
    harness.submit(request("a", (1, 2)))
    harness.submit(request("b", (3, 4)))
    plan = harness.plan()
    before = harness.scheduler.stats
    with pytest.raises(EngineFault):
        harness.scheduler.commit(plan, result)
    assert harness.scheduler.stats == before
    harness.commit()
    harness.drain()


def test_a_plan_is_committed_once():
    harness = Harness(config())
    harness.submit(request("a"))
    plan = harness.scheduler.plan()
    result = harness.runner.run(plan)
    harness.scheduler.commit(plan, result)
    with pytest.raises(EngineFault):
        harness.scheduler.commit(plan, result)


def test_an_idle_plan_is_empty():
    plan = Harness(config()).plan()
    assert (plan.rows, plan.admits, plan.releases, plan.stalls, plan.waiting) == ((), (), (), (), 0)


def test_steps_are_counted_without_gaps():
    harness = Harness(config())
    harness.submit(request("a"))
    harness.drain()
    assert [plan.step for plan in harness.plans] == list(range(len(harness.plans)))


def test_the_scheduler_passes_sampling_and_choice_on_unread():
    harness = Harness(config())
    sampling = SamplingSpec((("seed", 5), ("temperature", 0.5)))
    harness.submit(request("a", sampling=sampling, choice=3))
    (admit,) = harness.plan().admits
    assert (admit.sampling, admit.choice) == (sampling, 3)


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s._free_slots.append(0),
        lambda s: s._seqs.pop("a"),
        lambda s: setattr(s._seqs["a"], "computed", 99),
        lambda s: setattr(s._seqs["a"], "computed", 0),
        lambda s: s._seqs["a"].chain.keys.reverse(),
        lambda s: s._seqs["a"].tokens.extend(range(40)),
        lambda s: s._waiting.add(s._seqs["a"]),
        lambda s: s._running.remove(s._seqs["a"]),
        lambda s: s._pool.acquire([], 4),
        lambda s: s._pending_blocks.makers.update({b"k": s._seqs["b"]}),
        lambda s: setattr(s._seqs["a"].lease, "sealed", 0),
        lambda s: setattr(s._seqs["b"], "_slot", 3),
    ],
)
def test_check_finds_damage(damage):
    harness = Harness(config(max_num_seqs=1, max_model_len=32))
    harness.submit(request("a", range(9), max_tokens=8))
    harness.submit(request("b", range(40, 49), max_tokens=8))
    harness.step()
    damage(harness.scheduler)
    with pytest.raises(EngineFault):
        harness.scheduler.check()
