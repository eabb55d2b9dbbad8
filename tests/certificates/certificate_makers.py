"""Certificates of answers that no model gave, for tests of the certificate alone."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.certificates import (
    Certificate,
    CertifiedChoice,
    CertifiedGrammar,
    CertifiedReply,
    CertifiedRequest,
    Trail,
    seal,
)
from penstock.contract.answer_contract import AnswerContract
from penstock.contract.events import FinishReason
from penstock.contract.grammar import GrammarKind
from penstock.contract.request import StopRules
from penstock.contract.thinking import ThinkingBudget
from penstock.contract.tools import ReplyRules, Tool, ToolUse

CONTRACT = AnswerContract(
    model="5e" * 32,
    form="bf16",
    dtype="bfloat16",
    kv_cache_dtype="bfloat16",
    max_model_len=0,
    tokenizer="7a" * 32,
    tool_call_parser="auto",
    reasoning_parser="auto",
    instruction_set="avx512_bf16",
    kernels="c0" * 16,
    penstock="0.1.0, 1",
    torch="2.9.1+cpu, AVX512",
)
REQUEST = CertifiedRequest(
    prompt=(1, 4093, 20),
    choices=2,
    candidates=3,
    sampling={"logit_bias": ((3, -1.5), (9, 2.0)), "logprobs": 0, "seed": 7, "temperature": 1.25},
    stop=StopRules(max_tokens=3, token_ids=(2,), strings=("\n\n", "Ende ü")),
    grammar=CertifiedGrammar(kind=GrammarKind.REGEX, source='[a-z"\\\\]+'),
    thinking=ThinkingBudget(tokens=5, opened=True, spelled=(8, 9)),
    reply=CertifiedReply(
        tools=(Tool("look", '{"type":"function"}', "{}"),), rules=ReplyRules(tool_use=ToolUse.AUTO), opened=False
    ),
    adapter="ad" * 8,
)


def choice(tokens: Sequence[int], logprobs: Sequence[float], **changed) -> CertifiedChoice:
    trail = Trail()
    for token, logprob in zip(tokens, logprobs, strict=True):
        trail.add(token, logprob, 1)
    told = {"finish_reason": FinishReason.LENGTH, "stop": None} | changed
    return CertifiedChoice(tokens=tuple(tokens), marks=trail.marks, logprobs=trail.digest, **told)


ANSWER = (
    choice([5, 6, 7], [-0.5, -0.25, -3.0]),
    choice([5, 2], [-0.5, -1.0], finish_reason=FinishReason.STOP, stop="Ende ü"),
)


def certificate() -> Certificate:
    return seal(CONTRACT, REQUEST, ANSWER)
