"""What a language model asks of attention (`Attend`), and what the engine asks of a language model (`CausalLM`).

Decides the two signatures that every family and every attention share. Knows no family, no cache and no batch: rows of
different sequences lie side by side, and only `attend` knows which row belongs to whom.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.contract.model import ModelShape

__all__ = ["Attend", "CausalLM"]


class Attend(Protocol):
    """Causal attention with a memory of earlier keys and values."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write this layer's new keys and values, then let each query row attend to its own sequence up to itself.

        Scores are scaled by `1 / sqrt(D)`; query head `h` reads key head `h // (Hq / Hkv)`.

        Args:
            layer: index of the layer, from 0.
            q: `[T, Hq, D]`. Each head is contiguous; rows may be strided views of a wider matrix, here and below.
            k: `[T, Hkv, D]`, already rotated.
            v: `[T, Hkv, D]`.

        Returns:
            `[T, Hq, D]`, contiguous, in the dtype of `q`.
        """
        ...


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
            attend: called exactly once a layer, in the order of the layers.

        Returns:
            `[T, H]` in the dtype of the weights.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Unnormalised log probabilities of the next token, `[S, H]` to `[S, V]` float32, for rows that need them."""
        ...
