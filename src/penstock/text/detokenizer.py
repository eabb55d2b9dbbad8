"""Token ids to text while they arrive: never half a character, never a special token.

Works on bytes: each token adds its bytes to an incremental UTF-8 decoder, which gives back the characters that are
complete. So a push costs the length of one token, whatever came before. Bytes that can no longer become a character
turn into U+FFFD as the Unicode standard advises (section 3.9, substitution of maximal subparts).

Does not know stop strings. Invariant: all pushes and the flush, joined, are the UTF-8 decoding of the tokens' bytes.
The tokens are read as a continuation: a leading space that the model wrote stays, also the first of all, unlike in
`Tokenizer.decode`, which takes its ids for a whole text and drops SentencePiece's dummy prefix. A character that the
prompt began belongs to the text that completes it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from penstock.text.tokenizer import Tokenizer

__all__ = ["Detokenizer"]

_UTF8 = codecs.getincrementaldecoder("utf-8")
_REACH = 3  # an unfinished character has at most three bytes, so it began at most three tokens ago


class Detokenizer:
    """One sequence's text so far. Owned by whoever streams that sequence; not shared between threads.

    Args:
        skip_special_tokens: leave control tokens out of the text instead of spelling them.
        spelled: control tokens that are spelled all the same.
        prompt: what the tokens continue; only its last ones are looked at.
    """

    __slots__ = ("_decoder", "_skip_special_tokens", "_spelled", "_tokenizer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        spelled: frozenset[int] = frozenset(),
        prompt: Sequence[int] = (),
    ) -> None:
        self._spelled = spelled
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = _UTF8(errors="replace")
        for token_id in prompt[-_REACH:]:
            self._decoder.decode(tokenizer.token_bytes(token_id))

    @property
    def unfinished(self) -> bool:
        """Whether the last bytes begin a character that is not complete."""
        return bool(self._decoder.getstate()[0])

    def push(self, token_id: int) -> str:
        """Take one more token; the characters that it completed, "" while a character is incomplete."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id) and token_id not in self._spelled:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """End the text: U+FFFD for a character that stayed incomplete, else ""."""
        return self._decoder.decode(b"", final=True)
