"""Turns token ids into text as they arrive: never half a character, and special tokens only on request.

Works on bytes: each token adds its bytes to an incremental UTF-8 decoder, which returns complete characters. So a push
costs the length of one token, whatever came before. Bytes that can no longer become a character turn into U+FFFD as the
Unicode standard advises (section 3.9, substitution of maximal subparts).

Does not know stop strings. Invariant: all pushes and the flush, joined, are the UTF-8 decoding of the tokens' bytes.
Tokens are decoded as a continuation: every leading space that the model wrote stays, including the very first, whereas
`Tokenizer.decode` treats its ids as a whole text and drops SentencePiece's dummy prefix. A character that the prompt
began belongs to the text that completes it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from penstock.text.tokenizer import Tokenizer

__all__ = ["Detokenizer"]

_UTF8 = codecs.getincrementaldecoder("utf-8")
_REACH = 3  # an unfinished character has at most three bytes, so it began at most three tokens ago


class Detokenizer:
    """Decodes one sequence. Owned by the code that streams that sequence; not shared between threads.

    Args:
        skip_special_tokens: leave control tokens out of the text instead of spelling them.
        spelled: control tokens that are spelled in any case.
        prompt: the ids that the tokens continue; only the last 3 are used.
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
        """Add a token; return the characters that it completes, "" while a character is incomplete."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id) and token_id not in self._spelled:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """End the text; return U+FFFD for a character that stayed incomplete, else ""."""
        return self._decoder.decode(b"", final=True)
