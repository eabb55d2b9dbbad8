"""Sequences with adapters: each has KV of its own, and the runner learns which adapter a sequence has."""

from __future__ import annotations

import pytest
from core_harness import Harness, config, request

from penstock.core import block_keys, invariants, scheduler
from penstock.sim.fake_runner import PlanViolation

PROMPT = range(10)


def harness(**options) -> Harness:
    made = Harness(config(**options))
    made.runner.adapters = {"poet": "", "clerk": ""}
    return made


def ask(made: Harness, seq_id: str, adapter: str = "", digest: str | None = None, **options) -> None:
    digest = f"digest of {adapter}" if digest is None and adapter else digest or ""
    made.submit(request(seq_id, PROMPT, adapter=adapter, adapter_digest=digest, **options))


def test_a_prompt_is_found_under_its_own_adapter_only():
    made = harness()
    for index, adapter in enumerate(["", "poet", "clerk", "poet", "", "clerk"]):
        ask(made, str(index), adapter)
        made.drain()
    assert [made.admitted[str(index)] for index in range(6)] == [0, 0, 0, 8, 8, 8]


def test_another_adapter_of_the_same_name_finds_nothing():
    made = harness()
    for index, digest in enumerate(["one", "other", "one"]):
        ask(made, str(index), "poet", digest)
        made.drain()
    assert [made.admitted[str(index)] for index in range(3)] == [0, 0, 8]


def test_sequences_of_different_adapters_do_not_wait_for_each_others_prefix():
    made = harness(max_num_batched_tokens=64)
    for adapter in ("", "poet", "clerk"):
        ask(made, f"of {adapter}", adapter)
    made.step()
    assert len(made.plans[0].admits) == 3
    assert [admit.adapter for admit in made.plans[0].admits] == ["", "poet", "clerk"]
    made.drain()


def test_a_preempted_sequence_goes_on_with_its_adapter():
    made = harness(num_blocks=8, max_num_seqs=3)
    for index, adapter in enumerate(["poet", "clerk", "poet"]):
        made.submit(request(str(index), [index, *PROMPT], 12, adapter=adapter, adapter_digest=adapter))
    made.drain()
    again = [admit for plan in made.plans for admit in plan.admits if len(admit.tokens) > admit.prompt_tokens]
    assert again
    assert {admit.adapter for admit in again} <= {"poet", "clerk"}


def test_the_adapters_in_use_are_told():
    made = harness(max_num_seqs=2)
    for index, adapter in enumerate(["poet", "", "clerk", "clerk"]):
        ask(made, str(index), adapter)
    made.step()
    assert made.scheduler.adapters_in_use() == ({"poet"}, {"clerk"})
    made.drain()
    assert made.scheduler.adapters_in_use() == (frozenset(), frozenset())


def test_keys_that_forget_the_adapter_are_caught(monkeypatch):
    for room in (scheduler, invariants):  # so that the runner alone can tell
        monkeypatch.setattr(room, "root_key", lambda root, salt, adapter: block_keys.root_key(root, salt))
    with pytest.raises((AssertionError, PlanViolation)):
        test_a_prompt_is_found_under_its_own_adapter_only()


def test_a_sequence_whose_adapter_nobody_loaded_is_caught():
    made = harness()
    ask(made, "a", "stranger")
    with pytest.raises(PlanViolation, match="stranger"):
        made.drain()
