"""Answers by request id, text piece by piece, and a callback for each piece."""

from __future__ import annotations

import asyncio

import pytest
from llm_harness import LONG, OPTIONS, SHORT

from penstock import LLM, AsyncLLM
from penstock.contract.errors import InvalidParameter
from penstock.llm import request_book


def test_an_answer_can_be_asked_for_at_any_time(llm):
    request_id = llm.add_request("abc", LONG)
    assert not llm.is_finished(request_id)
    assert llm.get_output(request_id).outputs[0].text == ""
    lengths = []
    while llm.has_unfinished_requests():
        llm.step()
        lengths.append(len(llm.get_output(request_id).outputs[0].token_ids))
    assert lengths == sorted(lengths)
    assert lengths[-1] == 9
    assert llm.is_finished(request_id)
    popped = llm.pop_output(request_id)
    assert popped.finished
    for ask in (llm.is_finished, llm.get_output, llm.pop_output):
        with pytest.raises(InvalidParameter, match="is unknown: never added, taken out, or not among the last 1024"):
            ask(request_id)


def test_an_unknown_id_is_refused(llm):
    with pytest.raises(InvalidParameter, match="request_id"):
        llm.is_finished("nobody")
    with pytest.raises(InvalidParameter, match="request_id"):
        next(llm.stream_text("nobody"))


def test_text_comes_in_pieces_while_all_else_runs_on(lettered):
    with LLM(lettered, speculate=False, **OPTIONS) as llm:  # so that both take as many steps
        mine, other = llm.add_request("abc", LONG), llm.add_request("xyz", LONG)
        pieces = list(llm.stream_text(mine))
        assert len(pieces) > 1
        assert "".join(pieces) == llm.get_output(mine).outputs[0].text
        assert llm.is_finished(other)
        assert [output.request_id for output in llm.step()] == [other]
        assert not llm.has_unfinished_requests()
        assert "".join(llm.stream_text(mine)) == "".join(pieces), "a finished one is read from its beginning"


def test_a_callback_hears_every_piece(llm):
    heard: dict[str, list[str]] = {"a": [], "b": []}
    ids = {name: llm.add_request(f"{name}bc", LONG, on_text=heard[name].append) for name in heard}
    llm.generate("unrelated", SHORT, use_tqdm=False)
    while llm.has_unfinished_requests():
        llm.step()
    for name, request_id in ids.items():
        assert "".join(heard[name]) == llm.pop_output(request_id).outputs[0].text
        assert len(heard[name]) > 1


def test_a_callback_that_raises_harms_nobody_else(llm):
    def fail(text):
        raise ZeroDivisionError(text)

    heard: list[str] = []
    bad, good = llm.add_request("abc", LONG, on_text=fail), llm.add_request("xyz", LONG, on_text=heard.append)
    failures = 0
    while llm.has_unfinished_requests():
        try:
            llm.step()
        except ZeroDivisionError:
            failures += 1
    assert failures > 0
    assert llm.is_finished(bad)
    assert "".join(heard) == llm.get_output(good).outputs[0].text


def test_an_abort_is_an_end_too(llm):
    request_id = llm.add_request("abc", LONG)
    llm.step()
    llm.abort_request(request_id)
    assert llm.is_finished(request_id)
    assert llm.get_output(request_id).outputs[0].finish_reason == "abort"


def test_finished_answers_are_kept_within_bounds(llm, monkeypatch):
    monkeypatch.setattr(request_book, "KEPT", 2)
    ids = [llm.add_request("abc", SHORT) for _ in range(4)]
    while llm.has_unfinished_requests():
        llm.step()
    assert sum(known(llm, request_id) for request_id in ids) == 2


def known(llm, request_id):
    try:
        return llm.is_finished(request_id)
    except InvalidParameter:
        return False


def test_the_async_library_streams_what_is_new(lettered):
    async def pieces():
        async with AsyncLLM(lettered, **OPTIONS) as llm:
            streamed = [piece async for piece in llm.stream_text("abc", LONG)]
            async for output in llm.generate("abc", LONG):
                whole = output.outputs[0].text
            return streamed, whole

    streamed, whole = asyncio.run(pieces())
    assert "".join(streamed) == whole
    assert all(streamed)
