"""The certificate as a value, and its only spelling as JSON text.

A text is a certificate if parsing and writing it gives the same bytes again, and if its digest matches the rest. So a
changed bit is found without a model, unless the digest was recomputed too; in that case, computing the answer again
gives a different answer.
"""

from __future__ import annotations

import hashlib
import re

import msgspec

from penstock.certificates.trail import MARK_CHARS
from penstock.contract.answer_contract import AnswerContract
from penstock.contract.events import FinishReason
from penstock.contract.grammar import GrammarKind
from penstock.contract.request import StopRules
from penstock.contract.sampling import SamplingValue
from penstock.contract.thinking import ThinkingBudget
from penstock.contract.tools import ReplyRules, Tool

__all__ = [
    "VERSION",
    "BadCertificate",
    "Certificate",
    "CertifiedChoice",
    "CertifiedGrammar",
    "CertifiedReply",
    "CertifiedRequest",
    "read",
    "seal",
    "write",
]

VERSION = 1
"""Incremented when a certificate's fields or their meaning change."""

_HEX = re.compile(r"[0-9a-f]*")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class BadCertificate(ValueError):
    """Raised when a text is not a certificate or was changed since it was made; the message says why."""


class CertifiedGrammar(msgspec.Struct, frozen=True, kw_only=True):
    """The form that each choice has; see `Grammar`."""

    kind: GrammarKind
    source: str


class CertifiedReply(msgspec.Struct, frozen=True, kw_only=True):
    """How the answer to a conversation is parsed; the parsing may end the answer.

    Attributes:
        opened: whether the prompt ends inside the reasoning.
    """

    tools: tuple[Tool, ...]
    rules: ReplyRules
    opened: bool


class CertifiedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A resolved request: everything that its answer depends on besides the model, and nothing else.

    Attributes:
        prompt: token ids.
        choices: how many choices the answer has.
        candidates: how many candidates are generated; the answer has the best of them.
        sampling: name -> value of each parameter that is not neutral; includes the seed whenever sampling is random.
        stop: the stop rules, resolved as in `SequenceRequest`.
        adapter: digest of its adapter; "" for none.
    """

    prompt: tuple[int, ...]
    choices: int
    candidates: int
    sampling: dict[str, SamplingValue]
    stop: StopRules
    grammar: CertifiedGrammar | None = None
    thinking: ThinkingBudget | None = None
    reply: CertifiedReply | None = None
    adapter: str = ""


class CertifiedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of the answer.

    Attributes:
        tokens: ids of the tokens that are part of the answer, without tokens that a stop string cut off.
        stop: the string or token id that ended it; None if the model's own end did, or if neither did.
        marks: see `Trail.marks`.
        logprobs: see `Trail.digest`.
    """

    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stop: str | int | None
    marks: str
    logprobs: str


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, and what it was computed from.

    Attributes:
        digest: SHA-256 of the certificate's text with "" in this place, as hex digits.
    """

    version: int
    contract: AnswerContract
    request: CertifiedRequest
    answer: tuple[CertifiedChoice, ...]
    digest: str


_encode = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.Decoder(Certificate).decode


def seal(contract: AnswerContract, request: CertifiedRequest, answer: tuple[CertifiedChoice, ...]) -> Certificate:
    """The certificate of an answer."""
    bare = Certificate(version=VERSION, contract=contract, request=request, answer=answer, digest="")
    return msgspec.structs.replace(bare, digest=_digest(bare))


def write(certificate: Certificate) -> bytes:
    """A certificate's only spelling: one line of JSON in UTF-8, keys in order, without the line's end."""
    return _encode(certificate)


def read(text: bytes) -> Certificate:
    """The certificate in a text, with or without the line's end.

    Raises:
        BadCertificate: the text is not a certificate, or was changed since it was made.
    """
    text = text.removesuffix(b"\n")
    try:
        found = _decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadCertificate(f"it is no certificate: {error}") from error
    if found.version != VERSION:
        raise BadCertificate(f"it is of version {found.version}; this release reads version {VERSION}")
    if _encode(found) != text:
        raise BadCertificate("it is not written as certificates are: a field, a number or a space was changed")
    if _digest(found) != found.digest:
        raise BadCertificate("its digest is not that of the rest: something in it was changed")
    _check_answer(found)
    return found


def _digest(certificate: Certificate) -> str:
    return hashlib.sha256(_encode(msgspec.structs.replace(certificate, digest=""))).hexdigest()


def _check_answer(certificate: Certificate) -> None:
    """Make sure that the answer has the form that the request calls for."""
    if len(certificate.answer) != certificate.request.choices:
        message = f"it has {len(certificate.answer)} choices, and its request asks for {certificate.request.choices}"
        raise BadCertificate(message)
    for index, choice in enumerate(certificate.answer):
        if len(choice.marks) != MARK_CHARS * len(choice.tokens) or not _HEX.fullmatch(choice.marks):
            raise BadCertificate(f"choice {index} has not {MARK_CHARS} hex digits of marks for each token")
        if not _DIGEST.fullmatch(choice.logprobs):
            raise BadCertificate(f"choice {index} has no SHA-256 of its log probabilities")
