"""Tokenizers of encoders, in the structure of the published `tokenizer.json` files: BERT's and XLM-RoBERTa's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_vocabularies import CORPUS, reference
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from penstock.contract.model import HuggingFaceText
from penstock.text import TextModel, open_text

BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
XLM = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def wordpiece(*, lowercase: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        CORPUS[:9], trainers.WordPieceTrainer(vocab_size=300, special_tokens=list(BERT), show_progress=False)
    )
    return around(tokenizer, "[CLS]", "[SEP]")


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    metaspace = {"replacement": "▁", "prepend_scheme": "always"}
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(**metaspace)]
    )
    tokenizer.decoder = decoders.Metaspace(**metaspace)
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=list(XLM), unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS[:9], trainer)
    return around(tokenizer, "<s>", "</s>")


def around(tokenizer: Tokenizer, first: str, last: str) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[first, "$A", last],
        pair=[first, "$A", last, "$B", last],
        special_tokens=[(each, tokenizer.token_to_id(each)) for each in (first, last)],
    )
    tokenizer.enable_truncation(8)  # as all-MiniLM's file has it
    tokenizer.enable_padding(length=8)
    return tokenizer


MADE = {"uncased": lambda: wordpiece(lowercase=True), "cased": lambda: wordpiece(lowercase=False), "unigram": unigram}
ROLES = ("cls_token", "sep_token", "mask_token", "pad_token", "unk_token")


@pytest.fixture(scope="module", params=MADE)
def files(request, tmp_path_factory) -> HuggingFaceText:
    directory: Path = tmp_path_factory.mktemp(request.param)
    MADE[request.param]().save(str(directory / "tokenizer.json"))
    names = ("<s>", "</s>", "<mask>", "<pad>", "<unk>") if request.param == "unigram" else (*BERT[2:], *BERT[:2])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **dict(zip(ROLES, names, strict=True))}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
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
    for most in (3, 5, 30):
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
