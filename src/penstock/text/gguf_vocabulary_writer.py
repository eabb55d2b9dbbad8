"""Converts a Hugging Face tokenizer to GGUF metadata: the inverse of `gguf_tokenizer`.

Decides a pre-tokenizer's name in GGUF, and the types and scores of tokens. A tokenizer is written only if `read_gguf`
reads the same one back; otherwise it is refused, and the error names the part that would differ.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer as Backend

from penstock.contract.errors import ModelFileError
from penstock.contract.model import GgufVocabulary, HuggingFaceText
from penstock.text.gguf_tokenizer import END_NAMES, PRE_TOKENIZERS, VISIBLE_CONTROL, read_gguf
from penstock.text.huggingface import read_huggingface
from penstock.text.tokenizer_parts import TokenizerParts

__all__ = ["WrittenVocabulary", "vocabulary_of"]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_PREFERRED = ("gpt-2", "llama-bpe", "qwen2", "smollm", "tekken")
_SAMPLES = (
    "The quick brown fox's 1234567890 dogs don't; they'VE 3.14159 or 1,000,000!",
    "  leading,\ttabs\r\n\n\n and trailing  \u00a0\u2003 \n",
    "Grüße naïve e\u0301 é Русский 日本語 한국어 हिन्दी العربية 👩🏽‍🚀 \u200b\ufeff \0",
    "def f(x):\n    return x ** 2  # squared\n\t\tHTTPServerError snake_case",
    "\u2581 Ġ Ċ <0x41> <|not_a_token|> [INST",
    "",
    " ",
)


@dataclass(frozen=True, slots=True)
class WrittenVocabulary:
    """A tokenizer as a GGUF file stores it.

    Attributes:
        vocabulary: the vocabulary as it will be read back.
        metadata: the file's metadata, by key.
        left_out: what the file cannot express and what that changes, in words.
    """

    vocabulary: GgufVocabulary
    metadata: dict[str, Any]
    left_out: tuple[str, ...]


def vocabulary_of(text: HuggingFaceText, rows: int, *, embeds: bool = False) -> WrittenVocabulary:
    """Convert a directory's tokenizer to GGUF metadata.

    Args:
        text: the directory.
        rows: rows of the token embedding; tokens are padded to this number.
        embeds: whether the file will declare an embedding model.

    Raises:
        ModelFileError: GGUF cannot express the tokenizer.
    """
    parts = read_huggingface(text)
    facts = json.loads(parts.backend.to_str())
    model = facts["model"]
    if model["type"] != "BPE":
        raise ModelFileError(parts.file, "model.type", f"{model['type']} cannot be written as GGUF; BPE can")
    tokens, types = _tokens(parts, model, rows)
    add_bos, behind = _around(parts, embeds=embeds)
    eos = _main_eos(parts, tokens, types) if behind is None else behind
    vocabulary = GgufVocabulary(
        file=parts.file,
        model="llama" if model.get("byte_fallback") else "gpt2",
        pre="default" if model.get("byte_fallback") else _pre(parts.file, facts),
        tokens=tuple(tokens),
        token_types=tuple(types),
        merges=() if model.get("byte_fallback") else tuple(f"{left} {right}" for left, right in _merges(model)),
        scores=tuple(_scores(model, tokens)) if model.get("byte_fallback") else (),
        bos=parts.bos,
        eos=eos,
        unknown=_unknown(parts, model),
        add_bos=add_bos,
        add_eos=behind is not None,
        add_space_prefix=bool(model.get("byte_fallback")) and _prepends(facts["normalizer"]),
        chat_template=parts.template.source if parts.template else "",
    )
    again = read_gguf(vocabulary)
    if vocabulary.model == "llama" and add_bos and not _same_merges(facts, again):
        vocabulary = _as_gemma4(vocabulary, model)
        again = read_gguf(vocabulary)
    _check_same(parts, facts, again)
    return WrittenVocabulary(vocabulary, _metadata(vocabulary, parts), tuple(_left_out(parts, again, tokens)))


def _as_gemma4(vocabulary: GgufVocabulary, model: dict[str, Any]) -> GgufVocabulary:
    """The same vocabulary in the form of Gemma 4's files, which list their merges."""
    pairs = zip(vocabulary.tokens, vocabulary.token_types, strict=True)
    return replace(
        vocabulary,
        model="gemma4",
        pre="",
        token_types=tuple(_USER_DEFINED if token in VISIBLE_CONTROL else type_ for token, type_ in pairs),
        merges=tuple(f"{left} {right}" for left, right in _merges(model)),
        scores=(),
        add_space_prefix=False,
    )


def _tokens(parts: TokenizerParts, model: dict[str, Any], rows: int) -> tuple[list[str], list[int]]:
    by_id = {id_: token for token, id_ in parts.backend.get_vocab(with_added_tokens=True).items()}
    if max(by_id) >= rows:
        raise ModelFileError(parts.file, "vocab", f"has token {max(by_id)}, and the embedding has {rows} rows")
    added = parts.backend.get_added_tokens_decoder()
    tokens, types = [], []
    for id_ in range(rows):
        token = by_id.get(id_, f"[PAD{id_}]")
        tokens.append(token)
        if id_ not in by_id:
            types.append(_UNUSED)
        elif token == model.get("unk_token"):
            types.append(_UNKNOWN)
        elif id_ in added:
            types.append(_CONTROL if added[id_].special else _USER_DEFINED)
        elif model.get("byte_fallback") and len(token) == 6 and token.startswith("<0x"):
            types.append(_BYTE)
        else:
            types.append(_NORMAL)
    return tokens, types


def _merges(model: dict[str, Any]) -> list[tuple[str, str]]:
    """The left and right part of every merge; older files store both as one string."""
    pairs = (each.split(" ", 1) if isinstance(each, str) else each for each in model["merges"])
    return [(left, right) for left, right in pairs]


def _scores(model: dict[str, Any], tokens: list[str]) -> list[float]:
    """Scores that reproduce the merges' order: a token's score is minus the index of the first merge that makes it."""
    places: dict[str, int] = {}
    for place, (left, right) in enumerate(_merges(model)):
        places.setdefault(left + right, place)
    return [-float(places.get(token, len(places))) for token in tokens]


def _unknown(parts: TokenizerParts, model: dict[str, Any]) -> int:
    token = model.get("unk_token")
    id_ = parts.backend.token_to_id(token) if token is not None else None
    return -1 if id_ is None else id_


def _main_eos(parts: TokenizerParts, tokens: list[str], types: list[int]) -> int:
    """The end-of-sequence token that a reader could not recognise by name; else the tokenizer's own."""
    unnamed = [id_ for id_ in sorted(parts.eos) if types[id_] != _CONTROL or tokens[id_] not in END_NAMES]
    own = parts.backend.token_to_id(parts.special_tokens.get("eos_token", ""))
    if unnamed:
        return own if own in unnamed else unnamed[0]
    return own if own is not None else min(parts.eos, default=-1)


def _around(parts: TokenizerParts, *, embeds: bool) -> tuple[bool, int | None]:
    """Whether BOS is added before a text, and which token is added after it (None: no token).

    Raises:
        ModelFileError: other tokens are added, or a token is added after the text of a model that generates.
    """
    added = parts.backend.encode("", add_special_tokens=True).ids
    rest = added[1:] if added[:1] == [parts.bos] else added
    if len(rest) > embeds:
        raise ModelFileError(
            parts.file,
            "post_processor",
            f"puts tokens {added} around a text; GGUF can say only that a text begins with BOS, and for an embedding"
            " model that it ends with EOS",
        )
    return len(rest) < len(added), rest[0] if rest else None


def _pre(file: str, facts: dict[str, Any]) -> str:
    for name in _PREFERRED:
        family = PRE_TOKENIZERS[name]
        sample = Backend.from_str(json.dumps({**_EMPTY, "pre_tokenizer": None}))
        sample.pre_tokenizer = family.pre_tokenizer()
        cuts = json.loads(sample.to_str())["pre_tokenizer"]
        composed = {"type": "NFC"} if family.composed else None
        same_words = bool(facts["model"].get("ignore_merges")) == family.whole_words
        if (
            _plainly(cuts) == _plainly(facts["pre_tokenizer"])
            and _plainly(facts["normalizer"]) == composed
            and same_words
        ):
            return name
    raise ModelFileError(
        file, "pre_tokenizer", f"cuts text in a way that has no name here; known are {', '.join(_PREFERRED)}"
    )


_EMPTY: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {"type": "BPE", "vocab": {}, "merges": []},
}


def _plainly(part: Any) -> Any:
    """A part of a tokenizer without details that do not affect ids: offsets, and sequences of one."""
    if isinstance(part, list):
        return [_plainly(each) for each in part]
    if not isinstance(part, dict):
        return part
    inner = part.get("pretokenizers") or part.get("normalizers")
    if part.get("type") == "Sequence" and inner is not None and len(inner) == 1:
        return _plainly(inner[0])
    return {key: _plainly(value) for key, value in part.items() if key != "trim_offsets"}


def _prepends(normalizer: dict[str, Any] | None) -> bool:
    return normalizer is not None and '"Prepend"' in json.dumps(normalizer)


def _check_same(parts: TokenizerParts, facts: dict[str, Any], again: TokenizerParts) -> None:
    """Compare the tokenizer with what will be read back.

    Raises:
        ModelFileError: they differ.
    """
    if not _same_merges(facts, again):
        message = "are in an order that no scores of tokens can say; GGUF lists merges where BOS begins a text"
        raise ModelFileError(parts.file, "model.merges", message)
    read = json.loads(again.backend.to_str())
    if facts["model"].get("byte_fallback") and _plainly(read["normalizer"]) != _plainly(facts["normalizer"]):
        raise ModelFileError(parts.file, "normalizer", "changes text in a way that has no name in GGUF")
    added = " ".join(token.content for token in parts.backend.get_added_tokens_decoder().values())
    for sample in (*_SAMPLES, added):
        if parts.backend.encode(sample).ids != again.backend.encode(sample).ids:
            raise ModelFileError(
                parts.file, "", f"would be read from GGUF as another tokenizer: it encodes {sample[:40]!r} otherwise"
            )


def _same_merges(facts: dict[str, Any], again: TokenizerParts) -> bool:
    return _merges(json.loads(again.backend.to_str())["model"]) == _merges(facts["model"])


def _left_out(parts: TokenizerParts, again: TokenizerParts, tokens: list[str]) -> list[str]:
    lost = sorted(parts.eos - again.eos)
    words = [f"token {id_} {tokens[id_]!r} ends a text here, and will not in the file" for id_ in lost]
    if parts.tool_template is not None:
        words.append("the second chat template, for tools, has no place in the file")
    return words


def _metadata(vocabulary: GgufVocabulary, parts: TokenizerParts) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "model": vocabulary.model,
        "tokens": vocabulary.tokens,
        "token_type": vocabulary.token_types,
    }
    if vocabulary.pre:
        keys["pre"] = vocabulary.pre
    if vocabulary.scores:
        keys["scores"] = vocabulary.scores
    if vocabulary.merges:
        keys["merges"] = vocabulary.merges
    padding = parts.backend.token_to_id(parts.special_tokens.get("pad_token", ""))
    ids = {"bos": vocabulary.bos, "eos": vocabulary.eos, "unknown": vocabulary.unknown}
    ids |= {} if padding is None else {"padding": padding}
    keys |= {f"{name}_token_id": id_ for name, id_ in ids.items() if id_ >= 0}
    keys |= {"add_bos_token": vocabulary.add_bos, "add_eos_token": vocabulary.add_eos}
    if vocabulary.model != "gpt2":
        keys["add_space_prefix"] = vocabulary.add_space_prefix
    found = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return found | ({"tokenizer.chat_template": vocabulary.chat_template} if vocabulary.chat_template else {})
