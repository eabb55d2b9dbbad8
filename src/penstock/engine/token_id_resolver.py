"""Resolves sampling parameters that name tokens: turns texts into token ids, and checks ids against the vocabulary.

Decides which token sequences spell a text. Knows the tokenizer and the parameters' names, not what they do. Safe to
call from any thread.
"""

from __future__ import annotations

from functools import lru_cache

from penstock.contract.errors import InvalidParameter
from penstock.contract.limits import RequestLimits
from penstock.contract.sampling import SamplingSpec
from penstock.sampling.parameters.dry_sequence_breakers import BREAKERS
from penstock.text import Tokenizer

__all__ = ["TokenIdResolver"]

_REMEMBERED_TEXTS = 256


class TokenIdResolver:
    """Resolves sampling specifications for one model. Immutable except for a bounded cache of looked-up texts."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, limits: RequestLimits) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._limits = limits
        self._tokens_with = lru_cache(_REMEMBERED_TEXTS)(tokenizer.tokens_with)

    def resolve(self, spec: SamplingSpec) -> SamplingSpec:
        """`spec` with every token given as an id of this model.

        Raises:
            InvalidParameter: a parameter has an id outside the vocabulary or too many texts, or forbids every token.
        """
        self._check_ids(spec)
        if spec.has("bad_words"):
            spec = self._with_bad_words(spec)
        if spec.has("dry_multiplier"):
            texts = spec.get("dry_sequence_breakers", BREAKERS)
            breakers = frozenset[int]().union(*map(self._tokens_with, texts))
            spec = spec.put("dry_sequence_breakers", tuple(sorted(breakers)))
        return spec

    def _check_ids(self, spec: SamplingSpec) -> None:
        no_biases: tuple[tuple[int, float], ...] = ()
        no_ids: tuple[int, ...] = ()
        biased = (token for token, _ in spec.get("logit_bias", no_biases))
        for name, tokens in (("logit_bias", biased), ("allowed_token_ids", spec.get("allowed_token_ids", no_ids))):
            for token in tokens:
                if not 0 <= token < self._vocab_size:
                    message = f"token id {token} lies outside the vocabulary (0..{self._vocab_size - 1})"
                    raise InvalidParameter(name, message)

    def _with_bad_words(self, spec: SamplingSpec) -> SamplingSpec:
        no_texts: tuple[str, ...] = ()
        texts = spec.get("bad_words", no_texts)
        words = {ids for text in texts for ids in self._tokenizer.spellings(text, param="bad_words")}
        if sum(map(len, words)) > self._limits.max_bad_word_tokens:
            message = f"come to more than {self._limits.max_bad_word_tokens} tokens in all their spellings"
            raise InvalidParameter("bad_words", message)
        no_ids: tuple[int, ...] = ()
        allowed = frozenset(spec.get("allowed_token_ids", no_ids))
        if allowed and allowed <= {ids[0] for ids in words if len(ids) == 1}:
            raise InvalidParameter("bad_words", "rules out everything that allowed_token_ids allows")
        return spec.put("bad_words", tuple(sorted(words)))
