"""What drawing requests must know of a model: its vocabulary in ids and texts, and what the engine makes of parameters.

Decides which of the model's texts are drawn from. Invariant: immutable, and the same for the same model.
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
from penstock.verify.subject import Subject

__all__ = ["Lexicon"]

_WORDS = 256
_LONGEST_WORD = 16


@dataclass(frozen=True, slots=True, eq=False)
class Lexicon:
    """Of one model.

    Attributes:
        vocab_size: token ids are drawn below it.
        words: some tokens' texts.
        ends: the model's end-of-sequence ids.
        terms: turns texts in parameters into ids, as at the engine's door.
        grammars: None where the model is asked for no forms.
    """

    vocab_size: int
    words: tuple[str, ...]
    ends: frozenset[int]
    terms: TokenIdResolver
    grammars: Grammars | None

    @classmethod
    def of(cls, subject: Subject) -> Lexicon:
        """That of a subject."""
        text, size = subject.text, subject.vocab_size
        terms = TokenIdResolver(text.tokenizer, size, DEFAULT_LIMITS)
        return cls(size, _words(text.tokenizer, size), text.eos_token_ids, terms, subject.grammars)

    def resolve(self, params: SamplingParams) -> SamplingSpec:
        """`params` as the runner is given them; what contradicts the rest, or this model, is left out."""
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
        """When such a request ends, the model's own ends included."""
        rules = params.stop_rules()
        ends = frozenset[int]() if rules.ignore_eos else self.ends
        return replace(rules, token_ids=tuple(sorted(ends.union(rules.token_ids))))

    def grammar(self, params: SamplingParams) -> Grammar | None:
        """The form that is asked for, where this model can be held to it."""
        grammar = params.grammar()
        if grammar is None or self.grammars is None:
            return None
        try:
            self.grammars.check(grammar, params.max_tokens or 0)
        except InvalidParameter:
            return None
        return grammar

    def thinking(self, params: SamplingParams, *, opened: bool) -> ThinkingBudget | None:
        """The bound on the reasoning, where nothing else that is asked stands against it."""
        contradicted = params.allowed_token_ids or params.bad_words or params.structured_outputs is not None
        if params.thinking_token_budget is None or contradicted:
            return None
        return ThinkingBudget(params.thinking_token_budget, opened)


def _words(tokenizer: Tokenizer, vocab_size: int) -> tuple[str, ...]:
    step = max(1, vocab_size // _WORDS)
    texts = (tokenizer.token_bytes(id_).decode(errors="ignore") for id_ in range(0, vocab_size, step))
    return tuple(dict.fromkeys(text for text in texts if 1 <= len(text) <= _LONGEST_WORD))
