"""What an engine shows of its inside to whoever looks: its latest steps, its prefix cache as a tree, tenants' shares.

Counts and times only: no text, no token, no key of a block, no id of a request.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from penstock.contract.plan import StallReason

__all__ = [
    "NO_PREFIXES",
    "NO_STEPS",
    "EngineViews",
    "OwnPart",
    "PrefixNode",
    "PrefixTree",
    "RecentSteps",
    "StepStall",
    "StepView",
    "TenantShare",
]


class StepStall(NamedTuple):
    """Why the head of the queue was not admitted in a step: it needed `need`, and there were `have`."""

    reason: StallReason
    need: int
    have: int


class OwnPart(NamedTuple):
    """The part that one request had in a step.

    Attributes:
        decode: seconds of the step's `decode`, by its share of the positions of rows that decode.
        prompts: seconds that its chunks took, and what it read from the store.
        positions: that its rows computed or read.
    """

    decode: float
    prompts: float
    positions: int


class StepView(NamedTuple):
    """One step that was computed.

    Attributes:
        step: its number.
        at: when its result came, in seconds by the engine's clock.
        decode: seconds that rows took which decode.
        prompts: seconds that chunks of prompts took.
        drafting: seconds of the draft model.
        restored: seconds that reading stored blocks took.
        engine: seconds since the step before, or since it was planned, in which the runner was not busy.
        foreseen: seconds that `decode` and `prompts` were expected to take together; 0.0 while nothing was known.
        decoding: rows that decode.
        drafted: positions of guessed tokens in these rows.
        chunk: positions of prompts.
        read: positions that were read from the store.
        waiting: sequences that still waited after it was planned.
        stall: why the first of these was not admitted; None if none waited.
        own: the part of the request that was asked for; None if none was.
    """

    step: int
    at: float
    decode: float
    prompts: float
    drafting: float
    restored: float
    engine: float
    foreseen: float
    decoding: int
    drafted: int
    chunk: int
    read: int
    waiting: int
    stall: StepStall | None
    own: OwnPart | None = None


class RecentSteps(NamedTuple):
    """The latest steps, the eldest first.

    Attributes:
        cut: of a request's steps: whether earlier ones are forgotten.
    """

    steps: tuple[StepView, ...]
    cut: bool = False


class PrefixNode(NamedTuple):
    """Some cached blocks in a row, which nothing branches off between.

    Attributes:
        parent: index of the node that it continues; -1 for none, or one that is cached no more.
        start: positions before it.
        blocks: how many.
        held: how many of these running sequences hold.
        hits: how often an admission found its first block.
        hit_tokens: positions that all its blocks have spared so far.
        idle: admissions since any of its blocks was sealed or found.
        below: blocks below it, those of nodes included that are not told.
    """

    parent: int
    start: int
    blocks: int
    held: int
    hits: int
    hit_tokens: int
    idle: int
    below: int


class PrefixTree(NamedTuple):
    """The prefix cache as a tree of prefixes.

    Attributes:
        block_size: positions of a block.
        blocks: all that can be found.
        nodes: those with most blocks in and below them; each comes after its parent.
        left_out: blocks of the other nodes.
    """

    block_size: int
    blocks: int
    nodes: tuple[PrefixNode, ...]
    left_out: int


class TenantShare(NamedTuple):
    """What a tenant has of the engine.

    Attributes:
        tenant: its name; see `SequenceRequest.tenant`.
        share: what it is entitled to, relative to others; see `SequenceRequest.share`.
        running: its sequences that hold a slot.
        waiting: its sequences that do not.
        waiting_tokens: tokens of these.
        tokens: tokens computed for it since the start: of prompts, without what was cached, and of answers.
    """

    tenant: str
    share: float
    running: int
    waiting: int
    waiting_tokens: int
    tokens: int


NO_STEPS = RecentSteps(())
NO_PREFIXES = PrefixTree(0, 0, (), 0)


class EngineViews(Protocol):
    """Shows an engine's inside. The engine's thread answers between two steps, in microseconds."""

    async def recent_steps(self, after: int = -1, requests: frozenset[str] = frozenset()) -> RecentSteps:
        """The latest steps, some hundreds; of some requests, all that are remembered from the first row to the last.

        Args:
            after: only steps with larger numbers.
            requests: ids of requests to the engine; empty for all steps.

        Raises:
            EngineDead: the engine is dead.
            RequestError: this engine does not say.
        """
        ...

    async def cached_prefixes(self) -> PrefixTree:
        """What the prefix cache holds. Raises as `recent_steps`."""
        ...

    async def tenant_shares(self) -> tuple[TenantShare, ...]:
        """Every tenant that the engine has served, in order of their names. Raises as `recent_steps`."""
        ...
