"""A model's vocabulary as the automata see it: the bytes of each token, and which tokens end an answer.

Does not know how text is tokenised: endings are spelled by longest match, which works with any byte-level or
byte-fallback vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from penstock.contract.errors import InvalidParameter
from penstock.grammar.token_trie import TokenTrie
from penstock.thread_turns import wait_for_first

__all__ = ["Speller", "Vocabulary"]

_RUNS = ("[a-z ]{1,4}", "[a-z ]{1,8}", "[a-z ]{1,16}", "[a-z ]+", "[A-Za-z ]{1,16}", "[A-Za-z ]+")
"""Token classes whose masks are precomputed, in addition to those for JSON strings: where an expression accepts a whole
class, as in counted runs of letters, its tokens are not walked one by one. Masks are the same with or without them."""

_AT_ONCE = 64
"""Tokens of an ending that are checked per call: a call holds the GIL, and a long ending has thousands of tokens."""

_PARTS = re.compile(rb"[\x00-\x7f]+|[\x80-\xff]+")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model.

    Attributes:
        tokens: the bytes of each token by id; b"" for special tokens and for unused ids. Its length is
            the width of the logits.
        special: ids of tokens that are not text.
        eos: ids of tokens that end an answer.
    """

    tokens: tuple[bytes, ...]
    special: tuple[int, ...]
    eos: tuple[int, ...]


class Speller:
    """A vocabulary prepared for automata; immutable. Construction takes a fraction of a second.

    Raises:
        InvalidParameter: a printable ASCII character has no token of its own, or no token ends an answer.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.eos = vocabulary.eos
        numbered = reversed(list(enumerate(vocabulary.tokens)))  # if two tokens are the same byte, the lower id counts
        self.byte_ids = {token[0]: id_ for id_, token in numbered if len(token) == 1}
        if not vocabulary.eos or not set(range(0x20, 0x7F)) <= self.byte_ids.keys():
            message = "this model's vocabulary lacks single characters or an end-of-sequence token"
            raise InvalidParameter("structured_outputs", message, code="unsupported_model")
        self.backend = LLTokenizer(
            TokenizerWrapper(_Source(vocabulary, self.byte_ids)),
            n_vocab=len(vocabulary.tokens),
            eos_token=list(vocabulary.eos),
            slices=[*LLTokenizer.general_slices(), *_RUNS],
        )

    @cached_property
    def trie(self) -> TokenTrie:
        """The tokens as a trie; built on first use, which takes another fraction of a second."""
        return TokenTrie(self.tokens)

    def spell(self, text: bytes) -> list[int]:
        """Token ids whose bytes are `text`: longest match in ASCII, one token per byte elsewhere."""
        ids: list[int] = []
        for part in _PARTS.findall(text):
            ids += self.backend.greedy_tokenize(part.decode()) if part.isascii() else self.bytewise(part)
        return ids

    def bytewise(self, text: bytes) -> list[int]:
        """One token id per byte. Raises KeyError if the vocabulary has no token for a byte."""
        return [self.byte_ids[byte] for byte in text]

    def completes(self, matcher: LLMatcher, ids: Sequence[int]) -> bool:
        """Whether the document is complete after `ids`; does not modify `matcher`."""
        if not ids:  # an automaton that can only stop accepts no more tokens, not even eos
            return bool(matcher.is_accepting())
        *parts, last = (list(ids[start : start + _AT_ONCE]) for start in range(0, len(ids), _AT_ONCE))
        if parts:
            matcher = matcher.deep_copy()
        for part in parts:
            wait_for_first()
            if matcher.try_consume_tokens(part) != _AT_ONCE:
                return False
        return bool(matcher.validate_tokens([*last, self.eos[0]]) == len(last) + 1)


class _Source:
    """The tokenizer interface that llguidance expects."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, byte_ids: dict[int, int]) -> None:
        self.eos_token_id = vocabulary.eos[0]
        self.tokens = vocabulary.tokens
        self.special_token_ids = list(vocabulary.special)
        self._byte_ids = byte_ids

    def __call__(self, text: bytes | str) -> Sequence[int]:
        raw = text.encode() if isinstance(text, str) else text
        return [self._byte_ids[byte] for byte in raw if byte in self._byte_ids]
