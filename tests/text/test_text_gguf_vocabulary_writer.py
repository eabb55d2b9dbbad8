"""A directory's tokenizer as GGUF's metadata: read again it is the same, and what GGUF cannot express is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from text_vocabularies import CORPUS, FAMILIES, GEMMA4, save, to_gguf

from penstock.contract.errors import ModelFileError
from penstock.text import open_text
from penstock.text.gguf_tokenizer import read_gguf
from penstock.text.gguf_vocabulary_writer import vocabulary_of
from penstock.text.huggingface import read_huggingface


@pytest.mark.parametrize("name", [*FAMILIES, "llama", "gemma4"])
def test_a_tokenizer_read_from_gguf_again_is_the_directorys(tmp_path, name):
    files = save(name, tmp_path)
    written = vocabulary_of(files, 700)
    ours, theirs = open_text(written.vocabulary), open_text(files)
    for text in CORPUS:
        assert list(ours.tokenizer.encode(text)) == list(theirs.tokenizer.encode(text)), text
    assert read_gguf(written.vocabulary).eos >= read_huggingface(files).eos
    assert written.vocabulary.chat_template == to_gguf(name, files).chat_template
    assert len(written.vocabulary.tokens) == 700
    assert written.left_out == ()


@pytest.mark.parametrize("name", [*FAMILIES, "gemma4"])
def test_the_words_are_those_of_the_converters(tmp_path, name):
    files = save(name, tmp_path)
    theirs = to_gguf(name, files)
    ours = vocabulary_of(files, len(theirs.tokens)).vocabulary
    assert (ours.model, ours.pre, ours.tokens, ours.merges) == (theirs.model, theirs.pre, theirs.tokens, theirs.merges)
    assert (ours.bos, ours.eos, ours.add_bos) == (theirs.bos, theirs.eos, theirs.add_bos)
    if name != "gemma4":
        assert ours.token_types == theirs.token_types
        return
    differing = {
        ours.tokens[place]: types for place, types in enumerate(zip(ours.token_types, theirs.token_types, strict=True))
    }
    differing = {token: types for token, types in differing.items() if types[0] != types[1]}
    assert differing == {
        "<unk>": (2, 3),
        "\n\n": (4, 1),
        "\n\n\n": (4, 1),
    }  # ours say what the tokenizer does with them


def test_gemma_4s_control_tokens_and_ends_stay_so(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5, 8]}))
    files = save("gemma4", tmp_path)
    for vocabulary in (vocabulary_of(files, 700).vocabulary, to_gguf("gemma4", files)):
        ours, theirs = open_text(vocabulary), open_text(files)
        assert ours.eos_token_ids == theirs.eos_token_ids == {1, 5, 8}
        assert {id_ for id_ in range(700) if ours.tokenizer.is_special(id_)} == set(range(len(GEMMA4)))
        ids = ours.tokenizer.encode("".join(GEMMA4) + "a\n\n\n\nb")
        assert ours.tokenizer.decode(ids) == theirs.tokenizer.decode(ids) == "a\n\n\n\nb"


def test_merges_that_no_scores_say_need_a_text_that_begins_with_bos(tmp_path):
    files = save("gemma4", tmp_path)
    change(tmp_path, post_processor=None)
    with pytest.raises(ModelFileError, match=r"model\.merges: are in an order .*; GGUF lists merges where BOS begins"):
        vocabulary_of(files, 700)


def change(directory: Path, **parts: object) -> None:
    file = directory / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | parts))


def test_what_gguf_has_no_words_for_is_refused_by_name(tmp_path):
    files = save("qwen2", tmp_path)
    with pytest.raises(ModelFileError, match="the embedding has 10 rows"):
        vocabulary_of(files, 10)
    change(tmp_path, normalizer={"type": "NFKC"})
    with pytest.raises(ModelFileError, match="pre_tokenizer: cuts text in a way that has no name"):
        vocabulary_of(files, 700)
    change(tmp_path, model={"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}, added_tokens=[])
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelFileError, match=r"model.type: WordLevel cannot be written"):
        vocabulary_of(files, 700)


def test_tokens_that_end_a_text_and_have_no_place_are_named(tmp_path):
    files = save("smollm", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6, 2]}))
    written = vocabulary_of(files, 700)
    assert written.vocabulary.eos == 5, "a reader knows <|im_end|> by its name"
    assert written.left_out == (f"token 6 {written.vocabulary.tokens[6]!r} ends a text here, and will not in the file",)
