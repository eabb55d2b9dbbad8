"""What drawing requests needs from a model: token ids, the texts of some tokens, parameters resolved as in the engine.

Invariant: immutable, and the same model gives the same value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.contract.errors import InvalidParameter
from penstock.contract.grammar import Grammar
from penstock.contract.limits import DEFAULT_LIMITS
from penstock.contract.ports import Grammars
from penstock.contract.request import StopRules
from penstock.contract.sampling import SamplingSpec
from penstock.contract.thinking import ThinkingBudget
from penstock.engine.token_id_resolver import TokenIdResolver
from penstock.sampling import SamplingParams
from penstock.text import Tokenizer
from penstock.verify.target import Target

__all__ = ["Vocab"]

_WORDS = 256
_LONGEST_WORD = 16


@dataclass(frozen=True, slots=True, eq=False)
class Vocab:
    """The vocabulary of one model.

    Attributes:
        vocab_size: token ids are drawn from `range(vocab_size)`.
        words: texts of some tokens, spread over the vocabulary.
        ends: the model's end-of-sequence ids.
        terms: turns texts in parameters into ids, as the engine does at admission.
        grammars: checks grammars; None if no request is to have one.
    """

    vocab_size: int
    words: tuple[str, ...]
    ends: frozenset[int]
    terms: TokenIdResolver
    grammars: Grammars | None

    @classmethod
    def of(cls, target: Target) -> Vocab:
        """The vocabulary of a target."""
        text, size = target.text, target.vocab_size
        terms = TokenIdResolver(text.tokenizer, size, DEFAULT_LIMITS)
        return cls(size, _words(text.tokenizer, size), text.eos_token_ids, terms, target.grammars)

    def resolve(self, params: SamplingParams) -> SamplingSpec:
        """`params` as the runner gets them, without parameters that contradict the others or this model."""
        spec = params.spec()
        if params.best_of is not None and not spec.has("logprobs"):
            spec = spec.put("logprobs", 0)
        while True:
            try:
                return self.terms.resolve(spec)
            except InvalidParameter as error:
                if not spec.has(error.param):
                    raise
                spec = spec.without(error.param)

    def rules(self, params: SamplingParams) -> StopRules:
        """The stop rules of a request with `params`, including the model's end-of-sequence ids."""
        rules = params.stop_rules()
        ends = frozenset[int]() if rules.ignore_eos else self.ends
        return replace(rules, token_ids=tuple(sorted(ends.union(rules.token_ids))))

    def grammar(self, params: SamplingParams) -> Grammar | None:
        """The grammar of the answer; None if there is none or this model cannot follow it."""
        grammar = params.grammar()
        if grammar is None or self.grammars is None:
            return None
        try:
            return self.grammars.check(grammar, params.max_tokens or 0)
        except InvalidParameter:
            return None

    def thinking(self, params: SamplingParams, *, opened: bool) -> ThinkingBudget | None:
        """The thinking budget; None if there is none or another parameter contradicts it."""
        contradicted = params.allowed_token_ids or params.bad_words or params.structured_outputs is not None
        if params.thinking_token_budget is None or contradicted:
            return None
        return ThinkingBudget(params.thinking_token_budget, opened)


def _words(tokenizer: Tokenizer, vocab_size: int) -> tuple[str, ...]:
    step = max(1, vocab_size // _WORDS)
    texts = (tokenizer.token_bytes(id_).decode(errors="ignore") for id_ in range(0, vocab_size, step))
    return tuple(dict.fromkeys(text for text in texts if 1 <= len(text) <= _LONGEST_WORD))
