"""`LLM` stepped by hand: what finished while a batch ran is still delivered, and nothing else is."""

from __future__ import annotations

from llm_harness import LONG, SHORT


def step_to_the_end(llm):
    """Step, as callers do, while a request is unfinished; the last output of each request, by id."""
    last = {}
    while llm.has_unfinished_requests():
        last |= {output.request_id: output for output in llm.step()}
    return last


def test_an_answer_that_finished_during_a_batch_is_given_to_the_loop_that_waits_for_it(llm):
    mine = llm.add_request([5, 6, 7], SHORT)
    llm.generate([[8, 9]], LONG, use_tqdm=False)
    assert llm.has_unfinished_requests()
    last = step_to_the_end(llm)
    assert list(last) == [mine]
    assert last[mine].finished
    assert len(last[mine].outputs[0].token_ids) == 3
    assert llm.step() == []


def test_an_answer_that_waits_survives_an_abort_of_what_is_finished(llm):
    mine = llm.add_request([5, 6, 7], SHORT)
    llm.generate([[8, 9]], LONG, use_tqdm=False)
    assert llm.abort_request(mine) == []
    assert step_to_the_end(llm)[mine].outputs[0].finish_reason == "length"


def test_an_aborted_request_is_not_given_again_as_it_stood_before(llm):
    mine = llm.add_request([5, 6, 7], LONG)
    llm.generate([[8, 9]], SHORT, use_tqdm=False)
    [ended] = llm.abort_request(mine)
    assert ended.outputs[0].finish_reason == "abort"
    assert not llm.has_unfinished_requests()
    assert llm.step() == []
