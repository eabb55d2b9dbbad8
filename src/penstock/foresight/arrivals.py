"""A request that arrives at an engine, and what became of it: the same types for records and for simulations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from penstock.contract.plan import Draft
from penstock.contract.request import SequenceRequest

__all__ = ["Arrival", "Served"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and the time at which it arrives.

    Attributes:
        at: the arrival time, in seconds after the beginning of the workload.
        request: what the scheduler is given; its answer ends by `max_tokens` alone.
        answer: the first tokens of its answer, if they are known, because a later prompt may repeat them. Unknown
            tokens are made up and differ in each answer.
        patience: seconds after which its caller leaves if there is no token yet.
        offers: the drafts that a drafter offers, by the number of tokens of the answer drawn so far.
    """

    at: float
    request: SequenceRequest
    answer: tuple[int, ...] = ()
    patience: float = inf
    offers: Mapping[int, tuple[Draft, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a request. Times are in seconds after the beginning of the workload.

    Attributes:
        id: the id of its sequence.
        tenant: the tenant that it belongs to.
        arrived: when it arrived.
        begun: when the first step with a row of it was planned.
        times: when its tokens left the engine: one time for each step that yielded any.
        ended: when its end left the engine.
        prompt_tokens, cached_tokens: tokens of its prompt, and how many of these the prefix cache held.
        tokens: tokens of its answer.
    """

    id: str
    tenant: str
    arrived: float
    begun: float
    times: Sequence[float]
    ended: float
    prompt_tokens: int
    cached_tokens: int
    tokens: int

    @property
    def queued(self) -> float:
        """Seconds from its arrival until it began."""
        return self.begun - self.arrived

    @property
    def first_token(self) -> float:
        """Seconds from its arrival until its first token; until its end if it has no tokens, as for an embedding."""
        return (self.times[0] if self.times else self.ended) - self.arrived

    @property
    def gaps(self) -> list[float]:
        """Seconds between its tokens."""
        return [after - before for before, after in pairwise(self.times)]

    @property
    def end_to_end(self) -> float:
        """Seconds from its arrival until its end."""
        return self.ended - self.arrived
