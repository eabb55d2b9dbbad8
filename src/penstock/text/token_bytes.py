"""The bytes that each token id stands for.

Decides how a vocabulary's spellings map to bytes, from the decoder that the tokenizer declares:

- byte-level BPE writes each byte as one printable character (GPT-2's table, Radford et al. 2019, `bytes_to_unicode`);
- SentencePiece writes a space as U+2581 and, with byte fallback, a lone byte as `<0xAB>`;
- WordPiece, used by encoders, marks every piece of a word but the first (`##`). The first stands for a space and
  itself. What was between words is lost, as are case and accents in uncased models, so decoded text only resembles the
  text that was encoded.

Added tokens are spelled plainly. Any other decoder is refused: its tokens are not bytes, so neither streaming nor
per-token logprobs could be exact.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from tokenizers import Tokenizer as Backend

from penstock.contract.errors import ModelFileError

__all__ = ["BYTE_OF_CHARACTER", "strips_leading_space", "token_byte_table"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


def _byte_of_character() -> dict[str, int]:
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


BYTE_OF_CHARACTER = _byte_of_character()
_BYTE_CHARACTERS = re.compile(f"[{re.escape(''.join(BYTE_OF_CHARACTER))}]*")
_LATIN_OF_CHARACTER = str.maketrans({character: chr(byte) for character, byte in BYTE_OF_CHARACTER.items()})


def token_byte_table(backend: Backend, file: str) -> tuple[bytes, ...]:
    """The bytes of every token, indexed by id; an id without a token has b"".

    Raises:
        ModelFileError: the decoder is of another kind, or the ids are too sparse to be real.
    """
    added = {id_: token.content for id_, token in backend.get_added_tokens_decoder().items()}
    spelled = {id_: token for token, id_ in backend.get_vocab(with_added_tokens=True).items()}
    to_bytes = _reading(_decoders(backend), file)
    size = max(spelled, default=-1) + 1
    if size > 16 * len(spelled) + 1024:
        raise ModelFileError(file, "model.vocab", f"has {len(spelled)} tokens but ids up to {size - 1}")
    return tuple(
        added[id_].encode() if id_ in added else to_bytes(spelled[id_]) if id_ in spelled else b""
        for id_ in range(size)
    )


def strips_leading_space(backend: Backend) -> bool:
    """Whether decoding a whole text drops its first space: SentencePiece's dummy prefix, or a WordPiece space."""
    for decoder in _decoders(backend):
        if decoder["type"] == "Strip" and decoder.get("content") == " " and decoder.get("start", 0) > 0:
            return True
        if decoder["type"] == "Metaspace" and decoder.get("prepend_scheme", "always") != "never":
            return True
        if decoder["type"] == "WordPiece":
            return True
    return False


def _reading(decoders: list[dict[str, Any]], file: str) -> Callable[[str], bytes]:
    """The function that turns a vocabulary's spellings into bytes."""
    by_type = {str(decoder["type"]): decoder for decoder in decoders}
    if "ByteLevel" in by_type:
        return _from_byte_level
    if "WordPiece" in by_type:
        return partial(_from_wordpiece, prefix=str(by_type["WordPiece"].get("prefix", "##")))
    if {"Metaspace", "Replace"} & by_type.keys():
        return _from_sentencepiece
    message = f"only byte-level BPE, SentencePiece and WordPiece are read, this is {list(by_type)}"
    raise ModelFileError(file, "decoder", message)


def _from_byte_level(token: str) -> bytes:
    if _BYTE_CHARACTERS.fullmatch(token):
        return token.translate(_LATIN_OF_CHARACTER).encode("latin-1")
    return token.encode()


def _from_sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte.group(1), 16)]) if byte else token.replace(_SPACE, " ").encode()


def _from_wordpiece(token: str, prefix: str) -> bytes:
    return (token.removeprefix(prefix) if token.startswith(prefix) else f" {token}").encode()


def _decoders(backend: Backend) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    state = backend.decoder.__getstate__()  # the decoder's own JSON, without the vocabulary that `to_str` would write
    declared: dict[str, Any] = json.loads(state)
    nested: list[dict[str, Any]] = declared["decoders"] if declared["type"] == "Sequence" else [declared]
    return nested
