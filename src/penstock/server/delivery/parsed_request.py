"""The result of an endpoint's parser: the requests to the engine, and how to send the answer.

A body with several prompts becomes several engine requests but one answer. Knows nothing of JSON or HTTP.
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
        stream: whether to send the answer piece by piece.
        events: whether the pieces are events, which have ids, and not bare text.
        include_usage: whether a stream ends with a usage chunk.
        running_usage: whether every chunk before it has the usage so far.
        timings: whether the answer ends with its timings.
        prompt_logprobs: which log probabilities of its prompts a complete answer has; None for none.
        aliases: parameter name in errors -> the name that this caller used.
        prompt_fields: each prompt's field in the body, such as `input.3`; empty if all are called `prompt`.
        at_once: how many of the requests may be in the engine at once; the others follow, and also wait while the
            engine's queue is full. 0 submits all of them, and refuses the whole answer if the queue is full.
        concurrent: how many requests of its caller may be answered at once; 0 for no limit.
        user: the end user whom the caller names; "" for none.
        metadata: the caller's own labels.
        prompt_only: whether nothing is generated: the answer has no token beyond the prompts.
        model: the requested model name, which the answer repeats.
        created: Unix time at which the request first came.
        position: how much of a stream the client already has, as in an event's id; "" for nothing.
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
    def certified(self) -> bool:
        """Whether the answer ends with its certificate."""
        return self.requests[0].certified

    @property
    def num_choices(self) -> int:
        """Choices of the whole answer: choice j of prompt i has index `i * n + j`."""
        return sum(request.n for request in self.requests)
