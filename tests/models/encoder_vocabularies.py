"""Small tokenizers of encoders, in the structure of the published `tokenizer.json` files: BERT's and XLM-RoBERTa's."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

__all__ = ["ENCODER_TEXTS", "ENCODER_VOCABULARIES", "write_vocabulary"]

ENCODER_TEXTS = (
    "Hello, world! It's the model's 1st answer: we'll see, they'VE said.",
    "The quick brown fox jumps over the lazy dog. 1234567890 and 3.14159 or 1,000,000.",
    "Grüße aus Zürich; naïve café, Ελληνικά και Русский текст. Ünïcödé é vs e\u0301.",
    "日本語のテキスト、中文字符 한국어 문장입니다",
    "words  between\twide   spaces\n and [brackets] <angles>",
)

BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
XLM = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def wordpiece(*, lowercase: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        ENCODER_TEXTS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=list(BERT), show_progress=False)
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
    tokenizer.train_from_iterator(ENCODER_TEXTS, trainer)
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


ENCODER_VOCABULARIES = {
    "uncased": lambda: wordpiece(lowercase=True),
    "cased": lambda: wordpiece(lowercase=False),
    "unigram": unigram,
}
"""What makes each, by name."""

_ROLES = ("cls_token", "sep_token", "mask_token", "pad_token", "unk_token")


def write_vocabulary(directory: Path, name: str) -> int:
    """Write the tokenizer of this name; returns how many tokens it has."""
    tokenizer = ENCODER_VOCABULARIES[name]()
    tokenizer.save(str(directory / "tokenizer.json"))
    names = ("<s>", "</s>", "<mask>", "<pad>", "<unk>") if name == "unigram" else (*BERT[2:], *BERT[:2])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **dict(zip(_ROLES, names, strict=True))}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer.get_vocab_size()
