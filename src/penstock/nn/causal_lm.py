"""What a language model asks of attention (`Attend`), and what the engine asks of a language model (`CausalLM`).

Decides the two signatures that every family and every attention share. Knows no family, no cache and no batch: rows of
different sequences lie side by side, and only `attend` knows which row belongs to whom.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from penstock.contract.model import ModelShape
from penstock.kernels.attention_spec import AttentionSpec

__all__ = ["Attend", "CausalLM", "PagedAttend"]


class Attend(Protocol):
    """Causal attention with a memory of earlier keys and values."""

    def __call__(
        self,
        cache: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write new keys and values to a cache, then let each query row attend to its own sequence up to itself.

        Query head `h` reads key head `h // (Hq / Hkv)`.

        Args:
            cache: index of the cache, from 0.
            q: `[T, Hq, D]`. Each head is contiguous; rows may be strided views of a wider matrix, here and below.
            k: `[T, Hkv, D]`, already rotated; None where this step's keys and values have been written already.
            v: `[T, Hkv, D]`, or None beside `k`.
            spec: how scores are computed, and which positions are seen.
            sinks: `[Hq]` float32, a logit of each head that takes part in its softmax and adds no value; or None.

        Returns:
            `[T, Hq, D]`, contiguous, in the dtype of `q`.
        """
        ...


class PagedAttend(Attend):
    """An `Attend` over a cache in blocks that shows what it works on, so that a model may do all of it in one call.

    A class to inherit from, not a protocol: every step asks whether it is one.

    Attributes:
        keys: of each cache: natural, `[num_blocks, block_size, Hkv, D]`, or in the packed or int8 layout of
            `kernels.native_attention`.
        values: of each cache, in the same of the three ways; packed and int8 values use a different layout from keys.
        write_slots: `[T]` int64, where each token's keys and values go.
        q_start: `[R + 1]` int32; row `r` has the tokens `q_start[r]` to `q_start[r + 1]`.
        kv_len: `[R]` int32, positions of each row's sequence, the new ones included.
        block_table: `[R, M]` int32.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    write_slots: Tensor
    q_start: Tensor
    kv_len: Tensor
    block_table: Tensor


class CausalLM(Protocol):
    """A decoder-only transformer. Immutable: all that changes between calls lives in `attend`."""

    @property
    def shape(self) -> ModelShape:
        """The sizes that others must know."""
        ...

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Compute the hidden state of each token, after the final norm.

        Args:
            token_ids: `[T]` int64, each below `shape.vocab_size`.
            positions: `[T]` int64, each token's index in its own sequence, below `shape.max_positions`.
            attend: called once for each operation that attends, in their order; or, if it is a `PagedAttend`, not at
                all: then a model may itself store in and read from the caches that it shows.

        Returns:
            `[T, H]` in the dtype of the weights, or wider.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Unnormalised log probabilities of the next token, `[S, H]` to `[S, V]` float32, for rows that need them."""
        ...
