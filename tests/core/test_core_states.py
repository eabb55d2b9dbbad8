"""Recurrent state: where it is kept, what is restored from it, and what is forgotten."""

from __future__ import annotations

import pytest
from core_harness import Harness, config, embedding, request

from penstock.contract.embedding import Pooling
from penstock.contract.errors import ConfigError, EngineFault
from penstock.core.checkpoints import Checkpoints

PROMPT = [(3 * index) % 7 for index in range(50)]


def stateful(checkpoints=8, interval=16, num_blocks=48, **options):
    return Harness(config(num_blocks, checkpoints=checkpoints, checkpoint_interval=interval, **options))


def kept_at(harness):
    """Positions at which rows kept their state, in order."""
    return [kept.position for plan in harness.plans for row in plan.rows for kept in row.checkpoints]


def cached(harness, seq_id, prompt, **options):
    """Run a request to its end; returns how many tokens of its prompt were found in the cache."""
    harness.submit(request(seq_id, prompt, **options))
    harness.drain()
    return harness.admitted[seq_id]


def test_states_are_kept_at_the_interval_at_the_end_and_as_generation_goes_on():
    harness = stateful()
    harness.submit(request("a", PROMPT, max_tokens=8))
    harness.drain()
    assert kept_at(harness) == [16, 32, 48, 52, 56]


def test_no_step_is_cut_for_a_checkpoint():
    harness, plain = stateful(interval=4), Harness(config(48))
    for each in (harness, plain):
        each.submit(request("a", PROMPT, max_tokens=8))
        each.drain()
    rows = [[(row.start, row.count) for plan in each.plans for row in plan.rows] for each in (harness, plain)]
    assert rows[0] == rows[1]
    assert kept_at(harness) == list(range(4, 57, 4))


def test_the_same_prompt_and_the_next_turn_continue_from_the_end():
    harness = stateful()
    assert cached(harness, "a", PROMPT[:48], max_tokens=8) == 0
    assert cached(harness, "b", PROMPT[:48]) == 44, "a prompt that fills its blocks goes on before its last one"
    turn = [*PROMPT[:48], *harness.tokens["a"], 5, 5, 5, 5, 5]
    assert cached(harness, "c", turn) == 52, "its last token is not computed: 55 of 56 are"


def test_an_edit_in_the_middle_goes_on_from_the_checkpoint_before_it_and_the_next_one_from_itself():
    harness = stateful()
    cached(harness, "a", PROMPT)
    assert cached(harness, "b", [*PROMPT[:30], 9, 9, 9, 9, 9, 9]) == 16
    assert cached(harness, "c", [*PROMPT[:30], 8, 8, 8, 8]) == 28, "b kept its state where it left what a computed"


def test_who_waits_for_a_shared_beginning_has_its_state_kept_there():
    harness = stateful(interval=0)
    for name in "abc":
        harness.submit(request(name, [*PROMPT[:22], ord(name) % 7, 1, 2]))
    harness.drain()
    assert [harness.admitted[name] for name in "abc"] == [0, 20, 20]


def test_kv_alone_is_no_hit():
    harness = stateful(checkpoints=0)
    cached(harness, "a", PROMPT)
    assert harness.scheduler.stats.cached_blocks > 0
    assert cached(harness, "b", PROMPT) == 0


def test_a_state_alone_is_no_hit():
    harness = stateful(num_blocks=16)
    cached(harness, "a", PROMPT)
    cached(harness, "b", [5] * 50, max_tokens=9)
    states = harness.scheduler._pool._checkpoints
    assert len(states) > 0
    assert cached(harness, "c", PROMPT) == 0


def test_a_preempted_sequence_goes_on_from_its_newest_state():
    harness = stateful(num_blocks=20, max_num_seqs=2)
    harness.submit(request("a", PROMPT[:24], max_tokens=20))
    harness.submit(request("b", PROMPT[8:30], max_tokens=20))
    harness.drain()
    again = [admit for plan in harness.plans for admit in plan.admits if len(admit.tokens) > admit.prompt_tokens]
    assert harness.scheduler.stats.preemptions > 0
    assert any(admit.computed > admit.prompt_tokens and admit.checkpoint >= 0 for admit in again)


def test_older_states_of_generated_tokens_are_forgotten_before_those_of_prompts():
    harness = stateful(checkpoints=3, interval=0)
    cached(harness, "a", PROMPT[:30], max_tokens=30)
    assert cached(harness, "b", PROMPT[:30], max_tokens=1) == 28
    assert cached(harness, "c", [*PROMPT[:30], *harness.tokens["a"]], max_tokens=1) == 56


def test_an_embedding_that_may_use_the_cache_restores_too():
    harness = stateful()
    cached(harness, "a", PROMPT)
    harness.submit(embedding("last", [*PROMPT, 1, 2, 3], Pooling.LAST))
    harness.submit(embedding("mean", PROMPT, Pooling.MEAN))
    harness.drain()
    assert (harness.admitted["last"], harness.admitted["mean"]) == (48, 0)


def test_without_a_prefix_cache_nothing_is_kept():
    harness = stateful(prefix_caching=False)
    cached(harness, "a", PROMPT)
    assert kept_at(harness) == []


def test_forgetting_the_prefix_cache_forgets_states_and_those_being_kept():
    harness = stateful()
    harness.submit(request("a", PROMPT))
    harness.step()
    harness.plan()
    harness.reset()
    harness.drain()
    assert len(harness.scheduler._pool._checkpoints) == 0
    assert cached(harness, "b", PROMPT) == 0


def test_the_slot_that_a_plan_restores_is_not_written_by_it():
    states = Checkpoints(2)
    for key in (b"a", b"b"):
        states.keep(key, states.take())
    assert states.restore(b"a") == 0
    assert states.take() == 1, "b, though a was there before it"
    assert states.take() == -1
    states.unpin()
    assert states.take() == 0
    assert states.pending == {0, 1}
    states.check()
    states.drop_pending()
    with pytest.raises(EngineFault, match="checkpoint 0 is not pending"):
        states.give_back(0)
    states.check()


@pytest.mark.parametrize(
    ("options", "field"), [({"checkpoints": -1}, "checkpoints"), ({"checkpoint_interval": 6}, "checkpoint_interval")]
)
def test_impossible_numbers_are_refused(options, field):
    with pytest.raises(ConfigError, match=field):
        config(8, **options)
