"""Messages between a fleet's client and a replica: what is read is what was written."""

from __future__ import annotations

import math
from dataclasses import replace

import engine_harness as harness
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.contract.errors import (
    EngineFault,
    InvalidParameter,
    NeverFits,
    Overloaded,
    PromptTooLong,
    ReaderTooSlow,
    RefusalCause,
    RequestPoisoned,
    Unavailable,
    UnknownModel,
)
from penstock.contract.events import (
    ChoiceDelta,
    ChoiceFinished,
    Embedding,
    FinishReason,
    PromptTokens,
    RequestFailed,
    RequestFinished,
    TokenPiece,
    Usage,
)
from penstock.contract.grammar import Grammar, GrammarKind
from penstock.contract.measurements import LatencyParts, Timings
from penstock.contract.tools import CallPiece, ReasoningUse, ReplyRules, Tool, ToolUse
from penstock.fleet import ReplicaLost
from penstock.fleet.wire import read_outputs, read_request, write_error, write_outputs, write_request

TEXT = harness.text_model()
BENCH = harness.build()

scores = st.floats(allow_nan=False) | st.just(-math.inf)
ids = st.integers(0, 2**31)
alternatives = st.builds(TokenPiece, ids, st.binary(max_size=4), scores, st.just(()), ids, ids)
tokens = st.builds(
    TokenPiece, ids, st.binary(max_size=4), scores, st.lists(alternatives, max_size=2).map(tuple), ids, ids
)
calls = st.builds(CallPiece, ids, st.text(max_size=3), st.text(max_size=3), st.text(max_size=3), ids, ids)
deltas = st.builds(
    ChoiceDelta,
    *(ids, st.text(max_size=5), st.lists(tokens, max_size=2).map(tuple), st.text(max_size=5)),
    *(st.lists(calls, max_size=2).map(tuple), ids),
)
usages = st.builds(Usage, ids, ids, ids, ids)
waits = st.lists(st.tuples(st.text(max_size=5), st.floats(0, 1e3)), max_size=2).map(tuple)
parts = st.builds(LatencyParts, queue=st.floats(0, 1e3), queue_for=waits, behind=st.tuples(st.text(max_size=5)))
timings = st.builds(Timings, *(st.floats(0, 1e6),) * 5, ids, ids, parts)
outputs = st.lists(
    deltas
    | st.builds(ChoiceFinished, ids, st.sampled_from(FinishReason), st.none() | ids | st.text(max_size=3))
    | st.builds(PromptTokens, st.text(max_size=5), st.lists(tokens, max_size=2).map(tuple))
    | st.builds(Embedding, st.binary(max_size=8))
    | st.builds(RequestFinished, usages, timings)
    | st.builds(RequestFailed, st.text(max_size=5), usages, timings, st.booleans()),
    max_size=4,
)


@given(outputs)
def test_outputs_arrive_as_they_were_sent(sent):
    got = read_outputs(write_outputs(sent))
    assert got == sent
    assert list(map(type, got)) == list(map(type, sent))


def test_a_prompts_unscored_token_arrives():
    (got,) = read_outputs(write_outputs([PromptTokens("a", (TokenPiece(1, b"a", math.nan),))]))
    assert math.isnan(got.tokens[0].logprob)


@pytest.mark.parametrize("n", [1, 3])
def test_a_request_arrives_whole_and_newly_dated(n):
    asked = harness.request_of("one", TEXT, "hello", n=n, strings=("x",))
    spec = asked.sampling.put("bias", ((3, -1.5), (4, 2))).put("words", ("a", "b"))
    resolved = BENCH.intake.resolve(replace(asked, sampling=spec, echo=True, max_seconds=3.5))
    resolved = replace(resolved, expected=((1, 2), ())[: n - 1])
    got = read_request(write_request(resolved), TEXT, now=77.0)
    assert [each.arrival for each in got.sequences] == [77.0] * n
    again = replace(got, sequences=tuple(replace(each, arrival=0.0) for each in got.sequences))
    assert again == replace(resolved, sequences=tuple(replace(each, arrival=0.0) for each in resolved.sequences))


def test_grammars_keep_what_was_judged_of_them():
    resolved = BENCH.intake.resolve(harness.request_of("one", TEXT, "hello"))
    grammar = Grammar(GrammarKind.REGEX, "a+", ending=(1, 2), size=5)
    sequences = (replace(resolved.sequences[0], grammar=grammar),)
    got = read_request(write_request(replace(resolved, sequences=sequences)), TEXT, now=0.0)
    assert got.sequences[0].grammar.ending == (1, 2)


def test_the_reader_of_calls_is_made_again_from_what_it_says():
    tool = Tool("f", '{"type":"function","function":{"name":"f"}}', '{"type":"object"}', strict=True)
    rules = ReplyRules(ReasoningUse.SPLIT, ToolUse.NAMED, "f", parallel_tool_calls=False)
    reader = TEXT.reply_reader_of((tool,), rules, opened=False)
    resolved = replace(BENCH.intake.resolve(harness.request_of("one", TEXT, "hello")), reader=reader)
    got = read_request(write_request(resolved), TEXT, now=0.0).reader
    assert (got.tools, got.rules, got.calls, got.splits) == ((tool,), rules, reader.calls, reader.splits)
    assert got.schemas.knows("f")


@pytest.mark.parametrize(
    "error",
    [
        InvalidParameter("stop", "must not be", code="wrong"),
        PromptTooLong(9, 8, param="prompt"),
        NeverFits(3, 2, 16),
        UnknownModel("a", "b"),
        ReaderTooSlow(),
        Overloaded("full", retry_after=9, cause=RefusalCause.QUEUE_TOKENS),
        Unavailable("gone", retry_after=2),
        EngineFault("ours"),
        RequestPoisoned("theirs"),
    ],
)
def test_a_refusal_is_raised_as_it_was(error):
    with pytest.raises(type(error)) as raised:
        read_outputs(write_error(error))
    assert type(raised.value) is type(error)
    assert str(raised.value) == str(error)
    for name in ("message", "param", "code", "retry_after", "cause"):
        assert getattr(raised.value, name, None) == getattr(error, name, None)


def test_what_nobody_can_read_is_a_lost_replica_or_a_refused_message():
    for message in (b"", b"\x00", b"\x91\x80", write_outputs([])[:-1]):
        with pytest.raises(ReplicaLost):
            read_outputs(message)
        with pytest.raises(msgspec.MsgspecError):
            read_request(message, TEXT, 0.0)
    with pytest.raises(ReplicaLost, match="dead"):
        read_outputs(write_error(ReplicaLost("dead")))
