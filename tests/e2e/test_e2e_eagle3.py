"""An EAGLE-3 head guesses: not one bit differs, and its guesses are what transformers' modules predict."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from eagle3_heads import LAYERS, Eagle3, write_eagle3
from test_e2e_drafts_of_states import PROMPTS, answers
from test_e2e_predictor import guessed
from tiny_checkpoints import BYTE_VOCABULARY, write_byte_tokenizer, write_checkpoint

from needs import COMPILED
from penstock import LLM, SamplingParams, app
from penstock.contract.errors import SetupError
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.exec.predictor import PredictingDrafter
from penstock.kernels import native

pytestmark = pytest.mark.skipif(not native.available(), reason=COMPILED)

OPTIONS = {"kv_cache_memory": "4MiB", "max_num_seqs": 4, "threads": 1}
EXACT = {"dtype": "float32", "quantization": "none"}
KNOWN = BYTE_VOCABULARY // 2


@pytest.fixture(autouse=True)
def all_guesses_are_computed(monkeypatch):
    monkeypatch.setattr(app, "SchedulerConfig", partial(SchedulerConfig, weigh_drafts=False))


def model_of(folder: Path) -> Path:
    write_checkpoint(folder, "llama", "wide_heads_untied", num_hidden_layers=LAYERS, vocab_size=BYTE_VOCABULARY)
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return model_of(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[0, KNOWN], ids=["all tokens", "some tokens"])
def head(request, model, tmp_path_factory) -> Path:
    return write_eagle3(tmp_path_factory.mktemp("head"), model, known=request.param)


def test_no_bit_of_any_kind_of_answer_differs(model, head):
    with LLM(str(model), speculate=False, **OPTIONS) as llm:
        want = list(answers(llm))
    with LLM(str(model), draft_model=str(head), **OPTIONS) as llm:
        assert list(answers(llm)) == want
        assert guessed(llm)[0] > 50
        assert any(re.search(r"draft model .*EAGLE-3 head of 0\.\d M weights", line) for line in llm.report), llm.report


def test_it_may_be_in_int8_beside_a_model_in_int8(model, head):
    options = {**OPTIONS, "quantization": "int8"}
    with LLM(str(model), speculate=False, **options) as llm:
        want = list(answers(llm))
    with LLM(str(model), draft_model=str(head), **options) as llm:
        assert list(answers(llm)) == want
        assert guessed(llm)[0] > 50


@pytest.mark.parametrize("sizes", [{}, {"max_num_batched_tokens": 24}], ids=["whole", "chunks"])
def test_guesses_are_what_transformers_modules_predict(model, head, sizes, monkeypatch):
    """The first guess comes from the model's states, later ones from the head's own."""
    from transformers import AutoModelForCausalLM

    noted: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    said = PredictingDrafter._said

    def noting(drafter, result):
        told = said(drafter, result)
        if told.guess:
            count = drafter._tables.num_tokens(told.slot)
            noted.append((tuple(drafter._tables._tokens[told.slot, :count].tolist()), told.guess))
        return told

    monkeypatch.setattr(PredictingDrafter, "_said", noting)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [{"prompt_token_ids": each} for each in PROMPTS]
    with LLM(str(model), draft_model=str(head), **{**OPTIONS, **EXACT, **sizes}) as llm:
        for _ in range(2):  # the second round finds its prompts in the cache, followed that far
            llm.generate(prompts, params, use_tqdm=False)
        assert llm.scheduler.stats.hit_tokens > 0
    first = {tuple(prompt[1:8]): prompt[0] for prompt in PROMPTS}
    guesses = [each for each in noted if each[0][:7] in first]
    assert len(guesses) > 50
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    want = Eagle3(head, loaded, [2, 2, 1])
    clear = behind = 0
    for known, guess in guesses[:: max(1, len(guesses) // 60)]:
        tokens = [first[known[:7]], *known]
        hidden, following = want.joined(want.states(tokens)[:-1]), tokens[1:]
        for place, token in enumerate(guess):
            logits, onward = want.predict(hidden, following)
            best = logits[-1].topk(2)
            if float(best.values[0] - best.values[1]) < 1e-3:
                break  # either may come first
            index = int(best.indices[0])
            assert token == (index if len(want.tensors.get("d2t", ())) == 0 else 2 * index)
            clear, behind = clear + 1, behind + (place > 0)
            hidden, following = torch.cat([hidden, onward[-1:]]), [*following, token]
    assert clear > 40
    assert behind > 5, "guesses behind the first"


def test_lost_and_preempted_sequences_are_followed_again(model, head):
    """A cache that holds two sequences at most: they are preempted, and come back."""
    options = {**OPTIONS, "max_num_seqs": 6, "kv_cache_memory": "200KiB", "block_size": 16}
    params = SamplingParams(temperature=0.3, seed=5, max_tokens=60, ignore_eos=True)
    prompts = [{"prompt_token_ids": each} for each in PROMPTS]

    def tokens(llm):
        return [each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)]

    with LLM(str(model), speculate=False, **OPTIONS) as llm:
        want = tokens(llm)
    with LLM(str(model), draft_model=str(head), **options) as llm:
        assert tokens(llm) == want
        assert llm.scheduler.stats.preemptions > 0


def test_a_head_of_another_model_is_refused_by_name(model, tmp_path):
    other = write_checkpoint(tmp_path / "other", "llama", "one_to_one_tied_linear", num_hidden_layers=LAYERS)
    head = write_eagle3(tmp_path / "head", other)
    with pytest.raises(SetupError, match="vocab_size"):
        LLM(str(model), draft_model=str(head), **OPTIONS)
