"""The tokenizer directory that is written gives transformers' AutoTokenizer our own reader's ids and prompts."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import text_vocabularies as vocabularies
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from penstock.contract.errors import ConfigError, ModelFileError
from penstock.contract.model import GgufVocabulary, HuggingFaceText
from penstock.contract.request import Message
from penstock.text import TextModel, open_text
from penstock.text.huggingface_writer import write_tokenizer

GGUF_NAMES = (*vocabularies.FAMILIES, "llama")
TURNS = ("Hello", "Grüße aus Zürich 🙂", "  spaces \n and\ttabs ", "日本語のテキスト", "{{ bos_token }} {% raise %}")


@pytest.fixture(scope="module")
def given_files(tmp_path_factory) -> dict[str, GgufVocabulary]:
    saved = {name: vocabularies.save(name, tmp_path_factory.mktemp(name)) for name in GGUF_NAMES}
    return {name: vocabularies.to_gguf(name, files) for name, files in saved.items()}


@pytest.fixture(scope="module")
def written(given_files, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("written")
    for name, files in given_files.items():
        write_tokenizer(files, folder / name)
    return {name: folder / name for name in given_files}


@pytest.fixture(scope="module")
def ours(given_files) -> dict[str, TextModel]:
    return {name: open_text(files) for name, files in given_files.items()}


@pytest.fixture(scope="module")
def theirs(written):
    return {name: AutoTokenizer.from_pretrained(directory) for name, directory in written.items()}


def texts(name: str) -> list[str]:
    """The corpus, special tokens among words and spaces, and 300 random mixtures of both."""
    specials = vocabularies.SPECIALS[name]
    pieces = [
        *specials,
        *vocabularies.CORPUS,
        " ",
        "  ",
        "\n\n",
        "\t",
        "<think>",
        "</think>",
        "\u200d",
        "e\u0301",
        "\0",
    ]
    random_ = random.Random(7)
    mixed = ["".join(random_.choices(pieces, k=random_.randint(1, 6))) for _ in range(300)]
    return [*vocabularies.CORPUS, " a ".join(specials), "\n ".join(specials), "x".join(specials), *mixed]


@pytest.mark.parametrize("name", GGUF_NAMES)
def test_transformers_gives_the_same_ids(name, ours, theirs):
    for text in texts(name):
        ids = theirs[name](text)["input_ids"]
        assert list(ours[name].tokenizer.encode(text)) == ids, text
        assert theirs[name].decode(ids, skip_special_tokens=True) == ours[name].tokenizer.decode(ids), text


@pytest.mark.parametrize("name", GGUF_NAMES)
@given(text=st.text(max_size=40))
@settings(max_examples=40, deadline=None)
def test_any_unicode_text_has_the_same_ids(name, text, ours, theirs):
    assert list(ours[name].tokenizer.encode(text)) == theirs[name](text)["input_ids"]


@pytest.mark.parametrize("name", GGUF_NAMES)
def test_transformers_writes_the_same_prompts(name, ours, theirs):
    for count in range(1, len(TURNS) + 1, 2):
        messages = vocabularies.user(*TURNS[:count])
        turns = [{"role": each.role, "content": each.content} for each in messages]
        rendered = theirs[name].apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        assert rendered == ours[name].chat_template.render(messages).text
        ids = theirs[name].apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        assert tuple(ids) == ours[name].encode_messages(messages)


@pytest.mark.parametrize("name", GGUF_NAMES)
def test_our_own_reader_finds_the_same_model_in_it(name, written, ours):
    read = open_text(HuggingFaceText(str(written[name])))
    assert read.eos_token_ids == ours[name].eos_token_ids
    assert read.bos_token_id == ours[name].bos_token_id
    assert read.encode_messages([Message("user", "Hi")]) == ours[name].encode_messages([Message("user", "Hi")])
    for id_ in range(ours[name].tokenizer.vocab_size):
        assert read.tokenizer.token_bytes(id_) == ours[name].tokenizer.token_bytes(id_)
        assert read.tokenizer.is_special(id_) == ours[name].tokenizer.is_special(id_)


def test_a_publishers_own_files_are_copied(tmp_path):
    (tmp_path / "source").mkdir()
    files = vocabularies.save("qwen2", tmp_path / "source")
    (tmp_path / "source" / "additional_chat_templates").mkdir()
    (tmp_path / "source" / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (tmp_path / "source" / "model.safetensors").write_bytes(b"weights")
    write_tokenizer(files, tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == [
        "additional_chat_templates",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for path in (tmp_path / "copy").rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "source" / path.relative_to(tmp_path / "copy")).read_bytes()


def test_a_tokenizer_json_alone_gets_its_settings(tmp_path):
    (tmp_path / "source").mkdir()
    files = vocabularies.save("gpt2", tmp_path / "source")
    (tmp_path / "source" / "tokenizer_config.json").unlink()
    write_tokenizer(files, tmp_path / "written")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "written")
    assert tokenizer("It's 1.")["input_ids"] == list(open_text(files).tokenizer.encode("It's 1."))
    assert tokenizer.chat_template is None


def test_nothing_is_overwritten(given_files, tmp_path):
    (tmp_path / "mine").write_text("text")
    with pytest.raises(ConfigError, match=r"is not empty; name a new directory"):
        write_tokenizer(given_files["gpt2"], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_broken_tokenizer_leaves_no_directory(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tokenizer.json").write_text("{")
    with pytest.raises(ModelFileError, match="is not a readable tokenizer"):
        write_tokenizer(HuggingFaceText(str(tmp_path / "source")), tmp_path / "written")
    assert not (tmp_path / "written").exists()


def test_the_settings_name_no_template_where_the_model_has_none(given_files, tmp_path):
    from dataclasses import replace

    write_tokenizer(replace(given_files["llama3"], chat_template=""), tmp_path / "written")
    assert "chat_template" not in json.loads((tmp_path / "written" / "tokenizer_config.json").read_text())
