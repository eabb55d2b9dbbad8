"""What an endpoint's parser makes of a body: the requests to the engine, and how the answer is to be sent.

A body with several prompts becomes several engine requests and still one answer. Knows no JSON and no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.api_fields.prompt_logprobs import PromptLogprobs
from penstock.contract.request import EngineRequest

__all__ = ["ParsedRequest"]

NO_ALIASES: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request as its endpoint understood it.

    Attributes:
        id: the answer's id; the ids of the engine requests begin with it.
        requests: one for each prompt, all with the same `n`.
        stream: whether to answer piece by piece.
        events: whether the pieces are events, which have ids, and not bare text.
        include_usage: whether a stream ends with a usage chunk.
        running_usage: whether every chunk before it holds the tokens so far.
        timings: whether the answer ends with its timings.
        prompt_logprobs: which log probabilities of its prompts a whole answer holds; None for none.
        aliases: parameter name in errors -> the name that this caller used.
        prompt_fields: where each prompt stands in the body, such as `input.3`; empty where all are called `prompt`.
        at_once: how many of the requests may be in the engine at the same time; the others follow, and wait too where
            the engine's queue is full. 0 submits all of them, and refuses the whole answer if the queue is full.
        concurrent: how many requests of its caller may be answered at once; 0 for any number.
        user: on whose behalf it comes, by the caller's own word; "" for nobody.
        metadata: labels of the caller's own.
        prompt_only: nothing is to be generated: the answer has no token beyond the prompts.
        model: the name that the request asked for, which the answer repeats.
        created: Unix time at which the request came first.
        position: how much of a stream the client has already, as an event's id says it; "" for nothing.
    """

    id: str
    requests: tuple[EngineRequest, ...]
    stream: bool = False
    events: bool = True
    include_usage: bool = False
    running_usage: bool = False
    timings: bool = False
    prompt_logprobs: PromptLogprobs | None = None
    aliases: Mapping[str, str] = field(default_factory=lambda: NO_ALIASES)
    prompt_fields: tuple[str, ...] = ()
    at_once: int = 0
    concurrent: int = 0
    model: str = ""
    user: str = ""
    metadata: Mapping[str, str] = field(default_factory=lambda: NO_ALIASES)
    prompt_only: bool = False
    created: int = 0
    position: str = ""

    @property
    def num_choices(self) -> int:
        """Choices of the whole answer: choice j of prompt i has index `i * n + j`."""
        return sum(request.n for request in self.requests)
