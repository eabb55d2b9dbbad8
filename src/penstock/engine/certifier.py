"""Certifies the engine's answers: turns a request into the form that is certified, and collects its answer.

Decides which parts of a request its answer depends on. Left out is what only the caller sees: ids, tenants, priorities,
the scores of the prompt, and how many alternatives to a token are shown: log probabilities do not depend on that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

from penstock.certificates import (
    BadCertificate,
    Certificate,
    CertifiedChoice,
    CertifiedGrammar,
    CertifiedReply,
    CertifiedRequest,
    Trail,
    seal,
    write,
)
from penstock.contract.adapter import AdapterFacts
from penstock.contract.errors import ConfigError
from penstock.contract.events import ChoiceDelta, ChoiceFinished, FinishReason, Output, RequestFinished
from penstock.contract.grammar import Grammar
from penstock.contract.model import ModelCard
from penstock.contract.ports import Grammars
from penstock.contract.request import SequenceRequest
from penstock.contract.sampling import SamplingSpec, SamplingValue
from penstock.engine.certifying import Certifying
from penstock.engine.intake import ResolvedRequest
from penstock.sampling import PARAMETERS, Home
from penstock.text import TextModel

__all__ = ["WHOLE", "Certifier", "certified_request", "resolved_request"]

_SAMPLING = frozenset(each.field for each in PARAMETERS if each.home is Home.SPEC) - {"prompt_logprobs"}
WHOLE = frozenset({FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION, FinishReason.TOOL_CALLS})
"""The finish reasons of choices whose end follows from the request."""


class Certifier:
    """Collects the answer to one request, and certifies it at its end. Owned by the engine's step."""

    def __init__(self, certifying: Certifying, resolved: ResolvedRequest) -> None:
        self._contract = certifying.contract
        self._request = certified_request(resolved)
        self._tokens: list[list[int]] = [[] for _ in range(resolved.answered)]
        self._trails = [Trail() for _ in range(resolved.answered)]
        self._ends: dict[int, ChoiceFinished] = {}

    def take(self, output: Output) -> Output:
        """The output to pass on: the last one has the certificate, unless the request was aborted."""
        match output:
            case ChoiceDelta(choice, _, tokens):
                trail = self._trails[choice]
                for piece in tokens:
                    trail.add(piece.id, piece.logprob, piece.rank)
                self._tokens[choice] += [piece.id for piece in tokens]
            case ChoiceFinished(choice):
                self._ends[choice] = output
            case RequestFinished() if all(end.reason in WHOLE for end in self._ends.values()):
                return replace(output, certificate=write(self.certificate()).decode())
        return output

    def certificate(self) -> Certificate:
        """The certificate of an answer whose choices have all ended."""
        return seal(self._contract, self._request, tuple(map(self._choice, range(len(self._tokens)))))

    def _choice(self, index: int) -> CertifiedChoice:
        trail, end = self._trails[index], self._ends[index]
        return CertifiedChoice(
            tokens=tuple(self._tokens[index]),
            finish_reason=end.reason,
            stop=end.stop,
            marks=trail.marks,
            logprobs=trail.digest,
        )


def certified_request(resolved: ResolvedRequest) -> CertifiedRequest:
    """Everything that the answer to a request depends on beside the model."""
    first, reader = resolved.sequences[0], resolved.reader
    sampling = first.sampling.without("prompt_logprobs").put("logprobs", 0)
    return CertifiedRequest(
        prompt=first.prompt,
        choices=resolved.answered,
        candidates=len(resolved.sequences),
        sampling=dict(sampling.entries),
        stop=first.stop,
        grammar=None
        if first.grammar is None
        else CertifiedGrammar(kind=first.grammar.kind, source=first.grammar.source),
        thinking=first.thinking,
        reply=None if reader is None else CertifiedReply(tools=reader.tools, rules=reader.rules, opened=reader.opened),
        adapter=first.adapter_digest,
    )


def resolved_request(
    request: CertifiedRequest,
    request_id: str,
    text: TextModel,
    card: ModelCard,
    grammars: Grammars,
    adapters: Mapping[str, AdapterFacts],
) -> ResolvedRequest:
    """The request of a certificate, to be computed again. Anybody may have written it, so the model's limits apply.

    Args:
        request: the certified request.
        request_id: its id from now on.
        text: the model's text side.
        card: the model's card.
        grammars: checks its grammar.
        adapters: the adapters that are loaded.

    Raises:
        BadCertificate: the model cannot have been asked this.
        ConfigError: the model may have been asked this, by an engine with more room.
        RequestError: its grammar cannot be served.
    """
    _check(request, card)
    grammar, asked = None, request.grammar
    if asked is not None:
        grammar = grammars.check(Grammar(asked.kind, asked.source), request.stop.max_tokens)
    template = SequenceRequest(
        id=request_id,
        prompt=request.prompt,
        sampling=_sampling(request.sampling, card),
        stop=request.stop,
        grammar=grammar,
        thinking=request.thinking,
        adapter=_adapter(request.adapter, adapters),
        adapter_digest=request.adapter,
    )
    reply = request.reply
    return ResolvedRequest(
        id=request_id,
        sequences=tuple(
            replace(template, id=f"{request_id}/{choice}", choice=choice) for choice in range(request.candidates)
        ),
        prompt_text="",
        answered=request.choices,
        reader=None if reply is None else text.reply_reader_of(reply.tools, reply.rules, opened=reply.opened),
        certified=True,
    )


def _check(request: CertifiedRequest, card: ModelCard) -> None:
    """Make sure that a request's sizes and token ids suit the model."""
    if not 1 <= request.choices <= request.candidates:
        raise BadCertificate(f"it answers {request.choices} choices of {request.candidates}")
    if not request.prompt or request.stop.max_tokens < 1:
        raise BadCertificate(f"it has {len(request.prompt)} tokens, and generates up to {request.stop.max_tokens}")
    if (context := len(request.prompt) + request.stop.max_tokens) > card.max_model_len:
        message = f"needs a context of {context} tokens, and here it is {card.max_model_len} (--kv-cache-memory)"
        raise ConfigError("--certificate", message)
    for name, ids in (("prompt", request.prompt), ("stop", request.stop.token_ids)):
        _check_ids(name, ids, card)


def _check_ids(name: str, ids: tuple[int, ...], card: ModelCard) -> None:
    for token_id in ids:
        if not 0 <= token_id < card.vocab_size:
            raise BadCertificate(f"{name}: token id {token_id} lies outside the vocabulary (0..{card.vocab_size - 1})")


def _sampling(given: Mapping[str, SamplingValue], card: ModelCard) -> SamplingSpec:
    for name, value in given.items():
        if name not in _SAMPLING:
            raise BadCertificate(f"{name!r} is no sampling parameter of this release")
        if isinstance(value, tuple):
            flat = chain.from_iterable(each if isinstance(each, tuple) else (each,) for each in value)
            _check_ids(name, tuple(each for each in flat if isinstance(each, int)), card)
    return SamplingSpec(tuple(sorted(given.items())))


def _adapter(digest: str, adapters: Mapping[str, AdapterFacts]) -> str:
    if not digest:
        return ""
    found = [each.name for each in adapters.values() if each.digest == digest]
    if not found:
        raise BadCertificate(f"it was computed with the adapter {digest}, which is not loaded here (--lora)")
    return found[0]
