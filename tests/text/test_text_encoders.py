"""Tokenizers of encoders: ids are transformers', and tokens are bytes as far as they can be."""

from __future__ import annotations

import pytest
from encoder_vocabularies import ENCODER_VOCABULARIES, write_vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st
from text_vocabularies import CORPUS, reference

from penstock.contract.model import HuggingFaceText
from penstock.text import TextModel, open_text


@pytest.fixture(scope="module", params=ENCODER_VOCABULARIES)
def files(request, tmp_path_factory) -> HuggingFaceText:
    directory = tmp_path_factory.mktemp(request.param)
    write_vocabulary(directory, request.param)
    return HuggingFaceText(str(directory))


@pytest.fixture(scope="module")
def model(files) -> TextModel:
    return open_text(files)


@pytest.fixture(scope="module")
def theirs(files):
    return reference(files)


def test_ids_equal_transformers_with_the_tokens_around_and_without_what_the_file_cuts(model, theirs):
    for text in (*CORPUS, "\n".join(CORPUS), "a [MASK] b <mask> c"):
        assert list(model.tokenizer.encode(text)) == theirs(text, truncation=False, padding=False)["input_ids"], text


@given(text=st.text(max_size=40))
@settings(max_examples=40, deadline=None)
def test_any_unicode_text_has_the_ids_of_transformers(text, model, theirs):
    assert list(model.tokenizer.encode(text)) == theirs(text, truncation=False, padding=False)["input_ids"]


def test_a_text_is_cut_between_the_tokens_around_it(model, theirs):
    for most in (3, 5, 12):
        expected = theirs(CORPUS[1], truncation=True, max_length=most, padding=False)["input_ids"]
        assert list(model.tokenizer.encode(CORPUS[1], most=most)) == expected
        assert len(expected) == most


def test_tokens_are_read_as_words_behind_spaces_and_their_further_pieces(model):
    tokenizer = model.tokenizer
    ids = tokenizer.encode("hello quick models")
    assert tokenizer.decode(ids) == "hello quick models"
    joined = b"".join(tokenizer.token_bytes(each) for each in ids if not tokenizer.is_special(each))
    assert joined == b" hello quick models"
    assert [tokenizer.is_special(ids[0]), tokenizer.is_special(ids[-1])] == [True, True]
