"""Resolves an `EngineRequest`, in the caller's terms, into sequences of token ids, or refuses it with a reason.

Everything that a caller can get wrong is checked here, whichever front end it came through, before anything is copied
or queued. Resolution is pure but for two things drawn from outside: the seed of a random request that gave none, and
the arrival time. Safe to call from any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.contract.embedding import EmbeddingSpec, Pooling
from penstock.contract.errors import InvalidParameter, PromptTooLong
from penstock.contract.limits import RequestLimits
from penstock.contract.model import ModelCard
from penstock.contract.ports import Clock, Grammars, Tokenized
from penstock.contract.request import (
    ChatPrompt,
    EngineRequest,
    Prompt,
    SequenceRequest,
    StopRules,
    TextPrompt,
    TokenPrompt,
)
from penstock.contract.sampling import NEUTRAL, SamplingSpec
from penstock.contract.thinking import ThinkingBudget
from penstock.contract.tools import PLAIN_REPLY, ReasoningUse, ReplyRules
from penstock.engine.token_terms import TokenTerms
from penstock.text import ReasoningBudgets, ReplyReader, TextModel

__all__ = ["Intake", "ResolvedRequest"]


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """An ask that is ready to be scheduled: one request a choice, all of the same prompt.

    Attributes:
        prompt_text: the prompt as text, a conversation as its template wrote it; "" when it was given as token ids.
        answered: how many of the choices are answered; fewer than there are where the best of them are wanted.
        echo: as an `EngineRequest`'s.
        reader: what takes the answers apart; None when they are plain text.
    """

    id: str
    requests: tuple[SequenceRequest, ...]
    prompt_text: str
    answered: int
    echo: bool = False
    reader: ReplyReader | None = None

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt has; the choices share it."""
        return len(self.requests[0].prompt)


class Intake:
    """Resolves asks for one model. Immutable after construction.

    Args:
        draw_seed: gives a fresh seed for a random request that named none; from the operating system in production.
    """

    def __init__(
        self,
        text: TextModel,
        card: ModelCard,
        limits: RequestLimits,
        clock: Clock,
        draw_seed: Callable[[], int],
        policy: str,
        grammars: Grammars | None = None,
    ) -> None:
        self._text = text
        self._card = card
        self._limits = limits
        self._clock = clock
        self._draw_seed = draw_seed
        self._policy = policy
        self._token_terms = TokenTerms(text.tokenizer, card.vocab_size, limits)
        self._grammars = grammars
        self._thinking = ReasoningBudgets(text)

    def resolve(self, ask: EngineRequest) -> ResolvedRequest:
        """Render, tokenise, check and complete.

        Raises:
            RequestError: naming the field at fault.
        """
        self._check_limits(ask)
        prompt, prompt_text, field, reader = self._tokenise(ask)
        prompt = prompt[: ask.most_prompt_tokens or None]
        if ask.embedding is not None:
            return self._resolve_embedding(ask, ask.embedding, prompt, prompt_text, field)
        if len(prompt) >= self._card.max_model_len:
            raise PromptTooLong(len(prompt), self._card.max_model_len, param=field)
        self._check_prompt_scores(ask, len(prompt))
        rules = self._resolve_rules(ask.stop, len(prompt))
        self._check_grammar(ask, rules)
        sampling = _with_seed(self._token_terms.resolve(ask.sampling), self._draw_seed)
        if ask.candidates > ask.n and not sampling.has("logprobs"):
            sampling = sampling.put("logprobs", 0)  # what the choices are judged by
        template = SequenceRequest(
            id=ask.id,
            prompt=prompt,
            sampling=sampling,
            stop=rules,
            priority=ask.priority,
            tenant=ask.tenant,
            cache_salt=ask.cache_salt,
            arrival=self._clock.now(),
            grammar=ask.grammar,
            thinking=self._thinking_budget(ask, prompt, prompt_text, reader),
        )
        requests = tuple(replace(template, id=f"{ask.id}/{choice}", choice=choice) for choice in range(ask.candidates))
        if sampling.has("prompt_logprobs"):  # one of the choices is enough to score the prompt that they share
            others = sampling.without("prompt_logprobs")
            requests = (
                replace(requests[0], fresh_prompt=True),
                *(replace(request, sampling=others) for request in requests[1:]),
            )
        return ResolvedRequest(ask.id, requests, prompt_text, ask.n, ask.echo, reader)

    def _resolve_embedding(
        self, ask: EngineRequest, spec: EmbeddingSpec, prompt: tuple[int, ...], prompt_text: str, field: str
    ) -> ResolvedRequest:
        """As `resolve`, of a prompt that is to become a vector."""
        self._check_embedding(ask, spec)
        if len(prompt) > self._card.max_model_len:
            raise PromptTooLong(len(prompt), self._card.max_model_len, param=field, generates=False)
        request = SequenceRequest(
            id=f"{ask.id}/0",
            prompt=prompt,
            priority=ask.priority,
            tenant=ask.tenant,
            cache_salt=ask.cache_salt,
            arrival=self._clock.now(),
            fresh_prompt=spec.pooling is Pooling.MEAN,
            embedding=spec,
        )
        return ResolvedRequest(ask.id, (request,), prompt_text, answered=1)

    def tokenize(self, prompt: Prompt) -> Tokenized:
        """See `EngineClient.tokenize`."""
        token_ids, text, _, _ = self._tokenise(EngineRequest("", prompt))
        return Tokenized(token_ids, tuple(map(self._text.tokenizer.token_bytes, token_ids)), text)

    def detokenize(self, token_ids: tuple[int, ...]) -> str:
        """See `EngineClient.detokenize`."""
        return self._text.tokenizer.decode(self._check_ids(token_ids), skip_special_tokens=False)

    def _check_limits(self, ask: EngineRequest) -> None:
        limits = self._limits
        if not 1 <= ask.n <= limits.max_choices:
            raise InvalidParameter("n", f"must lie in 1..{limits.max_choices}, got {ask.n}")
        if not ask.n <= ask.candidates <= limits.max_choices:
            raise InvalidParameter("best_of", f"must lie in n..{limits.max_choices}, got {ask.best_of}")
        if len(ask.cache_salt) > limits.max_cache_salt_chars:
            raise InvalidParameter("cache_salt", f"must have at most {limits.max_cache_salt_chars} characters")
        if len(ask.stop.strings) > limits.max_stop_strings:
            raise InvalidParameter("stop", f"at most {limits.max_stop_strings} strings are allowed")
        if any(not 1 <= len(text) <= limits.max_stop_string_chars for text in ask.stop.strings):
            raise InvalidParameter("stop", f"a string must have 1..{limits.max_stop_string_chars} characters")
        if len(ask.stop.token_ids) > limits.max_stop_token_ids:
            raise InvalidParameter("stop_token_ids", f"at most {limits.max_stop_token_ids} ids are allowed")
        for name in ("max_tokens", "min_tokens"):
            if getattr(ask.stop, name) < 0:
                raise InvalidParameter(name, f"must not be negative, got {getattr(ask.stop, name)}")
        if ask.most_prompt_tokens < 0:
            raise InvalidParameter("truncate_prompt_tokens", f"must not be negative, got {ask.most_prompt_tokens}")
        if ask.priority and self._policy != "priority":
            raise InvalidParameter("priority", "needs an engine started with --scheduling-policy priority")

    def _check_embedding(self, ask: EngineRequest, spec: EmbeddingSpec) -> None:
        """Refuse what asks for text beside a vector, and a vector that this model does not have."""
        texts = {
            "n": ask.n != 1,
            "best_of": ask.best_of is not None,
            "sampling": ask.sampling != NEUTRAL,
            "stop": ask.stop != StopRules(),
            "echo": ask.echo,
            "structured_outputs": ask.grammar is not None,
            "thinking_token_budget": ask.thinking_token_budget is not None,
            "reply": ask.reply != PLAIN_REPLY,
        }
        for name, given in texts.items():
            if given:
                raise InvalidParameter(name, "means nothing where a prompt is embedded: no text is generated")
        if not 0 <= spec.dimensions <= self._card.hidden_size:
            raise InvalidParameter("dimensions", f"must lie in 1..{self._card.hidden_size}, got {spec.dimensions}")
        if ask.prompt == TextPrompt(""):
            raise InvalidParameter("prompt", "is empty: there is nothing to embed")

    def _check_prompt_scores(self, ask: EngineRequest, prompt_tokens: int) -> None:
        """Refuse prompt log probabilities that would be more than an answer may hold."""
        if not ask.sampling.has("prompt_logprobs"):
            return
        entries, most = prompt_tokens * (1 + ask.sampling.get("prompt_logprobs", 0)), self._limits.max_prompt_logprobs
        if entries * ask.n > most:
            message = (
                f"come to {entries} entries of {prompt_tokens} tokens for each of {ask.n} choices; at most {most} are"
                " allowed. Ask for fewer alternatives or choices."
            )
            raise InvalidParameter("prompt_logprobs", message)

    def _check_grammar(self, ask: EngineRequest, rules: StopRules) -> None:
        """Refuse a grammar that cannot be served, or that contradicts what else is asked."""
        if ask.grammar is None:
            return
        if self._grammars is None:
            raise InvalidParameter("structured_outputs", "is not served by this engine", code="unsupported_parameter")
        for name, given in (("ignore_eos", rules.ignore_eos), ("min_tokens", rules.min_tokens)):
            if given:
                raise InvalidParameter(name, "contradicts structured_outputs: an answer ends where its grammar ends")
        for name in ("allowed_token_ids", "bad_words"):
            if ask.sampling.has(name):
                raise InvalidParameter(name, "contradicts structured_outputs: the grammar says which tokens may come")
        self._grammars.check(ask.grammar, rules.max_tokens)

    def _thinking_budget(
        self, ask: EngineRequest, prompt: tuple[int, ...], prompt_text: str, reader: ReplyReader | None
    ) -> ThinkingBudget | None:
        """The bound on the reasoning; None where there is none, or none is needed: a guided answer does not think.

        Raises:
            InvalidParameter: the model does not think, or the closing tag might not be written.
        """
        if ask.thinking_token_budget is None:
            return None
        if ask.thinking_token_budget < 0:
            raise InvalidParameter("thinking_token_budget", f"must not be negative, got {ask.thinking_token_budget}")
        text = prompt_text or self._text.tokenizer.decode(prompt, skip_special_tokens=False)
        budget = self._thinking.make(ask.thinking_token_budget, ask.prompt, text, reader)
        for name in ("allowed_token_ids", "bad_words"):
            if ask.sampling.has(name):
                message = "contradicts thinking_token_budget, which must be able to write the end of the reasoning"
                raise InvalidParameter(name, message)
        return budget if ask.grammar is None else None

    def _tokenise(self, ask: EngineRequest) -> tuple[tuple[int, ...], str, str, ReplyReader | None]:
        """The prompt as token ids, as text, the name of the field that it came from, and what reads its answers."""
        match ask.prompt:
            case TokenPrompt(token_ids):
                return self._check_ids(token_ids), "", "prompt", None
            case TextPrompt(text):
                self._check_length(len(text), "prompt")
                return self._text.tokenizer.encode(text) or self._start_token(), text, "prompt", None
            case ChatPrompt() as chat:
                token_ids, reader = self._tokenise_chat(chat, _rules(ask))
                return token_ids, self._text.tokenizer.decode(token_ids, skip_special_tokens=False), "messages", reader

    def _tokenise_chat(self, chat: ChatPrompt, rules: ReplyRules) -> tuple[tuple[int, ...], ReplyReader | None]:
        if not 1 <= len(chat.messages) <= self._limits.max_messages:
            raise InvalidParameter("messages", f"must be 1..{self._limits.max_messages}, got {len(chat.messages)}")
        self._check_length(chat.num_chars, "messages")
        rendered = self._text.render(chat)
        return self._text.tokenizer.encode_chat(rendered), self._text.reply_reader(chat, rules, rendered)

    def _check_ids(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        if not token_ids:
            raise InvalidParameter("prompt", "must have at least one token id")
        for token_id in token_ids:
            if not 0 <= token_id < self._card.vocab_size:
                raise InvalidParameter(
                    "prompt", f"token id {token_id} lies outside the vocabulary (0..{self._card.vocab_size - 1})"
                )
        return token_ids

    def _check_length(self, chars: int, field: str) -> None:
        """Refuse a text that cannot fit whatever its tokens are, before spending time on tokenising it."""
        most = self._card.max_model_len * self._limits.max_prompt_chars_per_token
        if chars > most:
            raise InvalidParameter(
                field,
                f"has {chars} characters; a context of {self._card.max_model_len} tokens takes at most {most}",
                code="context_length_exceeded",
            )

    def _start_token(self) -> tuple[int, ...]:
        """What stands for an empty text: the beginning of a sequence, or, in models without one, the end of another."""
        if self._text.bos_token_id is not None:
            return (self._text.bos_token_id,)
        if self._text.eos_token_ids:
            return (min(self._text.eos_token_ids),)
        raise InvalidParameter("prompt", "is empty, and this model has no token to start from")

    def _resolve_rules(self, rules: StopRules, prompt_tokens: int) -> StopRules:
        room = self._card.max_model_len - prompt_tokens
        max_tokens = min(rules.max_tokens, room) if rules.max_tokens else room
        if rules.min_tokens > max_tokens:
            raise InvalidParameter(
                "min_tokens", f"{rules.min_tokens} is above what can be generated here ({max_tokens} tokens)"
            )
        for token_id in rules.token_ids:
            if not 0 <= token_id < self._card.vocab_size:
                raise InvalidParameter("stop_token_ids", f"{token_id} lies outside the vocabulary")
        ends = frozenset() if rules.ignore_eos else self._text.eos_token_ids
        token_ids = tuple(sorted(ends.union(rules.token_ids)))
        return replace(rules, max_tokens=max_tokens, token_ids=token_ids)


def _rules(ask: EngineRequest) -> ReplyRules:
    """How the answer is taken apart: a guided one holds no reasoning, though the template may have opened some."""
    return ask.reply if ask.grammar is None else replace(ask.reply, reasoning=ReasoningUse.INLINE)


def _with_seed(spec: SamplingSpec, draw_seed: Callable[[], int]) -> SamplingSpec:
    """`spec` with an explicit seed when its sampling is random, so that a replay draws the same."""
    if spec.get("temperature", 1.0) == 0 or spec.has("seed"):
        return spec
    return spec.put("seed", draw_seed())
