"""Resolves an `EngineRequest` into sequences of token ids, or refuses it with a reason.

Everything that a caller can get wrong is checked here, for every front end, before anything is copied or queued.
Resolution is pure except for two inputs: the seed of a random request without one, and the arrival time. Safe to call
from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from penstock.contract.adapter import AdapterFacts
from penstock.contract.embedding import EmbeddingSpec
from penstock.contract.errors import InvalidParameter, PromptTooLong, UnknownModel
from penstock.contract.grammar import JSON_OBJECT, Grammar
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
from penstock.engine.certifying import Certifying
from penstock.engine.token_id_resolver import TokenIdResolver
from penstock.text import ReasoningBudgets, ReplyReader, TextModel
from penstock.workers import Turns

__all__ = ["GIANT_CHARS", "Intake", "ResolvedRequest"]

GIANT_CHARS = 64 * 1024
"""A prompt of this many characters waits its turn to be tokenised, which takes tens of milliseconds or more."""
_GIANTS, _GIANTS_OF_A_KEY = 2, 1
_MOST_WAITING, _MOST_WAITING_OF_A_KEY = 64, 24
_WAIT_SECONDS = 60.0
"""Reached only if each waiting prompt takes seconds."""
_RETRY_SECONDS = 5

_NO_TEXT = "model_does_not_generate"


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A request that is ready to be scheduled: one sequence for each choice, all with the same prompt.

    Attributes:
        prompt_text: the prompt as text, or as the template rendered it; "" if it was given as token ids.
        answered: how many choices the caller gets; fewer than are generated with `best_of`.
        echo, max_seconds: as in `EngineRequest`.
        reader: parses answers into reasoning, text and calls; None if they are plain text.
        expected: for each choice, the tokens that its answer will probably begin with, for example those that a lost
            engine had generated; () if nothing is known. They are guessed first, and change no answer.
        certified: whether the answer comes with its certificate; all sequences then have log probabilities.
    """

    id: str
    sequences: tuple[SequenceRequest, ...]
    prompt_text: str
    answered: int
    echo: bool = False
    reader: ReplyReader | None = None
    max_seconds: float = 0.0
    expected: tuple[tuple[int, ...], ...] = ()
    certified: bool = False

    @property
    def prompt(self) -> tuple[int, ...]:
        """The token ids of the prompt, which all choices share."""
        return self.sequences[0].prompt

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt has."""
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of all sequences together."""
        return self.prompt_tokens * len(self.sequences)

    @property
    def tenant(self) -> str:
        """The tenant that sent it."""
        return self.sequences[0].tenant


class Intake:
    """Resolves requests for one model. Immutable after construction.

    Args:
        draw_seed: gives a fresh seed for a random request without one; from the operating system in production.
        adapters: gives the adapters that requests may name now.
        certifying: certifies answers; None if they cannot be certified.
        uncertified: why answers cannot be certified.
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
        adapters: Callable[[], Mapping[str, AdapterFacts]] = dict,
        certifying: Certifying | None = None,
        uncertified: str = "nothing is known of what computes it",
    ) -> None:
        self._certifying = certifying
        self._uncertified = uncertified
        self._text = text
        self._adapters = adapters
        self._card = card
        self._limits = limits
        self._clock = clock
        self._draw_seed = draw_seed
        self._policy = policy
        self._token_ids = TokenIdResolver(text.tokenizer, card.vocab_size, limits)
        self._grammars = grammars
        self._thinking = ReasoningBudgets(text)
        self._giants = Turns(
            "long prompts",
            places=_GIANTS,
            most_waiting=_MOST_WAITING,
            key_places=_GIANTS_OF_A_KEY,
            key_waiting=_MOST_WAITING_OF_A_KEY,
            wait_seconds=_WAIT_SECONDS,
            retry_after=_RETRY_SECONDS,
        )

    def resolve(self, request: EngineRequest) -> ResolvedRequest:
        """Render, tokenise, check and complete.

        Raises:
            RequestError: the request cannot be served; names the field at fault.
        """
        self._check_limits(request)
        adapter_digest = self._adapter_digest(request.adapter)
        if request.certified:
            self._check_certified(request)
        if request.embedding is None and not self._card.generates:
            raise InvalidParameter(
                "model", "only embeds: its tokens see later ones, so it cannot generate", code=_NO_TEXT
            )
        prompt, prompt_text, field, reader = self._tokenise(request)
        if request.embedding is not None:
            resolved = self._resolve_embedding(request, request.embedding, prompt, prompt_text, field)
            return _with_adapter(resolved, request.adapter, adapter_digest)
        if len(prompt) >= self._card.max_model_len:
            raise PromptTooLong(len(prompt), self._card.max_model_len, param=field)
        self._check_prompt_scores(request, len(prompt))
        rules = self._resolve_rules(self._stop_rules(request), len(prompt))
        grammar = self._check_grammar(request, rules)
        sampling = _with_seed(self._token_ids.resolve(request.sampling), request.drawn_seed, self._draw_seed)
        if (request.candidates > request.n or request.certified) and not sampling.has("logprobs"):
            sampling = sampling.put("logprobs", 0)  # best_of ranks by it, and a certificate has its hash
        template = SequenceRequest(
            id=request.id,
            prompt=prompt,
            sampling=sampling,
            stop=rules,
            priority=request.priority,
            tenant=request.tenant,
            share=request.share,
            cache_salt=request.cache_salt,
            arrival=self._clock.now(),
            grammar=grammar,
            thinking=self._thinking_budget(request, prompt, prompt_text, reader),
        )
        sequences = tuple(
            replace(template, id=f"{request.id}/{choice}", choice=choice) for choice in range(request.candidates)
        )
        if sampling.has("prompt_logprobs"):  # scoring the shared prompt once, in one choice, is enough
            others = sampling.without("prompt_logprobs")
            sequences = (
                replace(sequences[0], fresh_prompt=True),
                *(replace(sequence, sampling=others) for sequence in sequences[1:]),
            )
        shown = request.echo or request.running_usage
        resolved = ResolvedRequest(
            request.id,
            sequences,
            prompt_text,
            request.n,
            shown,
            reader,
            request.max_seconds,
            certified=request.certified,
        )
        return _with_adapter(resolved, request.adapter, adapter_digest)

    def _adapter_digest(self, name: str) -> str:
        """The digest of the adapter with this name; "" for no name.

        Raises:
            UnknownModel: there is no such adapter.
        """
        if not name:
            return ""
        known = self._adapters()
        if name not in known:
            raise UnknownModel(name, *self._card.names, *known)
        return known[name].digest

    def _check_certified(self, request: EngineRequest) -> None:
        """Refuse a certificate that cannot be given; else compute the contract, which is slow only the first time."""
        if request.embedding is not None:
            raise InvalidParameter("certificate", "is of generated tokens, and an embedding has none")
        if self._certifying is None:
            message = f"cannot be given here: {self._uncertified}"
            raise InvalidParameter("certificate", message, code="unsupported_parameter")
        _ = self._certifying.contract

    def _resolve_embedding(
        self, request: EngineRequest, spec: EmbeddingSpec, prompt: tuple[int, ...], prompt_text: str, field: str
    ) -> ResolvedRequest:
        """As `resolve`, for a request for the prompt's embedding."""
        self._check_embedding(request, spec)
        if len(prompt) > self._card.max_model_len:
            raise PromptTooLong(len(prompt), self._card.max_model_len, param=field, generates=False)
        sequence = SequenceRequest(
            id=f"{request.id}/0",
            prompt=prompt,
            priority=request.priority,
            tenant=request.tenant,
            share=request.share,
            cache_salt=request.cache_salt,
            arrival=self._clock.now(),
            fresh_prompt=not spec.pooling.takes_cached,
            embedding=spec,
        )
        return ResolvedRequest(request.id, (sequence,), prompt_text, answered=1, max_seconds=request.max_seconds)

    def tokenize(self, prompt: Prompt, tenant: str = "") -> Tokenized:
        """See `EngineClient.tokenize`."""
        token_ids, text, _, _ = self._tokenise(EngineRequest("", prompt, tenant=tenant))
        return Tokenized(token_ids, tuple(map(self._text.tokenizer.token_bytes, token_ids)), text)

    def detokenize(self, token_ids: tuple[int, ...]) -> str:
        """See `EngineClient.detokenize`."""
        return self._text.tokenizer.decode(self._check_ids(token_ids), skip_special_tokens=False)

    def _check_limits(self, request: EngineRequest) -> None:
        limits = self._limits
        if not 1 <= request.n <= limits.max_choices:
            raise InvalidParameter("n", f"must lie in 1..{limits.max_choices}, got {request.n}")
        if not request.n <= request.candidates <= limits.max_choices:
            raise InvalidParameter("best_of", f"must lie in n..{limits.max_choices}, got {request.best_of}")
        if len(request.cache_salt) > limits.max_cache_salt_chars:
            raise InvalidParameter("cache_salt", f"must have at most {limits.max_cache_salt_chars} characters")
        if len(request.stop.strings) > limits.max_stop_strings:
            raise InvalidParameter("stop", f"at most {limits.max_stop_strings} strings are allowed")
        if any(not 1 <= len(text) <= limits.max_stop_string_chars for text in request.stop.strings):
            raise InvalidParameter("stop", f"a string must have 1..{limits.max_stop_string_chars} characters")
        if len(request.stop.token_ids) > limits.max_stop_token_ids:
            raise InvalidParameter("stop_token_ids", f"at most {limits.max_stop_token_ids} ids are allowed")
        for name in ("max_tokens", "min_tokens"):
            if getattr(request.stop, name) < 0:
                raise InvalidParameter(name, f"must not be negative, got {getattr(request.stop, name)}")
        if request.most_prompt_tokens < 0:
            raise InvalidParameter("truncate_prompt_tokens", f"must not be negative, got {request.most_prompt_tokens}")
        if request.priority and self._policy != "priority":
            raise InvalidParameter("priority", "needs an engine started with --scheduling-policy priority")

    def _check_embedding(self, request: EngineRequest, spec: EmbeddingSpec) -> None:
        """Refuse a request that also wants text, or a vector longer than this model's."""
        for_text = {
            "n": request.n != 1,
            "best_of": request.best_of is not None,
            "sampling": request.sampling != NEUTRAL,
            "stop": request.stop != StopRules(),
            "echo": request.echo,
            "structured_outputs": request.grammar is not None,
            "thinking_token_budget": request.thinking_token_budget is not None,
            "reply": request.reply != PLAIN_REPLY,
        }
        for name, given in for_text.items():
            if given:
                raise InvalidParameter(name, "means nothing where a prompt is embedded: no text is generated")
        if not 0 <= spec.dimensions <= self._card.hidden_size:
            raise InvalidParameter("dimensions", f"must lie in 1..{self._card.hidden_size}, got {spec.dimensions}")
        if request.prompt == TextPrompt(""):
            raise InvalidParameter("prompt", "is empty: there is nothing to embed")

    def _check_prompt_scores(self, request: EngineRequest, prompt_tokens: int) -> None:
        """Refuse prompt log probabilities that would exceed the size of an answer."""
        if not request.sampling.has("prompt_logprobs"):
            return
        entries, most = (
            prompt_tokens * (1 + request.sampling.get("prompt_logprobs", 0)),
            self._limits.max_prompt_logprobs,
        )
        if entries * request.n > most:
            message = (
                f"come to {entries} entries of {prompt_tokens} tokens for each of {request.n} choices; at most {most}"
                " are allowed. Ask for fewer alternatives or choices."
            )
            raise InvalidParameter("prompt_logprobs", message)

    def _check_grammar(self, request: EngineRequest, rules: StopRules) -> Grammar | None:
        """The request's grammar after its check; refuses one that cannot be served or contradicts another field."""
        if request.grammar is None:
            return None
        if self._grammars is None:
            raise InvalidParameter("structured_outputs", "is not served by this engine", code="unsupported_parameter")
        for name, given in (("ignore_eos", rules.ignore_eos), ("min_tokens", rules.min_tokens)):
            if given:
                raise InvalidParameter(name, "contradicts structured_outputs: an answer ends where its grammar ends")
        for name in ("allowed_token_ids", "bad_words"):
            if request.sampling.has(name):
                raise InvalidParameter(name, "contradicts structured_outputs: the grammar says which tokens may come")
        if request.reply.form is None:
            return self._grammars.check(request.grammar, rules.max_tokens, request.tenant)
        self._grammars.check(request.reply.form, rules.max_tokens, request.tenant)
        try:
            return self._grammars.check(request.grammar, rules.max_tokens, request.tenant)
        except InvalidParameter as error:  # the response format alone can be served: the tools are at fault
            message = error.message.removeprefix(error.param).removeprefix(": ")
            raise InvalidParameter("tools", f"tools: {message}", code=error.code) from error

    def _thinking_budget(
        self, request: EngineRequest, prompt: tuple[int, ...], prompt_text: str, reader: ReplyReader | None
    ) -> ThinkingBudget | None:
        """The bound on the reasoning; None without one, or if none is needed because a guided answer does not think.

        Raises:
            InvalidParameter: the model does not think, or the closing tag might not be written.
        """
        if request.thinking_token_budget is None:
            return None
        if request.thinking_token_budget < 0:
            raise InvalidParameter(
                "thinking_token_budget", f"must not be negative, got {request.thinking_token_budget}"
            )
        text = prompt_text or self._text.tokenizer.decode(prompt, skip_special_tokens=False)
        budget = self._thinking.make(request.thinking_token_budget, request.prompt, text, reader)
        for name in ("allowed_token_ids", "bad_words"):
            if request.sampling.has(name):
                message = "contradicts thinking_token_budget, which must be able to write the end of the reasoning"
                raise InvalidParameter(name, message)
        return budget if request.grammar is None else None

    def _tokenise(self, request: EngineRequest) -> tuple[tuple[int, ...], str, str, ReplyReader | None]:
        """The prompt as token ids and as text, the name of its field, and the reader of its answers."""
        most = request.most_prompt_tokens
        match request.prompt:
            case TokenPrompt(token_ids):
                return self._check_ids(token_ids)[: most or None], "", "prompt", None
            case TextPrompt(text):
                self._check_length(len(text), "prompt")
                with self._turn(len(text), request.tenant):
                    token_ids = self._text.tokenizer.encode(text, most=most) or self._start_token()
                return token_ids, text, "prompt", None
            case ChatPrompt() as chat:
                token_ids, reader = self._tokenise_chat(chat, _rules(request), request.tenant)
                token_ids = token_ids[: most or None]
                return token_ids, self._text.tokenizer.decode(token_ids, skip_special_tokens=False), "messages", reader

    def _tokenise_chat(
        self, chat: ChatPrompt, rules: ReplyRules, tenant: str
    ) -> tuple[tuple[int, ...], ReplyReader | None]:
        if not 1 <= len(chat.messages) <= self._limits.max_messages:
            raise InvalidParameter("messages", f"must be 1..{self._limits.max_messages}, got {len(chat.messages)}")
        self._check_length(chat.num_chars, "messages")
        rendered = self._text.render(chat, tenant)
        with self._turn(len(rendered.text), tenant):
            token_ids = self._text.tokenizer.encode_chat(rendered)
        return token_ids, self._text.reply_reader(chat, rules, rendered)

    def _turn(self, chars: int, tenant: str) -> AbstractContextManager[None]:
        """A turn to tokenise a text; immediate for a short one."""
        return self._giants.turn(tenant) if chars >= GIANT_CHARS else nullcontext()

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
        """Refuse a text that is too long for any tokenisation, before spending time on it."""
        most = self._card.max_model_len * self._limits.max_prompt_chars_per_token
        if chars > most:
            raise InvalidParameter(
                field,
                f"has {chars} characters; a context of {self._card.max_model_len} tokens takes at most {most}",
                code="context_length_exceeded",
            )

    def _start_token(self) -> tuple[int, ...]:
        """The token used for an empty prompt: beginning of sequence, or end of sequence in models without one."""
        if self._text.bos_token_id is not None:
            return (self._text.bos_token_id,)
        if self._text.eos_token_ids:
            return (min(self._text.eos_token_ids),)
        raise InvalidParameter("prompt", "is empty, and this model has no token to start from")

    def _stop_rules(self, request: EngineRequest) -> StopRules:
        """The request's stop rules, bounded if any JSON object is allowed: a model may nest objects without end."""
        if JSON_OBJECT in (request.grammar, request.reply.form) and not request.stop.max_tokens:
            return replace(request.stop, max_tokens=self._limits.max_json_object_tokens)
        return request.stop

    def _resolve_rules(self, rules: StopRules, prompt_tokens: int) -> StopRules:
        max_new_tokens = self._card.max_model_len - prompt_tokens
        max_tokens = min(rules.max_tokens, max_new_tokens) if rules.max_tokens else max_new_tokens
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


def _with_adapter(resolved: ResolvedRequest, name: str, digest: str) -> ResolvedRequest:
    """The same request, computed with an adapter; unchanged if the name is ""."""
    if not name:
        return resolved
    sequences = tuple(replace(each, adapter=name, adapter_digest=digest) for each in resolved.sequences)
    return replace(resolved, sequences=sequences)


def _rules(request: EngineRequest) -> ReplyRules:
    """How the answer is parsed: a guided one holds no reasoning, even if the template opened some."""
    return request.reply if request.grammar is None else replace(request.reply, reasoning=ReasoningUse.INLINE)


def _with_seed(spec: SamplingSpec, drawn: int | None, draw_seed: Callable[[], int]) -> SamplingSpec:
    """`spec` with an explicit seed if its sampling is random, so that a replay draws the same tokens."""
    if spec.get("temperature", 1.0) == 0 or spec.has("seed"):
        return spec
    return spec.put("seed", draw_seed() if drawn is None else drawn)
