"""Builds a tokenizer from GGUF metadata (keys `tokenizer.ggml.*` of the GGUF specification).

Decides which pre-tokenizer a name stands for. GGUF stores only the name, so it must be known here: a guess would give
wrong ids without any error. The expressions are facts of the model families, as in their published `tokenizer.json`.

Token types: control and unknown tokens become special tokens, user-defined ones become added tokens that are ordinary
text; all others are found by merging alone. Gemma 4's files differ in two ways. llama.cpp's call parser needs to see
seven control tokens, so the files type them as user-defined: `VISIBLE_CONTROL` are control tokens whatever their type.
And its converter types added tokens of the vocabulary as normal: runs of newlines that no merge makes are added tokens.

WordPiece files mark the first piece of a word with U+2581, and do not say whether text is lower-cased before it is cut;
it is lower-cased if no normal token has a capital letter.

End-of-sequence tokens are the file's own `eos` and every control token named in `END_NAMES`: files often name only one,
but a chat model ends a turn with one and a document with another (Llama 3: `<|eot_id|>` and `<|end_of_text|>`). A name
is trusted only if the file types the token as control. `<|end|>` is not in the list: it ends a turn in Phi-3, but only
a channel elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from penstock.contract.errors import ModelFileError
from penstock.contract.model import GgufVocabulary
from penstock.text.tokenizer_parts import TemplateSource, TokenizerParts

__all__ = ["END_NAMES", "PRE_TOKENIZERS", "VISIBLE_CONTROL", "read_gguf"]

END_NAMES = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
    *("<|return|>", "<|call|>"),  # gpt-oss, whose `<|end|>` does not end a turn
    *("<eos>", "<turn|>", "<|tool_response>"),  # Gemma, which hands over to a tool with the last one
)
VISIBLE_CONTROL = frozenset(
    ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>')
)
"""Control tokens of Gemma 4 that its files type as user-defined (llama.cpp, `conversion/gemma.py`)."""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _split(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    return lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


@dataclass(frozen=True, slots=True)
class _Family:
    """How one family of byte-level BPE cuts text before merging.

    Attributes:
        whole_words: a piece that is itself a token is taken whole, without merging up to it (tiktoken's rule).
        composed: text is normalised to NFC first.
    """

    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    whole_words: bool = False
    composed: bool = False


_GPT2_FAMILY = _Family(_byte_level)
_LLAMA3_FAMILY = _Family(_split(_LLAMA3), whole_words=True)

PRE_TOKENIZERS = {
    "gpt-2": _GPT2_FAMILY,
    "gpt2": _GPT2_FAMILY,
    "llama-bpe": _LLAMA3_FAMILY,
    "llama-v3": _LLAMA3_FAMILY,
    "llama3": _LLAMA3_FAMILY,
    "qwen2": _Family(_split(_QWEN2), composed=True),
    "smollm": _Family(_digits_then_byte_level),
    "tekken": _Family(_split(_TEKKEN), whole_words=True),
}


def read_gguf(vocabulary: GgufVocabulary) -> TokenizerParts:
    """Build the tokenizer that the metadata describes.

    Raises:
        ModelFileError: an unknown tokenizer or pre-tokenizer, or metadata that contradicts itself.
    """
    _check(vocabulary)
    backend = _MODELS[vocabulary.model](vocabulary)
    _add_tokens(backend, vocabulary)
    if vocabulary.add_bos or vocabulary.add_eos:
        _put_around(backend, vocabulary)
    template = TemplateSource(vocabulary.chat_template, vocabulary.file, "tokenizer.chat_template")
    return TokenizerParts(
        file=vocabulary.file,
        backend=backend,
        special_tokens=_special_tokens(vocabulary),
        bos=vocabulary.bos,
        eos=_eos(vocabulary),
        template=template if vocabulary.chat_template else None,
    )


def _refuse(vocabulary: GgufVocabulary, key: str, message: str) -> ModelFileError:
    return ModelFileError(vocabulary.file, f"tokenizer.ggml.{key}", message)


def _check(vocabulary: GgufVocabulary) -> None:
    count = len(vocabulary.tokens)
    if vocabulary.model not in _MODELS:
        known = ", ".join(sorted(_MODELS))
        raise _refuse(vocabulary, "model", f"{vocabulary.model!r} is not implemented; known are {known}")
    if vocabulary.model == "gemma4" and not vocabulary.merges:
        raise _refuse(vocabulary, "merges", "is missing")
    if vocabulary.model == "bert" and vocabulary.unknown < 0:
        raise _refuse(vocabulary, "unknown_token_id", "is missing")
    if len(vocabulary.token_types) != count:
        raise _refuse(vocabulary, "token_type", f"has {len(vocabulary.token_types)} entries for {count} tokens")
    if vocabulary.model == "llama" and len(vocabulary.scores) != count:
        raise _refuse(vocabulary, "scores", f"has {len(vocabulary.scores)} entries for {count} tokens")
    if vocabulary.model == "gpt2" and vocabulary.pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise _refuse(vocabulary, "pre", f"unknown pre-tokenizer {vocabulary.pre!r}; known are {known}")
    ids = {"bos_token_id": vocabulary.bos, "eos_token_id": vocabulary.eos, "unknown_token_id": vocabulary.unknown}
    for key, id_ in ids.items():
        if not -1 <= id_ < count:
            raise _refuse(vocabulary, key, f"{id_} is no token id: there are {count} tokens")
    if vocabulary.add_bos and vocabulary.bos < 0:
        raise _refuse(vocabulary, "add_bos_token", "is true, but there is no bos_token_id")
    if vocabulary.add_eos and vocabulary.eos < 0:
        raise _refuse(vocabulary, "add_eos_token", "is true, but there is no eos_token_id")


def _spellings(vocabulary: GgufVocabulary) -> list[str]:
    if vocabulary.model == "bert":
        return [_piece(*each) for each in zip(vocabulary.tokens, vocabulary.token_types, strict=True)]
    if vocabulary.model != "llama":
        return list(vocabulary.tokens)
    # Added tokens are matched in the raw text, where a space is a space.
    types = vocabulary.token_types
    pairs = zip(vocabulary.tokens, types, strict=True)
    return [token.replace(_SPACE, " ") if type_ == _USER_DEFINED else token for token, type_ in pairs]


def _ids(vocabulary: GgufVocabulary) -> dict[str, int]:
    ids: dict[str, int] = {}
    for id_, token in enumerate(_spellings(vocabulary)):
        if token in ids:
            raise _refuse(vocabulary, "tokens", f"tokens {ids[token]} and {id_} are both {token!r}")
        ids[token] = id_
    return ids


def _byte_level_bpe(vocabulary: GgufVocabulary) -> Backend:
    family = PRE_TOKENIZERS[vocabulary.pre]
    ids = _ids(vocabulary)
    merges = [_merge(vocabulary, ids, index, merge) for index, merge in enumerate(vocabulary.merges)]
    backend = Backend(models.BPE(vocab=ids, merges=merges, ignore_merges=family.whole_words))
    if family.composed:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = family.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend


def _merge(vocabulary: GgufVocabulary, ids: dict[str, int], index: int, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right and left in ids and right in ids and left + right in ids):
        raise _refuse(vocabulary, "merges", f"merge {index}, {merge!r}, does not join two tokens into a third")
    return left, right


def _sentencepiece(vocabulary: GgufVocabulary) -> Backend:
    unknown = vocabulary.tokens[vocabulary.unknown] if vocabulary.unknown >= 0 else None
    ids = _ids(vocabulary)
    merges = _merges_from_scores(vocabulary, ids)
    backend = Backend(models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    plain: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.add_space_prefix:
        spaces.insert(0, normalizers.Prepend(_SPACE))
        plain.append(decoders.Strip(content=" ", left=1))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(plain)
    return backend


def _gemma4(vocabulary: GgufVocabulary) -> Backend:
    """SentencePiece's alphabet and byte fallback, with a list of merges applied to the whole text."""
    unknown = vocabulary.tokens[vocabulary.unknown] if vocabulary.unknown >= 0 else None
    ids = _ids(vocabulary)
    merges = [_merge(vocabulary, ids, index, merge) for index, merge in enumerate(vocabulary.merges)]
    backend = Backend(models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", _SPACE)
    backend.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    made = {left + right for left, right in merges}
    runs = [token for token in vocabulary.tokens if len(token) > 1 and not token.strip("\n") and token not in made]
    backend.add_tokens([AddedToken(run, normalized=False) for run in runs])
    return backend


def _wordpiece(vocabulary: GgufVocabulary) -> Backend:
    ids = _ids(vocabulary)
    backend = Backend(models.WordPiece(vocab=ids, unk_token=_spellings(vocabulary)[vocabulary.unknown]))
    pairs = zip(vocabulary.tokens, vocabulary.token_types, strict=True)
    cased = any(token != token.lower() for token, type_ in pairs if type_ == _NORMAL)
    backend.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def _piece(token: str, type_: int) -> str:
    """A `bert` file's token, as spelled in `vocab.txt`."""
    if type_ == _CONTROL:
        return token
    return token.removeprefix(_SPACE) if token.startswith(_SPACE) else f"##{token}"


_MODELS: dict[str, Callable[[GgufVocabulary], Backend]] = {
    "gpt2": _byte_level_bpe,
    "llama": _sentencepiece,
    "gemma4": _gemma4,
    "bert": _wordpiece,
}
"""The builder for each value of `tokenizer.ggml.model`."""


def _merges_from_scores(vocabulary: GgufVocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece's rule as a list of merges: join the neighbours whose union scores highest (Kudo, Richardson 2018).

    Every way to cut a token into two tokens is a merge. Equal scores are ordered as in the published `tokenizer.json`
    files of such models: longer left part first, then longer right part, then the lower id.
    """
    ranked = [
        (-vocabulary.scores[id_], -cut, cut - len(token), id_)
        for id_, token in enumerate(vocabulary.tokens)
        if vocabulary.token_types[id_] == _NORMAL
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    cuts = [(vocabulary.tokens[id_], -minus_cut) for _, minus_cut, _, id_ in sorted(ranked)]
    return [(token[:cut], token[cut:]) for token, cut in cuts]


def _add_tokens(backend: Backend, vocabulary: GgufVocabulary) -> None:
    texts = list(zip(_spellings(vocabulary), vocabulary.token_types, strict=True))
    special = {text: None for text, type_ in texts if text and _is_special(vocabulary, text, type_)}
    ordinary = [text for text, type_ in texts if type_ == _USER_DEFINED and text and text not in special]
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    backend.add_tokens([AddedToken(text, normalized=False) for text in ordinary])


def _is_special(vocabulary: GgufVocabulary, text: str, type_: int) -> bool:
    return type_ in (_CONTROL, _UNKNOWN) or (vocabulary.model == "gemma4" and text in VISIBLE_CONTROL)


def _put_around(backend: Backend, vocabulary: GgufVocabulary) -> None:
    """Add BOS before a text and EOS after it, as the file says."""
    # The names differ from the spellings, which may contain a colon: the template notation gives the colon a meaning.
    ids = {"bos": vocabulary.bos} if vocabulary.add_bos else {}
    before, after = list(ids), ["eos"] if vocabulary.add_eos else []
    ids |= {"eos": vocabulary.eos} if vocabulary.add_eos else {}
    special = [{"id": name, "ids": [id_], "tokens": [vocabulary.tokens[id_]]} for name, id_ in ids.items()]
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after], pair=[*before, "$A", "$B", *after], special_tokens=special
    )


def _special_tokens(vocabulary: GgufVocabulary) -> dict[str, str]:
    ids = {"bos_token": vocabulary.bos, "eos_token": vocabulary.eos, "unk_token": vocabulary.unknown}
    return {name: vocabulary.tokens[id_] for name, id_ in ids.items() if id_ >= 0}


def _eos(vocabulary: GgufVocabulary) -> frozenset[int]:
    pairs = enumerate(zip(vocabulary.tokens, vocabulary.token_types, strict=True))
    named = {id_ for id_, (token, type_) in pairs if token in END_NAMES and _is_special(vocabulary, token, type_)}
    return frozenset(named | ({vocabulary.eos} - {-1}))
