"""Embedding models as sentence-transformers publishes them: vectors are those that transformers' states make."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import write_checkpoint, write_letters
from tiny_encoders import write_modules

from penstock import LLM
from penstock.contract.embedding import EmbeddingSpec, Pooling
from penstock.contract.errors import ModelFileError
from penstock.contract.model import ModelCard
from penstock.models import gguf_dialect
from penstock.quantizing import plan_file, write_file
from penstock.weights.embedding_config import read_embedding
from penstock.weights.files import open_model

TEXTS = ["what is it, then.", "a", "the quick brown fox jumps over the lazy dog " * 3]
VARIANT = "wide_heads_tied"

FLAGS = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": False}


def write_bare(directory: Path) -> Path:
    """A Qwen3 without its head, whose tokenizer puts the end of sequence behind every text: as Qwen3-Embedding is."""
    from transformers import AutoModel

    write_checkpoint(directory / "whole", "qwen3", VARIANT)
    AutoModel.from_pretrained(directory / "whole").save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    write_letters(directory, config["vocab_size"])
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]}},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


def states(directory: Path, text: str) -> torch.Tensor:
    """Transformers' states behind the last norm, `[T, H]`, of a text as its own tokenizer encodes it."""
    from transformers import AutoModel, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(directory)(text, return_tensors="pt")["input_ids"]
    assert ids[0, -1] == 2, "the text ends with the end of sequence"
    with torch.no_grad():
        return AutoModel.from_pretrained(directory).float()(ids).last_hidden_state[0]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bare(tmp_path_factory.mktemp("embedding"))


def test_vectors_of_a_checkpoint_without_head_are_transformers_last_states(bare, tmp_path):
    write_modules(bare, FLAGS | {"pooling_mode_lasttoken": True}, "Normalize")
    with LLM(str(bare), dtype="float32", max_model_len=256) as llm:
        found = [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]
        [plain] = llm.embed(TEXTS[0], pooling="mean", normalize=False, use_tqdm=False)
    for text, vector in zip(TEXTS, found, strict=True):
        wanted = torch.nn.functional.normalize(states(bare, text)[-1], dim=0)
        torch.testing.assert_close(torch.tensor(vector), wanted, atol=2e-6, rtol=0)
    write_file(plan_file(open_model(bare, gguf_dialect), "F32"), tmp_path / "tiny.gguf", lambda _: None)
    with LLM(str(tmp_path / "tiny.gguf"), dtype="float32", max_model_len=256) as llm:
        for output, vector in zip(llm.embed(TEXTS, use_tqdm=False), found, strict=True):
            torch.testing.assert_close(torch.tensor(output.outputs.embedding), torch.tensor(vector), atol=2e-6, rtol=0)
    mean = states(bare, TEXTS[0]).mean(0)
    torch.testing.assert_close(torch.tensor(plain.outputs.embedding), mean, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("pooling", "kinds", "wanted"),
    [
        (FLAGS | {"pooling_mode_lasttoken": True}, ["Normalize"], EmbeddingSpec(Pooling.LAST)),
        (FLAGS | {"pooling_mode_mean_tokens": True}, [], EmbeddingSpec(Pooling.MEAN, normalize=False)),
        ({"pooling_mode": "lasttoken"}, [], EmbeddingSpec(Pooling.LAST, normalize=False)),
        ({"pooling_mode": "mean"}, ["Normalize"], EmbeddingSpec(Pooling.MEAN)),
        (FLAGS | {"pooling_mode_cls_token": True}, ["Normalize"], EmbeddingSpec(Pooling.CLS)),
        ({"pooling_mode": "cls", "include_prompt": True}, ["Dense"], EmbeddingSpec(Pooling.CLS, normalize=False)),
    ],
)
def test_modules_say_what_an_embedding_is(tmp_path, pooling, kinds, wanted):
    assert read_embedding(write_modules(tmp_path, pooling, *kinds)) == wanted


def test_a_model_without_modules_says_nothing_and_has_the_mean_of_length_1(tmp_path):
    assert read_embedding(tmp_path) is read_embedding(tmp_path / "model.gguf") is None
    assert ModelCard("a", 0, 64, 100, False).embedding == EmbeddingSpec(Pooling.MEAN, normalize=True)


@pytest.mark.parametrize(
    ("pooling", "kinds", "said"),
    [
        (FLAGS | {"pooling_mode_max_tokens": True}, [], "pooling_mode: max_tokens is not implemented"),
        ({"pooling_mode": "mean", "include_prompt": False}, [], "include_prompt: false is not implemented"),
        (FLAGS, [], "pooling_mode: none is not implemented"),
        (FLAGS | {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, [], "mean_tokens and lasttoken"),
        ({"pooling_mode": "mean"}, ["LayerNorm"], "type: 'LayerNorm' is not implemented"),
        ({"pooling_mode": "mean"}, ["Normalize", "Dense"], "type: 'Dense' after 'Normalize' is not implemented"),
    ],
)
def test_what_would_make_other_vectors_is_refused(tmp_path, pooling, kinds, said):
    with pytest.raises(ModelFileError, match=said):
        read_embedding(write_modules(tmp_path, pooling, *kinds))


def test_files_that_are_no_modules_are_refused(tmp_path):
    for text, said in (("{", "not readable JSON"), ('{"a": 1}', "must hold a list of modules")):
        (tmp_path / "modules.json").write_text(text)
        with pytest.raises(ModelFileError, match=said):
            read_embedding(tmp_path)
