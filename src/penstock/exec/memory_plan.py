"""Checks whether a model fits: compares what it needs with what is free, before the first weight is read.

Decides what is counted and what is advised; knows models only by their sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.contract.errors import ConfigError
from penstock.contract.memory import readable_bytes

__all__ = ["Alternative", "MemoryNeeds", "check_fits"]

RESERVE = 96 << 20
"""Bytes set aside for what is not counted: grammars, HTTP, thread stacks, fragmentation."""

USEFUL_TOKENS = 512
"""An alternative whose KV cache holds fewer tokens is not advised."""

_NAMED = 3


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes that a model needs with some options.

    Attributes:
        weights: all parameters, as they will be kept.
        packing: temporary memory for the largest parameter while it is read and packed.
        step: working memory of the largest step.
        block: one block of the KV cache.
        block_tokens: how many tokens a block holds.
        blocks: how many blocks there must be.
        pages: the least that a used KV cache takes: large pages for each layer's keys and values.
        angles: tables of rotary positions, up to the length of the longest sequence.
        adapters: the most that adapters may take.
        processes: the processes of ranks other than the first, beside the data that they hold.
    """

    weights: int
    packing: int
    step: int
    block: int
    block_tokens: int
    blocks: int
    pages: int = 0
    angles: int = 0
    adapters: int = 0
    processes: int = 0

    @property
    def kv(self) -> int:
        """The KV cache."""
        return max(self.blocks * self.block, self.pages)

    @property
    def total(self) -> int:
        """The peak: while weights are packed, or in the largest step."""
        used = max(self.packing, self.kv + self.angles + self.step + self.adapters)
        return self.weights + used + self.processes + RESERVE

    def tokens_within(self, free: int) -> int:
        """How many tokens the KV cache can hold with `free` bytes; 0 if the rest alone does not fit."""
        left = free - self.weights - self.processes - RESERVE
        beside = self.angles + self.step + self.adapters
        if left < max(self.packing, self.pages + beside):
            return 0
        return (left - beside) // self.block * self.block_tokens

    def text(self) -> str:
        """The parts as text."""
        tokens = self.blocks * self.block_tokens
        angles = f", angles of positions {readable_bytes(self.angles)}" if self.angles else ""
        beside = f"{angles}; adapters {readable_bytes(self.adapters)}" if self.adapters else angles
        beside += f"; processes of other ranks {readable_bytes(self.processes)}" if self.processes else ""
        return (
            f"weights {readable_bytes(self.weights)}, and {readable_bytes(self.packing)} while they are packed;"
            f" KV cache {readable_bytes(self.kv)} for {tokens:,} tokens; steps {readable_bytes(self.step)}{beside};"
            f" {readable_bytes(RESERVE)} for the rest"
        )


@dataclass(frozen=True, slots=True)
class Alternative:
    """Other options, as they are written on the command line, and what the model needs with them."""

    options: str
    needs: MemoryNeeds


def check_fits(option: str, needs: MemoryNeeds, free: int, alternatives: Sequence[Alternative]) -> None:
    """Refuse a model that does not fit.

    Args:
        option: the option that decided `needs`, for the message.
        needs: what the model needs with the operator's options.
        free: free bytes.
        alternatives: in the order in which they should be advised; those that do not fit are left out.

    Raises:
        ConfigError: more is needed than is free; says how much, for what, and what would fit.
    """
    if needs.total <= free:
        return
    raise ConfigError(
        option,
        f"{readable_bytes(needs.total)} of memory are needed and {readable_bytes(free)} are free: {needs.text()}."
        f" {_advice(needs, free, alternatives)}",
    )


def _advice(needs: MemoryNeeds, free: int, alternatives: Sequence[Alternative]) -> str:
    fitting = [(each.options, each.needs.tokens_within(free)) for each in alternatives]
    named = [f"{options} ({tokens:,} tokens)" for options, tokens in fitting if tokens >= USEFUL_TOKENS]
    here = needs.tokens_within(free)
    if here >= USEFUL_TOKENS:
        size = readable_bytes(here // needs.block_tokens * needs.block)
        named.insert(0, f"a KV cache of {size} ({here:,} tokens)")
    return f"What fits: {'; '.join(named[:_NAMED])}" if named else "No quantisation of it fits: take a smaller model"
