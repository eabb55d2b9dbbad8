"""Token likelihoods from the library, and the best of several choices, against transformers' logits."""

from __future__ import annotations

import pytest
from tiny_checkpoints import reference_logits, write_checkpoint, write_letters

from penstock import LLM, SamplingParams
from penstock.contract.errors import InvalidParameter
from penstock.exec import prompt_scores

PROMPT = [5, 9, 31, 7, 7, 12]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = write_checkpoint(tmp_path_factory.mktemp("ranks") / "tiny", "llama", "wide_heads_untied")
    write_letters(directory, 101)
    return directory


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(str(checkpoint), kv_cache_memory=10_000_000, dtype="float32") as llm:
        yield llm


def test_every_log_probability_has_its_rank_in_prompt_and_output(llm, checkpoint):
    params = SamplingParams(temperature=1.4, seed=3, max_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    [output] = llm.generate([PROMPT], params, use_tqdm=False)
    tokens = [*PROMPT, *output.outputs[0].token_ids]
    logprobs = reference_logits(checkpoint, tokens).double().log_softmax(-1)
    told = [*output.prompt_logprobs, *output.outputs[0].logprobs]
    assert told[0] is None
    for at, entries in enumerate(told[1:], start=1):
        order = logprobs[at - 1].argsort(descending=True).tolist()
        count = 2 if at < len(PROMPT) else 3
        assert next(iter(entries)) == tokens[at]
        assert set(entries) == {tokens[at], *order[:count]}
        for token, entry in entries.items():
            assert entry.rank == 1 + order.index(token)
            assert entry.logprob == pytest.approx(logprobs[at - 1, token].item(), abs=1e-4)
    assert {entries[token].rank for entries, token in zip(told[1:], tokens[1:], strict=True)} != {1}


def test_an_answer_that_comes_back_as_a_prompt_is_scored_to_the_bit_as_it_was(llm):
    params = SamplingParams(temperature=1.4, seed=3, max_tokens=48, ignore_eos=True, logprobs=3)
    [answered] = llm.generate([PROMPT], params, use_tqdm=False)
    told = answered.outputs[0]
    again = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3)
    [scored] = llm.generate([[*PROMPT, *told.token_ids]], again, use_tqdm=False)
    assert scored.prompt_logprobs[len(PROMPT) :] == told.logprobs


def test_the_best_of_several_are_those_that_all_of_them_would_have_shown(llm):
    common = {"temperature": 1.2, "seed": 5, "max_tokens": 6, "logprobs": 0}
    [every] = llm.generate([PROMPT], SamplingParams(**common, n=6), use_tqdm=False)
    [best] = llm.generate([PROMPT], SamplingParams(**common, n=2, best_of=6), use_tqdm=False)
    order = sorted(every.outputs, key=lambda each: -each.cumulative_logprob / len(each.token_ids))
    assert [each.token_ids for each in best.outputs] == [each.token_ids for each in order[:2]]
    assert [each.index for each in best.outputs] == [0, 1]
    del common["logprobs"]
    [silent] = llm.generate([PROMPT], SamplingParams(**common, n=2, best_of=6), use_tqdm=False)
    assert [each.token_ids for each in silent.outputs] == [each.token_ids for each in best.outputs]
    assert [each.logprobs for each in silent.outputs] == [None, None]


def test_more_prompt_scores_than_an_answer_may_hold_are_refused(checkpoint):
    with LLM(str(checkpoint), kv_cache_memory=10_000_000, dtype="float32") as small:
        object.__setattr__(small._assembly.intake, "_limits", _limited(small._assembly.intake._limits))
        assert small.generate([PROMPT], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        with pytest.raises(InvalidParameter, match="prompt_logprobs"):
            small.generate([PROMPT], SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)
        with pytest.raises(InvalidParameter, match="prompt_logprobs"):
            small.generate([PROMPT], SamplingParams(max_tokens=1, n=2, prompt_logprobs=0), use_tqdm=False)


def _limited(limits):
    return type(limits)(max_prompt_logprobs=len(PROMPT))


def test_memory_of_prompt_scores_is_that_of_a_portion(llm, monkeypatch):
    """No more than `PORTION` rows of logits are ever made of a prompt, however long it is."""
    seen = []
    log_probabilities = prompt_scores.log_probabilities

    def watch(logits, choose):
        seen.append(len(logits))
        return log_probabilities(logits, choose)

    monkeypatch.setattr(prompt_scores, "log_probabilities", watch)
    llm.generate([PROMPT * 40], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1), use_tqdm=False)
    assert sum(seen) >= 6 * 40 - 1
    assert max(seen) <= prompt_scores.PORTION
