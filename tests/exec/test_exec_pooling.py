"""Embeddings in the runner: dense states pooled in float64, the same bits however the prompt is run."""

from __future__ import annotations

import struct

import pytest
import torch
from test_exec_runner import SHAPE, ToyLM, make_runner

from penstock.contract.embedding import EmbeddingSpec, Pooling, vector_floats
from penstock.contract.plan import Admit, Row, StepPlan
from penstock.contract.sampling import NEUTRAL
from penstock.exec.pooling import Pools
from penstock.nn.dense import DenseAttention
from penstock.sampling import SamplingParams

PROMPT = tuple((7 * place * place + 3) % SHAPE.vocab_size for place in range(45))
GREEDY = SamplingParams(temperature=0).spec()
BOTH = pytest.mark.parametrize("pooling", list(Pooling))


def embedded(spec, chunks, runner=None, slot=0):
    """The vector of `PROMPT` in rows of these sizes, beside a sequence that generates."""
    runner = runner or make_runner(ToyLM(), 4, 40, 2)[0]
    blocks = tuple(range(16))
    other = Admit(1 - slot, "other", (5, 6, 7), (30,), 0, GREEDY, 0)
    admit = Admit(slot, "a", PROMPT, blocks, 0, NEUTRAL, 0, embedding=spec)
    start, vectors = 0, []
    for step, count in enumerate(chunks):
        rows = (Row(1 - slot, 0, 3, (), True),) if step == 0 else ()
        rows += (Row(slot, start, count, (), False),)
        result = runner.run(StepPlan(step, (), (other, admit) if step == 0 else (), rows))
        assert result.num_tokens == (step == 0)
        found = {row.slot: row.embedding for row in result.rows if row.embedding is not None}
        assert bool(found) == (start + count == len(PROMPT))
        vectors += [vector for of, vector in found.items() if of == slot]
        start += count
    (vector,) = vectors
    return vector


def states(token_ids=PROMPT):
    return ToyLM().forward(torch.tensor(token_ids), torch.arange(len(token_ids)), DenseAttention()).double()


@pytest.mark.parametrize("dimensions", [0, 1, 7, SHAPE.hidden_size])
@pytest.mark.parametrize("normalize", [False, True])
@BOTH
def test_it_is_the_pooled_states_cut_and_then_scaled(pooling, normalize, dimensions):
    expected = {Pooling.MEAN: states().mean(0), Pooling.LAST: states()[-1], Pooling.CLS: states()[0]}[pooling]
    expected = expected[: dimensions or None]
    if normalize:
        expected = expected / expected.norm()
    found = vector_floats(embedded(EmbeddingSpec(pooling, normalize, dimensions), (45,)))
    assert found == pytest.approx(expected.tolist(), abs=1e-4)


@BOTH
def test_chunks_and_slots_do_not_show(pooling):
    pools, hidden, spec = Pools(), states().float(), EmbeddingSpec(pooling)
    found = set()
    for chunks in [(45,), (1, 44), (44, 1), (20, 20, 5), (7,) * 6 + (3,), (1,) * 45]:
        pools.admit(Admit(2, "a", PROMPT, (), 0, NEUTRAL, 0, embedding=spec))
        start, vectors = 0, []
        for count in chunks:
            mixed = torch.cat((torch.ones(3, hidden.shape[1]), hidden[start : start + count]))
            rows = (Row(0, 0, 3, (), True), Row(2, start, count, (), False))
            vectors += pools.take(rows, torch.tensor([0, 3, 3 + count]), mixed).values()
            start += count
        (vector,) = vectors
        found.add(vector)
        pools.release(2)
    assert len(found) == 1


def test_rows_through_the_model_come_to_the_same_up_to_rounding():
    whole = vector_floats(embedded(EmbeddingSpec(), (45,)))
    for chunks in [(20, 20, 5), (7,) * 6 + (3,)]:
        assert vector_floats(embedded(EmbeddingSpec(), chunks, slot=1)) == pytest.approx(whole, abs=1e-5)


def test_a_sequence_that_comes_again_begins_again():
    runner, _ = make_runner(ToyLM(), 4, 40, 2)
    admit = Admit(0, "a", PROMPT, tuple(range(12)), 0, NEUTRAL, 0, embedding=EmbeddingSpec())
    runner.run(StepPlan(0, (), (admit,), (Row(0, 0, 20, (), False),)))
    again = (Row(0, 0, 45, (), False),)
    (result,) = runner.run(StepPlan(1, (0,), (admit,), again)).rows
    assert vector_floats(result.embedding) == pytest.approx(vector_floats(embedded(EmbeddingSpec(), (45,))), abs=1e-5)


def test_the_last_state_may_stand_on_what_others_computed():
    runner, _ = make_runner(ToyLM(), 4, 40, 2)
    first = Admit(0, "a", PROMPT, tuple(range(12)), 0, GREEDY, 0)
    runner.run(StepPlan(0, (), (first,), (Row(0, 0, 45, (), True),)))
    spec = EmbeddingSpec(Pooling.LAST)
    second = Admit(1, "b", PROMPT, (*range(11), 30), 44, NEUTRAL, 0, embedding=spec)
    (result,) = runner.run(StepPlan(1, (), (second,), (Row(1, 44, 1, (), False),))).rows
    assert vector_floats(result.embedding) == pytest.approx(vector_floats(embedded(spec, (45,))), abs=1e-5)


def test_a_mean_over_what_was_skipped_is_our_bug():
    with pytest.raises(AssertionError, match="pools positions"):
        Pools().admit(Admit(0, "a", PROMPT, (), 4, NEUTRAL, 0, embedding=EmbeddingSpec()))


def test_one_that_is_not_finite_fails_alone():
    runner, _ = make_runner(ToyLM(poison=96), 4, 40, 2)
    admits = [Admit(s, "x", tokens, (s,), 0, NEUTRAL, 0, embedding=EmbeddingSpec()) for s, tokens in
              enumerate(((1, 96), (1, 2)))]  # fmt: skip
    result = runner.run(StepPlan(0, (), tuple(admits), tuple(Row(s, 0, 2, (), False) for s in (0, 1))))
    assert [(row.slot, bool(row.failure), row.embedding is not None) for row in result.rows] == [
        (0, True, False),
        (1, False, True),
    ]


def test_a_row_of_it_that_samples_is_our_bug():
    runner, _ = make_runner(ToyLM(), 4, 40, 2)
    admit = Admit(0, "a", (1, 2), (0,), 0, NEUTRAL, 0, embedding=EmbeddingSpec())
    with pytest.raises(AssertionError, match="samples"):
        runner.run(StepPlan(0, (), (admit,), (Row(0, 0, 2, (), True),)))


def test_no_logits_are_computed_for_it():
    model = ToyLM()
    embedded(EmbeddingSpec(), (45,), make_runner(model, 4, 40, 2)[0])
    assert model.logit_rows == [1]


def test_a_vector_of_zeros_has_no_direction():
    pools = Pools()
    pools.admit(Admit(0, "a", (1, 2), (), 0, NEUTRAL, 0, embedding=EmbeddingSpec()))
    vectors = pools.take((Row(0, 0, 2, (), False),), torch.tensor([0, 2]), torch.zeros(2, 3))
    assert vectors[0] == struct.pack("<3f", 0, 0, 0)
