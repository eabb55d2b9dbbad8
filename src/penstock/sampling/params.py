"""`SamplingParams`: how one request is sampled and when it stops, in vLLM's names and with vLLM's defaults.

Holds no rule of its own but one (`min_tokens` may not exceed `max_tokens`): types, ranges, defaults and meanings are
those of the files in `penstock.sampling.parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.contract.errors import InvalidParameter
from penstock.contract.grammar import Grammar
from penstock.contract.request import StopRules
from penstock.contract.sampling import SamplingSpec
from penstock.sampling.parameter import Home
from penstock.sampling.parameters import PARAMETERS
from penstock.sampling.parameters.temperature import GREEDY

__all__ = ["SamplingParams"]

_NAMES = frozenset(parameter.name for parameter in PARAMETERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Validated sampling parameters. Equal meaning in equal form: numbers are floats or ints, lists are tuples.

    Attributes:
        n: completions to generate from the one prompt.
        temperature: 0 always takes the likeliest token.
        top_p: smallest set of likeliest tokens with at least this probability; 1 takes all.
        top_k: this many likeliest tokens; 0 or -1 takes all.
        min_p: tokens at least this fraction as likely as the likeliest one; 0 takes all.
        seed: makes a random request repeatable.
        stop: up to 4 texts that end the completion.
        stop_token_ids: token ids that end the completion.
        max_tokens: most tokens to generate; None for the rest of the context.
        min_tokens: nothing stops the completion before it has this many tokens.
        ignore_eos: go on past the model's end-of-sequence ids.
        logprobs: 0 for the log probability of each generated token; None for none.
        include_stop_str_in_output: keep the stop string in the text.
        structured_outputs: the form of the answer: an object with one of `json`, `regex`, `choice`, `grammar` and
            `json_object`, as in vLLM.

    Raises:
        InvalidParameter: naming the field whose value has the wrong type or lies out of range.
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
    structured_outputs: Grammar | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for parameter in PARAMETERS:
            object.__setattr__(self, parameter.name, parameter.check(getattr(self, parameter.name)))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter("min_tokens", f"{self.min_tokens} is above max_tokens ({self.max_tokens})")

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> SamplingParams:
        """Build from decoded JSON.

        Raises:
            InvalidParameter: for a name that is no sampling parameter, or a value that is not valid.
        """
        for name in fields:
            if name not in _NAMES:
                raise InvalidParameter(str(name), "is not a sampling parameter", code="unknown_parameter")
        return cls(**fields)

    def spec(self) -> SamplingSpec:
        """What the runner must know: non-neutral parameters, less those that a greedy choice never reads."""
        greedy = self.temperature == GREEDY
        kept = (p for p in PARAMETERS if p.home is Home.SPEC and not (greedy and p.random_only))
        values = ((p, getattr(self, p.name)) for p in kept)
        return SamplingSpec(tuple((p.field, value) for p, value in values if value != p.neutral))

    def stop_rules(self) -> StopRules:
        """When the request ends; an absent `max_tokens` becomes 0, the contract's word for the rest of the context."""
        rules = {p.field: getattr(self, p.name) for p in PARAMETERS if p.home is Home.STOP_RULES}
        rules["max_tokens"] = rules["max_tokens"] or 0
        return StopRules(**rules)

    def grammar(self) -> Grammar | None:
        """The form that the answer must have."""
        given = self.structured_outputs
        assert given is None or isinstance(given, Grammar), "a checked value is in canonical form"
        return given
