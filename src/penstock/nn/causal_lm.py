"""What a language model asks of attention (`Attend`), and what the engine asks of a language model (`CausalLM`).

Decides the two signatures that every family and every attention share. Knows no family, no cache and no batch: rows of
different sequences lie side by side, and only `attend` knows which row belongs to whom.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.contract.model import ModelShape, StateSpec
from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.state_runs import StateRuns

__all__ = ["Attend", "CausalLM"]


class Attend(Protocol):
    """Attention with a memory of earlier keys and values, and of recurrent state where a model carries any."""

    def __call__(
        self,
        cache: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write new keys and values to a cache, then let each query row attend to what it sees of its own sequence.

        Query head `h` reads key head `h // (Hq / Hkv)`.

        Args:
            cache: index of the cache, from 0.
            q: `[T, Hq, D]`. Each head is contiguous; rows may be strided views of a wider matrix, here and below.
            k: `[T, Hkv, D]`, already rotated; None where this step's keys and values have been written already.
            v: `[T, Hkv, Dv]`, where Dv is D but of a latent cache: there it is the end of `k`. None beside `k`.
            spec: how scores are computed, and which positions are seen.
            sinks: `[Hq]` float32, a logit of each head that takes part in its softmax and adds no value; or None.

        Returns:
            `[T, Hq, Dv]`, contiguous, in the dtype of `q`.
        """
        ...

    def carried(self, state: int, spec: StateSpec, tokens: int) -> tuple[Tensor, StateRuns]:
        """Where a recurrent state lies, `[places, *spec.shape]` float32, to be changed; and who continues which.

        Asked once in a call of the model for each state.

        Args:
            state: its index, from 0.
            spec: its shape.
            tokens: T, of this call.
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
            attend: called once for each operation that attends, in their order; or, if it is a `PagedAttend`, not at
                all: then a model may itself store in and read from the caches that it shows.

        Returns:
            `[T, H]` in the dtype of the weights, or wider.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Unnormalised log probabilities of the next token, `[S, H]` to `[S, V]` float32, for rows that need them."""
        ...
