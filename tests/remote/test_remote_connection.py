"""The connection: what is sent arrives as it was, whole, or not at all."""

from __future__ import annotations

import socket

import msgspec
import pytest

from penstock.contract.config import EngineConfig
from penstock.contract.embedding import EmbeddingSpec, Pooling
from penstock.contract.grammar import JSON_OBJECT
from penstock.contract.memory import MemoryReport, RunnerFacts
from penstock.contract.model import GgufVocabulary, HuggingFaceText, ModelFacts
from penstock.contract.plan import (
    Admit,
    Checkpoint,
    PromptScores,
    Row,
    RowResult,
    SampledToken,
    Stall,
    StallReason,
    StepPlan,
    StepResult,
)
from penstock.contract.sampling import SamplingSpec
from penstock.contract.thinking import ThinkingBudget
from penstock.remote import messages
from penstock.remote.connection import Closed, Connection

SPEC = SamplingSpec(
    (
        ("bad_words", (("a", "b"), ("c",))),
        ("logit_bias", ((5, -1.5), (7, 100.0))),
        ("min_p", 1.0),
        ("seed", 2**62 - 1),
        ("stop", ("é", "")),
        ("top_k", 0),
        ("x", True),
    )
)
ADMIT = Admit(
    slot=3, seq_id="cmpl-1", tokens=(1, 2, 3), blocks=(0, 9), computed=1, sampling=SPEC, choice=2, prompt_tokens=2,
    max_new_tokens=5, grammar=JSON_OBJECT, embedding=EmbeddingSpec(Pooling.CLS, normalize=False, dimensions=64),
    thinking=ThinkingBudget(9, opened=True, spelled=(4,)), checkpoint=1,
)  # fmt: skip
PLAN = StepPlan(
    7, (1, 2), (ADMIT,),
    (Row(3, 1, 2, (4,), sample=True, drafts=(8,), checkpoints=(Checkpoint(2, 0),), spares=(5,), resume=2),),
    (Stall("other", StallReason.NO_BLOCKS, 3, 2),), 4,
)  # fmt: skip
NAN = float("nan")
RESULT = StepResult(
    7,
    (
        RowResult(
            3, (SampledToken(5, -0.1, 1, ((5, -0.1), (6, -float("inf")))),), PromptScores(1, (-1e-300,), ((),), (9,))
        ),
        RowResult(4, embedding=bytes(range(256)), failure="not finite"),
    ),
    0.1 + 0.2,
)
VOCABULARY = GgufVocabulary(
    "f",
    "gpt2",
    "",
    ("a", "é"),
    (1, 3),
    ("a b",),
    (0.5, -1.0),
    0,
    1,
    -1,
    add_bos=True,
    add_space_prefix=False,
    chat_template="{{ x }}",
)
MEMORY = MemoryReport(1, 2, 3, 4, 5, "int8", "file", 6, 7, 8, generates=False)
ORDERS = [
    messages.Load(EngineConfig(served_model_name=("a", "*")), "cache", MEMORY),
    messages.Run(PLAN),
    messages.Reset(),
    messages.StartProfile(),
    messages.StopProfile("p"),
    messages.Fork(),
    messages.Reap(7),
]
ANSWERS = [
    messages.Said("line"),
    messages.Found.of(ModelFacts("m", HuggingFaceText("d"), EmbeddingSpec(Pooling.LAST), (("min_p", 1.0),), "f")),
    messages.Found.of(ModelFacts("g", VOCABULARY)),
    messages.Ready(RunnerFacts(EngineConfig(), MEMORY, 9, 8, 7, True, b"\xff\x00")),
    messages.Refused("", "no"),
    messages.Ran(RESULT),
    messages.Failed("why"),
    messages.Forked(7),
    messages.Ended(-9),
    messages.Ended(None),
    messages.Done(),
]


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize(
    ("kind", "values"), [(messages.Order, ORDERS), (messages.Answer, ANSWERS)], ids=["orders", "answers"]
)
def test_every_message_arrives_as_it_was(pair, kind, values):
    sender, receiver = Connection(pair[0], messages.Order), Connection(pair[1], kind)
    for value in values:
        sender.send(value)
    for value in values:
        assert receiver.receive(1) == value


def test_what_was_found_is_what_the_files_say(pair):
    sender, receiver = Connection(pair[0], messages.Answer), Connection(pair[1], messages.Answer)
    for text in (HuggingFaceText("a directory"), VOCABULARY):
        facts = ModelFacts("m", text, EmbeddingSpec(Pooling.LAST), (("min_p", 1.0), ("top_k", 5)), "a file")
        sender.send(messages.Found.of(facts))
        assert receiver.receive(1).facts == facts


def test_a_float_stays_one_and_a_bool_too(pair):
    sender, receiver = Connection(pair[0], messages.Order), Connection(pair[1], messages.Order)
    sender.send(messages.Run(PLAN))
    entries = receiver.receive(1).plan.admits[0].sampling.entries
    assert [type(value) for _, value in entries] == [tuple, tuple, float, int, tuple, int, bool]
    assert [type(part) for pair_ in entries[1][1] for part in pair_] == [int, float, int, float]


def test_a_message_in_pieces_waits_for_the_last(pair):
    receiver = Connection(pair[1], messages.Answer)
    body = msgspec.msgpack.encode(messages.Said("in pieces"))
    whole = len(body).to_bytes(4, "little") + body
    for byte in whole[:-1]:
        pair[0].sendall(bytes((byte,)))
        with pytest.raises(TimeoutError):
            receiver.receive(0.001)
    pair[0].sendall(whole[-1:])
    assert receiver.receive(1) == messages.Said("in pieces")


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff\xff\xff\xff",
        b"\x01\x00\x00\x00\xc1",
        (5).to_bytes(4, "little") + b"\x81\xa1a\xa1b",
        (1).to_bytes(4, "little") + b"\x80",
    ],
    ids=["too long", "no MessagePack", "no tag", "an empty map"],
)
def test_what_is_no_message_closes_the_connection(pair, sent):
    pair[0].sendall(sent)
    with pytest.raises(Closed, match="not a message"):
        Connection(pair[1], messages.Answer).receive(1)


def test_a_socket_comes_with_its_message(pair):
    sender, receiver = Connection(pair[0], messages.Order), Connection(pair[1], messages.Order)
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            sender.send(messages.Reset())
            sender.send(messages.Fork(), theirs)
            sender.send(messages.Reset())
        assert [receiver.receive(1) for _ in range(3)] == [messages.Reset(), messages.Fork(), messages.Reset()]
        with receiver.take_socket() as passed:
            assert not passed.get_inheritable()
            ours.sendall(b"x")
            assert passed.recv(2) == b"x"
        assert ours.recv(1) == b"", "there is no other descriptor of the other end"
    with pytest.raises(Closed, match="no socket"):
        receiver.take_socket()


def test_a_socket_that_nobody_takes_is_let_go_of(pair):
    sender, receiver = Connection(pair[0], messages.Order), Connection(pair[1], messages.Order)
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            sender.send(messages.Fork(), theirs)
        receiver.receive(1)
        receiver.close()
        assert ours.recv(1) == b""


def test_an_end_is_told(pair):
    receiver = Connection(pair[1], messages.Answer)
    pair[0].close()
    with pytest.raises(Closed):
        receiver.receive(1)
    with pytest.raises(Closed):
        receiver.send(messages.Done())
