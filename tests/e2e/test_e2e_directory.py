"""A directory in Hugging Face layout, as transformers writes it: from disk to text; its mistakes are named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tiny_checkpoints import reference_greedy, write_checkpoint
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from penstock import LLM, SamplingParams
from penstock.contract.errors import ModelFileError, PenstockError

LETTERS = "abcdefghijklmnopqrstuvwxyz .,"
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
OPTIONS = {"kv_cache_memory": 10_000_000, "dtype": "float32"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A tiny Llama with a tokenizer of letters and a chat template."""
    directory = write_checkpoint(tmp_path_factory.mktemp("model") / "tiny-llama", "llama", "wide_heads_untied")
    names = ["<unk>", "<s>", "</s>", *LETTERS.replace(" ", "Ġ")]
    backend = Tokenizer(BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def test_it_answers_as_transformers_does(whole):
    with LLM(str(whole), **OPTIONS) as llm:
        assert llm.card.name == "tiny-llama"
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        [raw] = llm.generate("hello there", params, use_tqdm=False)
        assert raw.prompt_token_ids == [3 + LETTERS.index(letter) for letter in "hello there"]
        tokens = list(raw.outputs[0].token_ids)
        assert len(tokens) == 20
        assert tokens == reference_greedy(whole, raw.prompt_token_ids, tokens)
        [chat] = llm.chat([{"role": "user", "content": "hello"}], params, use_tqdm=False)
        assert chat.prompt == "hello</s>"


def change(directory: Path, file: str, **values) -> None:
    settings = json.loads((directory / file).read_text())
    (directory / file).write_text(json.dumps(settings | values))


def refused(directory: Path) -> str:
    with pytest.raises(PenstockError) as caught:
        LLM(str(directory), **OPTIONS)
    assert isinstance(caught.value, ModelFileError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("hidden_size", 0),
        ("hidden_act", "relu6"),
        ("model_type", "os.path"),
        ("vocab_size", 102),
        ("num_key_value_heads", 5),
        ("rope_parameters", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        ("max_position_embeddings", "many"),
    ],
)
def test_settings_that_are_absurd_or_not_implemented_are_named(copy, key, value):
    change(copy, "config.json", **{key: value})
    message = refused(copy)
    assert str(copy) in message
    assert key in message or "embed_tokens" in message  # a wrong size may show in the first tensor that has it


def test_a_broken_template_is_named(copy):
    for file in copy.glob("chat_template*"):
        file.unlink()
    change(copy, "tokenizer_config.json", chat_template="{% for %}")
    message = refused(copy)
    assert "tokenizer_config.json" in message
    assert "chat_template" in message


def test_a_broken_tokenizer_is_named(copy):
    (copy / "tokenizer.json").write_text('{"model": 3}')
    assert "tokenizer.json" in refused(copy)


def test_a_truncated_checkpoint_is_named(copy):
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert "model.safetensors" in refused(copy)


def test_pickled_weights_are_never_read(copy):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    assert "safetensors" in refused(copy)
