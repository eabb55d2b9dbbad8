"""A model's own predictor guesses: not one bit differs, and its guesses are what it predicts."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_e2e_drafts_of_states import ASKED, PROMPTS, answers
from tiny_checkpoints import BYTE_VOCABULARY, VARIANTS, add_predictor, write_byte_tokenizer, write_checkpoint

from needs import COMPILED
from penstock import LLM, SamplingParams, app
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.core.draft_chances import MODEL
from penstock.exec.predictor import PredictingDrafter
from penstock.kernels import native
from penstock.kernels.torch_backend import TorchBackend
from penstock.models import gguf_dialect, load
from penstock.nn.dense import DenseAttention
from penstock.nn.reference import ReferenceExecutor
from penstock.weights.bind import Binder
from penstock.weights.files import open_model

pytestmark = pytest.mark.skipif(not native.available(), reason=COMPILED)

OPTIONS = {"kv_cache_memory": "4MiB", "max_num_seqs": 4, "state_checkpoint_interval": 64, "threads": 1}
EXACT = {"dtype": "float32", "quantization": "none"}


@pytest.fixture(autouse=True)
def all_guesses_are_computed(monkeypatch):
    monkeypatch.setattr(app, "SchedulerConfig", partial(SchedulerConfig, weigh_drafts=False))


RECURRENT, LATENT = "qwen3_5_text", "deepseek_v3"
LEFT_OUT = re.compile(r"mtp\.|model\.layers\.\d+\.")


def plain(folder: Path, family: str = RECURRENT) -> Path:
    """A tiny model without a predictor."""
    write_checkpoint(folder, family, VARIANTS[family][0], vocab_size=BYTE_VOCABULARY)
    write_byte_tokenizer(folder)
    return folder


def predicting(folder: Path, family: str = RECURRENT) -> Path:
    """The same model with one."""
    add_predictor(plain(folder, family))
    return folder


@pytest.fixture(scope="module", params=[RECURRENT, LATENT])
def each_model(request, tmp_path_factory) -> Path:
    return predicting(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return predicting(tmp_path_factory.mktemp("model"))


def guessed(llm: LLM) -> tuple[int, int]:
    """How many tokens guessed by the predictor were computed, and how many were right."""
    counts = dict(llm._engine.measurements().drafts)
    return (counts[MODEL].tokens, counts[MODEL].accepted) if MODEL in counts else (0, 0)


def test_no_bit_of_any_kind_of_answer_differs(each_model):
    with LLM(str(each_model), speculate=False, **OPTIONS) as llm:
        want = list(answers(llm))
        assert any(LEFT_OUT.search(line) for line in llm.report)
    with LLM(str(each_model), **OPTIONS) as llm:
        assert list(answers(llm)) == want
        assert guessed(llm)[0] > 50
        assert not any(LEFT_OUT.search(line) for line in llm.report)
        assert any(line.startswith("predictor ") for line in llm.report)


class Noted:
    """What was guessed after which tokens; the first of these is left out."""

    def __init__(self, monkeypatch) -> None:
        self.guesses: list[tuple[tuple[int, ...], int]] = []
        said = PredictingDrafter._said

        def noting(drafter, result):
            told = said(drafter, result)
            if told.guess:
                known = drafter._tables.num_tokens(told.slot)
                self.guesses.append((tuple(drafter._tables._tokens[told.slot, :known].tolist()), told.guess[0]))
            return told

        monkeypatch.setattr(PredictingDrafter, "_said", noting)


class Dense:
    """Model and predictor computed by torch, one sequence whole."""

    def __init__(self, folder: Path) -> None:
        files = open_model(folder, gguf_dialect)
        binder = Binder(files.source, torch.float32, "cpu", str(folder), predicts=True)
        program = load(files.config, binder, str(folder))
        self.table = program.predictor.table
        self.model = ReferenceExecutor(program, torch.float32, TorchBackend())
        self.own = ReferenceExecutor(program.predictor.program, torch.float32, TorchBackend())

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Logits of the token after `tokens`, from states of all but the last, each joined with its next token."""
        ids, count = torch.tensor(tokens), len(tokens) - 1
        with torch.inference_mode():
            hidden = self.model.forward(ids[:-1], torch.arange(count), DenseAttention())
            pair = torch.cat([self.own.backend.embedding(ids[1:], self.table, torch.float32), hidden], 1)
            return self.own.logits(self.own.forward_given(pair, torch.arange(count), DenseAttention()))[-1]


@pytest.mark.parametrize("sizes", [{}, {"max_num_batched_tokens": 24}], ids=["whole", "chunks"])
def test_guesses_are_what_the_predictor_predicts_behind_all_tokens(each_model, sizes, monkeypatch):
    noted, dense = Noted(monkeypatch), Dense(each_model)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [{"prompt_token_ids": each} for each in PROMPTS]
    with LLM(str(each_model), **{**OPTIONS, **EXACT, **sizes}) as llm:
        for _ in range(2):  # the second round finds its prompts in the cache, followed that far
            llm.generate(prompts, params, use_tqdm=False)
        assert llm.scheduler.stats.hit_tokens > 0
    first = {tuple(prompt[1:8]): prompt[0] for prompt in PROMPTS}
    guesses = [each for each in noted.guesses if each[0][:7] in first]  # and not those of the warm-up
    assert len(guesses) > 50
    clear = 0
    for known, guess in guesses[:: max(1, len(guesses) // 60)]:
        logits = dense.logits([first[known[:7]], *known])
        best = logits.topk(2)
        if float(best.values[0] - best.values[1]) > 1e-3:
            clear += 1
            assert guess == int(best.indices[0])
    assert clear > 40


@pytest.fixture(scope="module")
def certain(tmp_path_factory) -> Path:
    """A model whose next token follows from the last one alone, and whose predictor knows the rule."""
    folder = predicting(tmp_path_factory.mktemp("certain"))
    tensors = load_file(folder / "model.safetensors")
    for name, each in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            each.zero_()  # no layer adds anything
    width = len(tensors["model.norm.weight"])
    tensors["mtp.fc.weight"][:, :width] = torch.eye(width)
    tensors["mtp.fc.weight"][:, width:] = 0.0
    tensors["mtp.pre_fc_norm_embedding.weight"].zero_()
    tensors["mtp.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def rounds(llm: LLM, params: SamplingParams) -> list[tuple[int, ...]]:
    prompts = [{"prompt_token_ids": each} for each in PROMPTS]
    return [tuple(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize(("params", "least"), [({"temperature": 0}, 1.0), ({"seed": 3}, 0.8)], ids=["greedy", "drawn"])
def test_a_predictor_that_knows_the_rule_is_right_and_saves_steps(certain, params, least):
    """With drawn tokens too: guesses use the same random numbers, and are right as far as logits are the model's."""
    params = SamplingParams(**params, max_tokens=40, ignore_eos=True)
    options = {**OPTIONS, **EXACT, "prefix_caching": False}
    with LLM(str(certain), speculate=False, **options) as llm:
        want, steps = rounds(llm, params), llm.scheduler.stats.steps
    with LLM(str(certain), **options) as llm:
        llm._engine._drafter = None  # the predictor alone
        assert rounds(llm, params) == want
        drafted, right = guessed(llm)
        assert drafted > 50
        assert least * drafted <= right <= drafted
        assert llm.scheduler.stats.steps < 0.7 * steps


def test_a_draft_model_takes_its_place(model, tmp_path):
    small = tmp_path / "small"
    write_checkpoint(small, "llama", "wide_heads_untied", vocab_size=BYTE_VOCABULARY)
    write_byte_tokenizer(small)
    with LLM(str(model), draft_model=str(small), **OPTIONS) as llm:
        assert any("mtp." in line for line in llm.report)
        llm.generate([{"prompt_token_ids": PROMPTS[0]}], ASKED[0], use_tqdm=False)


def test_show_has_it_and_counts_its_memory(model, tmp_path):
    from click.testing import CliRunner

    from penstock.cli.show import command

    def shown(folder: Path) -> tuple[str, float]:
        done = CliRunner().invoke(command, [str(folder), "--program"])
        assert done.exit_code == 0, done.output
        return done.output, float(re.search(r"KV cache ([\d.]+) MiB", done.output)[1])

    plain(tmp_path)
    (with_it, more), (without, less) = shown(model), shown(tmp_path)
    assert "predictor        a layer of its own predicts a second token" in with_it
    assert "(pair[0:48]" in with_it
    assert "predictor" not in without
    caches = without.count("attend(")
    assert more == pytest.approx(less * (caches + 1) / caches), "as much again as each of the model's caches"
