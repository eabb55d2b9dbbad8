"""`SamplingParams`: how one request is sampled and when it stops, with vLLM's names and defaults.

The files in `penstock.sampling.parameters` decide types, ranges, defaults and meanings. Two rules across parameters are
checked here: `min_tokens` is at most `max_tokens`, and `n` at most `best_of`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

from penstock.contract.errors import InvalidParameter
from penstock.contract.grammar import Grammar
from penstock.contract.request import StopRules
from penstock.contract.sampling import SamplingSpec
from penstock.sampling.parameter import Home
from penstock.sampling.parameters import PARAMETERS
from penstock.sampling.parameters.dry_allowed_length import ALLOWED_LENGTH
from penstock.sampling.parameters.dry_base import BASE
from penstock.sampling.parameters.logprobs_mode import RAW
from penstock.sampling.parameters.temperature import GREEDY
from penstock.sampling.parameters.xtc_threshold import THRESHOLD

__all__ = ["SamplingParams"]

_NAMES = frozenset(parameter.name for parameter in PARAMETERS)
_Class = TypeVar("_Class", bound=type)


def _naming_what_is_unknown(cls: _Class) -> _Class:
    """Raise `InvalidParameter` for a misspelt keyword, as for any other mistake, and not a dataclass's TypeError."""
    plain = cls.__init__  # type: ignore[misc]

    @wraps(plain)
    def __init__(self: object, *arguments: object, **fields: object) -> None:  # noqa: N807
        _check_names(fields)
        plain(self, *arguments, **fields)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def _check_names(fields: Iterable[str]) -> None:
    for name in fields:
        if name not in _NAMES:
            near = difflib.get_close_matches(str(name), sorted(_NAMES), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InvalidParameter(str(name), f"is not a sampling parameter{hint}", code="unknown_parameter")


@_naming_what_is_unknown
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Validated sampling parameters. Equal meaning in equal form: numbers are floats or ints, lists are tuples.

    Attributes:
        n: number of completions to return.
        best_of: number to generate; the n with the highest mean log probability are returned.
        temperature: 0 always takes the most likely token.
        top_p: keeps the smallest set of the most likely tokens with at least this probability; 1 keeps all.
        top_k: keeps this many of the most likely tokens; 0 or -1 keeps all.
        min_p: keeps tokens at least this fraction as likely as the most likely one; 0 keeps all.
        seed: makes a random request repeatable.
        stop: texts that end the completion.
        stop_token_ids: token ids that end the completion.
        max_tokens: the most tokens to generate; None for the rest of the context.
        min_tokens: nothing stops the completion before it has this many tokens.
        ignore_eos: go on past the model's end-of-sequence ids.
        logprobs: number of alternatives returned with the log probability of each generated token; None for neither.
        include_stop_str_in_output: keep the stop string in the text.
        logprobs_mode: raw_logprobs or processed_logprobs.
        presence_penalty: lowers the logit of every token that was generated before.
        frequency_penalty: lowers the logit of a token once for each time that it was generated.
        repetition_penalty: makes tokens of the prompt and the output less likely; 1 is off.
        repeat_last_n: how many of the last tokens these three penalties consider; -1 for all.
        logit_bias: token id -> number added to its logit.
        allowed_token_ids: only these can be generated.
        bad_words: texts that cannot be generated.
        typical_p: keeps the tokens closest to the expected surprise with at least this probability; 1 keeps all.
        top_n_sigma: keeps tokens within this many standard deviations of the largest logit; 0 keeps all.
        xtc_probability: how often the most likely tokens are excluded.
        xtc_threshold: a token at least this probable counts as one of the most likely.
        dry_multiplier: strength of the penalty on word-for-word repetition; 0 is off.
        dry_base: growth of that penalty with each repeated token.
        dry_allowed_length: repetitions of fewer tokens have no penalty.
        dry_penalty_last_n: how many of the last tokens that penalty considers; -1 for all.
        dry_sequence_breakers: texts that interrupt a repetition.
        prompt_logprobs: as logprobs, for the tokens of the prompt.
        repetition_detection: sizes of a loop that ends the completion.
        structured_outputs: the form of the answer: an object with one of `json`, `regex`, `choice`, `grammar` and
            `json_object`, as in vLLM.
        thinking_token_budget: the most tokens of reasoning, for models that think; None sets no separate limit.

    Raises:
        InvalidParameter: naming the field that is unknown, or whose value has the wrong type or lies out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    logprobs_mode: str = RAW
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    repetition_penalty: float | None = 1.0
    repeat_last_n: int = -1
    logit_bias: Mapping[int, float] | Mapping[str, float] | Sequence[tuple[int, float]] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: str | Sequence[str] | None = None
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = THRESHOLD
    dry_multiplier: float = 0.0
    dry_base: float = BASE
    dry_allowed_length: int = ALLOWED_LENGTH
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: str | Sequence[str] | None = None
    prompt_logprobs: int | None = None
    repetition_detection: Mapping[str, int] | tuple[int, ...] | None = None
    structured_outputs: Grammar | Mapping[str, Any] | None = None
    best_of: int | None = None
    thinking_token_budget: int | None = None

    def __post_init__(self) -> None:
        for parameter in PARAMETERS:
            object.__setattr__(self, parameter.name, parameter.check(getattr(self, parameter.name)))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter("min_tokens", f"{self.min_tokens} is above max_tokens ({self.max_tokens})")
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidParameter("best_of", f"must be at least n ({self.n}), got {self.best_of}")

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> SamplingParams:
        """Build from decoded JSON.

        Raises:
            InvalidParameter: a name is not a sampling parameter, or a value is not valid.
        """
        _check_names(fields)
        return cls(**fields)

    def spec(self) -> SamplingSpec:
        """The parameters for the runner: those that are not neutral, without any that a greedy choice ignores."""
        greedy = self.temperature == GREEDY
        kept = (p for p in PARAMETERS if p.home is Home.SPEC and not (greedy and p.random_only))
        values = ((p, getattr(self, p.name)) for p in kept)
        return SamplingSpec(tuple((p.field, value) for p, value in values if value != p.neutral))

    def stop_rules(self) -> StopRules:
        """When the request ends; `max_tokens` None becomes 0, which the contract takes as the rest of the context."""
        rules = {p.field: getattr(self, p.name) for p in PARAMETERS if p.home is Home.STOP_RULES}
        rules["max_tokens"] = rules["max_tokens"] or 0
        return StopRules(**rules)

    def grammar(self) -> Grammar | None:
        """The form that the answer must have; None for free text."""
        given = self.structured_outputs
        assert given is None or isinstance(given, Grammar), "a checked value is in canonical form"
        return given
