"""Log probabilities of a prompt: those of the whole sequence's logits, whatever the chunks, in small portions."""

from __future__ import annotations

import pytest
import torch
from test_exec_runner import SHAPE, ToyLM, make_runner

from penstock.contract.plan import Admit, Row, StepPlan
from penstock.exec.prompt_scores import PORTION
from penstock.nn.dense import DenseAttention
from penstock.sampling import SamplingParams

PROMPT = tuple((7 * place * place + 3) % SHAPE.vocab_size for place in range(45))


def scored(chunks, generated=(), top=3):
    """The scores that a prompt brings in rows of these sizes: [(place, logprob, top, rank)]."""
    model = ToyLM()
    runner, _ = make_runner(model, 4, 40, 2)
    spec = SamplingParams(temperature=0, prompt_logprobs=top).spec()
    other = Admit(1, "other", (5, 6, 7), (30,), 0, SamplingParams(temperature=0).spec(), 0)
    tokens = (*PROMPT, *generated)
    admit = Admit(0, "a", tokens, tuple(range(16)), 0, spec, 0, prompt_tokens=len(PROMPT))
    found, start = [], 0
    for step, count in enumerate(chunks):
        rows = (Row(1, 0, 3, (), True),) if step == 0 else ()
        rows += (Row(0, start, count, (), start + count == len(tokens)),)
        result = runner.run(StepPlan(step, (), (other, admit) if step == 0 else (), rows))
        scores = {row.slot: row.prompt for row in result.rows if row.prompt is not None}
        assert scores.keys() <= {0}
        for each in scores.values():
            columns = zip(each.logprobs, each.top_logprobs, each.ranks, strict=True)
            found += [(each.start + i, *entry) for i, entry in enumerate(columns)]
        start += count
    assert start == len(tokens)
    assert max(model.logit_rows) <= PORTION
    return found


def reference():
    model = ToyLM()
    hidden = model.forward(torch.tensor(PROMPT), torch.arange(len(PROMPT)), DenseAttention())
    return model.logits(hidden).double().log_softmax(-1)[:-1]  # [44, V]


@pytest.mark.parametrize("chunks", [(45,), (1, 44), (44, 1), (20, 20, 5), (7,) * 6 + (3,)])
def test_each_token_but_the_first_is_scored_once_whatever_the_chunks(chunks):
    found, expected = scored(chunks), reference()
    assert [place for place, *_ in found] == list(range(1, 45))
    for place, logprob, top, rank in found:
        assert rank == 1 + (expected[place - 1] > expected[place - 1, PROMPT[place]]).sum()
        assert logprob == pytest.approx(expected[place - 1, PROMPT[place]].item(), abs=1e-4)
        values, ids = expected[place - 1].topk(3)
        assert [token for token, _ in top] == ids.tolist()
        assert [value for _, value in top] == pytest.approx(values.tolist(), abs=1e-4)


def test_what_was_generated_before_a_preemption_is_no_prompt():
    assert [place for place, *_ in scored((30, 18), generated=(1, 2, 3))] == list(range(1, 45))
    assert [place for place, *_ in scored((46, 2), generated=(1, 2, 3))] == list(range(1, 45))


def test_alternatives_are_left_out_where_none_are_wanted():
    assert all(top == () for _, _, top, _ in scored((45,), top=0))
