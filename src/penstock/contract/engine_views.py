"""Views into a running engine: its latest steps, its prefix cache as a tree, tenants' shares.

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
    """One request's part of a step.

    Attributes:
        decode: its share of the step's `decode`, in proportion to its positions in rows that decode; seconds.
        prompts: seconds for its chunks, and for what it read from the store.
        positions: how many positions its rows computed or read.
    """

    decode: float
    prompts: float
    positions: int


class StepView(NamedTuple):
    """One step that was computed.

    Attributes:
        step: its number.
        at: when its result came, in seconds by the engine's clock.
        decode: seconds for rows that decode.
        prompts: seconds for chunks of prompts.
        drafting: seconds for the draft model.
        restored: seconds for reading stored blocks.
        engine: seconds since the previous step, or since this one was planned, in which the runner was idle.
        foreseen: seconds that `decode` and `prompts` together were expected to take; 0.0 while nothing was known.
        decoding: rows that decode.
        drafted: positions of guessed tokens in these rows.
        chunk: positions of prompts.
        read: positions that were read from the store.
        waiting: sequences that still waited after the step was planned.
        stall: why the first of these was not admitted; None if none waited.
        own: the part of the request that the caller asked about; None if it asked about none.
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
    """The latest steps, oldest first.

    Attributes:
        cut: for a request's steps: whether earlier ones have been forgotten.
    """

    steps: tuple[StepView, ...]
    cut: bool = False


class PrefixNode(NamedTuple):
    """A run of cached blocks with no branch in between.

    Attributes:
        parent: index of the node that it continues; -1 if there is none, or it is no longer cached.
        start: number of positions before it.
        blocks: number of its blocks.
        held: how many of these are held by running sequences.
        hits: how often an admission found its first block.
        hit_tokens: positions that did not have to be computed so far because its blocks were found.
        idle: admissions since any of its blocks was sealed or found.
        below: blocks below it, including those of nodes that are left out.
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
        blocks: number of blocks that can be found.
        nodes: the nodes with the most blocks in and below them; each comes after its parent.
        left_out: number of blocks in the other nodes.
    """

    block_size: int
    blocks: int
    nodes: tuple[PrefixNode, ...]
    left_out: int


class TenantShare(NamedTuple):
    """A tenant's use of the engine.

    Attributes:
        tenant: its name; see `SequenceRequest.tenant`.
        share: what it is entitled to, relative to other tenants; see `SequenceRequest.share`.
        running: its sequences that hold a slot.
        waiting: its sequences that do not.
        waiting_tokens: tokens of the waiting ones.
        tokens: tokens computed for it since the start: prompt tokens that were not cached, and answer tokens.
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
    """Shows what happens inside an engine. The engine's thread answers between two steps, in microseconds."""

    async def recent_steps(self, after: int = -1, requests: frozenset[str] = frozenset()) -> RecentSteps:
        """The latest few hundred steps; or, for some requests, all remembered steps from their first row to the last.

        Args:
            after: only steps with larger numbers.
            requests: ids of requests to the engine; empty for all steps.

        Raises:
            EngineDead: the engine is dead.
            RequestError: this engine does not offer it.
        """
        ...

    async def cached_prefixes(self) -> PrefixTree:
        """What the prefix cache holds. Raises as `recent_steps`."""
        ...

    async def tenant_shares(self) -> tuple[TenantShare, ...]:
        """Every tenant that the engine has served, in order of name. Raises as `recent_steps`."""
        ...
