"""Embeddings through the engine: one vector, one end, no text; and what such a request may not hold."""

from __future__ import annotations

import asyncio

import pytest
from engine_harness import END_ID, Harness, build, text_model
from test_engine_metrics_collector import timed, values

from penstock.contract.embedding import EmbeddingSpec, Pooling
from penstock.contract.errors import InvalidParameter, PromptTooLong, RequestError
from penstock.contract.events import ChoiceFinished, Embedding, FinishReason, RequestFinished, Usage
from penstock.contract.grammar import Grammar, GrammarKind
from penstock.contract.limits import DEFAULT_LIMITS
from penstock.contract.model import ModelCard
from penstock.contract.request import ChatPrompt, EngineRequest, Message, StopRules, TextPrompt, TokenPrompt
from penstock.contract.sampling import SamplingSpec
from penstock.contract.tools import ReasoningUse, ReplyRules
from penstock.core.replaying import replay
from penstock.engine import EngineLoop, Intake, LocalClient
from penstock.engine.admission import QueueLimits
from penstock.sim.clock import SimClock
from penstock.sim.fake_model import golden_embedding

SPEC = EmbeddingSpec()
LAST = EmbeddingSpec(Pooling.LAST)


def ids(text: str) -> tuple[int, ...]:
    return text_model().tokenizer.encode(text)


def ended(harness: Harness, request_id: str) -> list:
    """The outputs of a request, without its timings."""
    return [(output.usage if isinstance(output, RequestFinished) else output) for output in harness.outputs[request_id]]


@pytest.mark.parametrize("spec", [SPEC, LAST])
def test_one_vector_then_one_end(spec):
    harness = build(max_num_batched_tokens=8)
    others = [harness.submit("the quick brown fox", max_tokens=6, seed=each) for each in (3, 4)]
    request_id = harness.submit_request(EngineRequest("a", TextPrompt("the quick brown fox jumps"), embedding=spec))
    harness.run()
    vector = golden_embedding(ids("the quick brown fox jumps"), spec.pooling)
    cached = 16 if spec is LAST else 0
    usage = Usage(prompt_tokens=25, completion_tokens=0, cached_tokens=cached)
    assert ended(harness, request_id) == [Embedding(vector), ChoiceFinished(0, FinishReason.STOP), usage]
    assert all(isinstance(harness.outputs[other][-1], RequestFinished) for other in others)
    assert harness.engine.health().free_blocks == 64


def test_it_is_measured_as_a_prompt_and_not_as_an_answer_of_tokens():
    harness = timed(max_num_batched_tokens=8)
    request_id = harness.submit_request(EngineRequest("a", TextPrompt("hello there"), embedding=SPEC))
    harness.clock.advance(2.5)
    harness.run()
    timings = harness.outputs[request_id][-1].timings
    assert (timings.queue, timings.prefill, timings.decode) == (2.5, 2.0, 0.0)
    m = harness.engine.measurements()
    assert (m.prompt_tokens, m.cached_tokens, m.generated_tokens) == (11, 0, 0)
    assert dict(m.finished)["stop"] == 1
    assert values(m.queue_time) == (1, 2.5)
    assert values(m.prefill_time) == values(m.inference_time) == (1, 2.0)
    assert values(m.e2e_latency) == (1, 4.5)
    assert values(m.time_to_first_token) == values(m.decode_time) == (0, 0.0)


def test_a_recorded_run_with_embeddings_replays(tmp_path):
    harness = build(record=tmp_path / "trace.jsonl")
    for number, spec in enumerate((SPEC, LAST, LAST)):
        harness.submit_request(EngineRequest(str(number), TextPrompt("some words here"), embedding=spec))
        harness.submit("some words", max_tokens=3)
    harness.run()
    harness.engine.close()
    report = replay((tmp_path / "trace.jsonl").read_text(encoding="utf-8").splitlines(keepends=True))
    assert report.same, report.explain()


def test_a_failed_row_fails_its_request_alone():
    harness = build()
    bad = harness.submit_request(EngineRequest("bad", TextPrompt("hello"), embedding=SPEC))
    good = harness.submit_request(EngineRequest("good", TextPrompt("hello"), embedding=SPEC))
    harness.runner.fail_sequence("bad/0", "not finite")
    harness.run()
    assert [type(output).__name__ for output in harness.outputs[bad]] == ["RequestFailed"]
    assert isinstance(harness.outputs[good][0], Embedding)


def test_an_abort_ends_it_without_a_vector():
    harness = build(max_num_batched_tokens=8)
    request_id = harness.submit_request(EngineRequest("a", TextPrompt("the quick brown fox"), embedding=SPEC))
    harness.step()
    harness.collect(harness.engine.abort(request_id))
    assert ended(harness, request_id)[0] == ChoiceFinished(0, FinishReason.ABORT)
    harness.run()
    assert harness.engine.health().free_blocks == 64


def intake(hidden_size: int = 12, *, add_eos: bool = False) -> Intake:
    card = ModelCard("harness", 0, 128, 33, True, hidden_size)
    return Intake(text_model(add_eos=add_eos), card, DEFAULT_LIMITS, SimClock(), lambda: 7, "fcfs")


def test_a_prompt_may_fill_the_context():
    (request,) = intake().resolve(EngineRequest("a", TokenPrompt((1,) * 128), embedding=SPEC)).sequences
    assert (len(request.prompt), request.stop.max_tokens, request.fresh_prompt) == (128, 0, True)
    with pytest.raises(PromptTooLong):
        intake().resolve(EngineRequest("a", TokenPrompt((1,) * 129), embedding=SPEC))


def test_what_is_too_long_is_cut_at_its_end_where_that_is_asked_for():
    request = EngineRequest("a", TokenPrompt(tuple(range(30)) * 9), embedding=LAST, most_prompt_tokens=35)
    (sequence,) = intake().resolve(request).sequences
    assert sequence.prompt == (*range(30), *range(5))
    assert not sequence.fresh_prompt


def test_a_text_that_is_cut_still_ends_as_the_tokenizer_ends_texts():
    def resolved(prompt, most: int) -> tuple[int, ...]:
        request = EngineRequest("a", prompt, embedding=LAST, most_prompt_tokens=most)
        return intake(add_eos=True).resolve(request).sequences[0].prompt

    assert resolved(TextPrompt("foxes"), 4) == (*ids("fox"), END_ID)
    assert resolved(TextPrompt("foxes"), 6) == (*ids("foxes"), END_ID)
    assert resolved(TokenPrompt((*ids("foxes"), END_ID)), 4) == ids("foxe")  # ids are taken as they are


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"sampling": SamplingSpec((("temperature", 0),))}, "sampling"),
        ({"stop": StopRules(max_tokens=4)}, "stop"),
        ({"echo": True}, "echo"),
        ({"grammar": Grammar(GrammarKind.REGEX, "a")}, "structured_outputs"),
        ({"reply": ReplyRules(ReasoningUse.SPLIT)}, "reply"),
        ({"embedding": EmbeddingSpec(dimensions=13)}, "dimensions"),
        ({"embedding": EmbeddingSpec(dimensions=-1)}, "dimensions"),
        ({"prompt": TextPrompt("")}, "prompt"),
        ({"prompt": TokenPrompt(())}, "prompt"),
        ({"most_prompt_tokens": -1}, "truncate_prompt_tokens"),
    ],
)
def test_what_means_nothing_beside_a_vector_is_refused_by_name(fields, param):
    with pytest.raises(RequestError) as caught:
        intake().resolve(EngineRequest(**{"id": "a", "prompt": TextPrompt("hi"), "embedding": SPEC} | fields))
    assert isinstance(caught.value, InvalidParameter)
    assert caught.value.param == param


def test_a_conversation_is_embedded_as_its_template_writes_it():
    resolved = intake().resolve(EngineRequest("a", ChatPrompt((Message("user", "hi"),)), embedding=SPEC))
    assert resolved.prompt_text == "hi<|end|>"


async def test_readers_get_their_vectors_through_the_loop():
    harness = build(pause=0.001, num_blocks=40)
    loop = EngineLoop(harness.engine, harness.clock, QueueLimits(1000))
    loop.start()
    client = LocalClient(harness.intake, loop)
    texts = [f"a text {'z' * (i % 9)}" for i in range(30)]

    async def vector(number: int, text: str) -> bytes:
        request = EngineRequest(str(number), TextPrompt(text), embedding=SPEC if number % 2 else LAST)
        outputs = [output async for output in client.generate(request)]
        return outputs[0].vector

    try:
        found = await asyncio.gather(*(vector(number, text) for number, text in enumerate(texts)))
    finally:
        await asyncio.to_thread(client.close)
    poolings = [(Pooling.LAST, Pooling.MEAN)[number % 2] for number in range(30)]
    assert found == [golden_embedding(ids(text), each) for text, each in zip(texts, poolings, strict=True)]
