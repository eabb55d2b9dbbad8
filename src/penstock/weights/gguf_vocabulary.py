"""The tokenizer stored in a GGUF file, as a value.

Decides which metadata keys it is read from, and checks their types and lengths. Does not know how to tokenise.
"""

from __future__ import annotations

from typing import Any

from penstock.contract.errors import ModelFileError
from penstock.contract.model import GgufVocabulary
from penstock.weights.embedding_config import embeds
from penstock.weights.gguf_header import GgufHeader

__all__ = ["read_vocabulary"]

_PREFIX = "tokenizer.ggml."
_NORMAL = 1


def read_vocabulary(header: GgufHeader, vocab_size: int) -> GgufVocabulary:
    """Read the vocabulary.

    Args:
        header: the file's header.
        vocab_size: rows of the token embedding; the vocabulary may not have more tokens.

    Raises:
        ModelFileError: a key is missing, has the wrong type or length, or names a token that does not exist.
    """
    reader = _Reader(header)
    tokens = reader.array("tokens", str, required=True)
    if not 1 <= len(tokens) <= vocab_size:
        raise reader.fail("tokens", f"{len(tokens)} tokens do not fit an embedding of {vocab_size} rows")
    model = reader.scalar("model", str, "")
    if not model:
        raise reader.fail("model", "is missing")
    # a WordPiece text is always enclosed in two tokens; older conversions store them under different keys
    between = model == "bert"
    bos, eos = (reader.token(f"{name}_token_id", len(tokens)) for name in ("bos", "eos"))
    if between:
        first, last = (reader.token(f"{name}_token_id", len(tokens)) for name in ("cls", "seperator"))
        bos, eos = (bos if first < 0 else first), (eos if last < 0 else last)
    types = reader.array("token_type", int) or (_NORMAL,) * len(tokens)
    scores = tuple(float(score) for score in reader.array("scores", float))
    for key, values in (("token_type", types), ("scores", scores)):
        if values and len(values) != len(tokens):
            raise reader.fail(key, f"has {len(values)} entries for {len(tokens)} tokens")
    return GgufVocabulary(
        file=str(header.path),
        model=model,
        pre=reader.scalar("pre", str, ""),
        tokens=tokens,
        token_types=types,
        merges=reader.array("merges", str),
        scores=scores,
        bos=bos,
        eos=eos,
        unknown=reader.token("unknown_token_id", len(tokens)),
        # llama.cpp's defaults where a file does not say: SentencePiece models begin with BOS and a dummy space;
        # Gemma 4 texts begin with BOS, whatever early conversions say
        add_bos=reader.scalar("add_bos_token", bool, model == "llama") or model == "gemma4" or between,
        add_space_prefix=reader.scalar("add_space_prefix", bool, model == "llama"),
        chat_template=reader.template(),
        # never append EOS to a generating model's prompt, whatever its file says
        add_eos=between or (embeds(header) and reader.scalar("add_eos_token", bool, False)),
    )


class _Reader:
    """Typed access to the tokenizer's keys; owned by one `read_vocabulary` call."""

    def __init__(self, header: GgufHeader) -> None:
        self._file = str(header.path)
        self._metadata = header.metadata

    def fail(self, key: str, message: str) -> ModelFileError:
        return ModelFileError(self._file, key if key.startswith("tokenizer.") else _PREFIX + key, message)

    def scalar(self, key: str, kind: type, default: Any) -> Any:
        value = self._metadata.get(_PREFIX + key, default)
        if type(value) is not kind:
            raise self.fail(key, f"must be of type {kind.__name__}, got {type(value).__name__}")
        return value

    def array(self, key: str, kind: type, *, required: bool = False) -> tuple[Any, ...]:
        values = self._metadata.get(_PREFIX + key)
        if values is None and not required:
            return ()
        if not isinstance(values, tuple) or any(type(value) is not kind for value in values):
            raise self.fail(key, f"must be an array of {kind.__name__}")
        return values

    def token(self, key: str, count: int) -> int:
        value = self.scalar(key, int, -1)
        if not -1 <= value < count:
            raise self.fail(key, f"{value} is no token id; there are {count} tokens")
        return int(value)

    def template(self) -> str:
        value = self._metadata.get("tokenizer.chat_template", "")
        if not isinstance(value, str):
            raise self.fail("tokenizer.chat_template", f"must be a string, got {type(value).__name__}")
        return value
