"""What a language model asks of attention (`Attend`), and what the engine asks of a language model (`CausalLM`).

Decides the two signatures that every family and every attention share. Knows no family, no cache and no batch: rows of
different sequences lie side by side, and only `attend` knows which row belongs to which sequence.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.contract.model import ModelShape, StateSpec
from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.state_runs import StateRuns
from penstock.nn.adapters import Adapted

__all__ = ["Attend", "CausalLM"]


class Attend(Protocol):
    """Attention that remembers earlier keys and values, and recurrent state if the model has any."""

    def __call__(
        self,
        cache: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write new keys and values to a cache, then let each query row attend to its visible positions.

        Query head `h` reads key head `h // (Hq / Hkv)`.

        Args:
            cache: index of the cache, from 0.
            q: `[T, Hq, D]`. Each head is contiguous; rows may be strided views of a wider matrix, here and below.
            k: `[T, Hkv, D]`, already rotated; None if this step's keys and values have been written already.
            v: `[T, Hkv, Dv]`; Dv is D, except in a latent cache, whose values are the end of `k`. None with `k`.
            spec: how scores are computed, and which positions are visible.
            sinks: `[Hq]` float32, one extra logit per head in its softmax that contributes no value; or None.

        Returns:
            `[T, Hq, Dv]`, contiguous, in the dtype of `q`.
        """
        ...

    def carried(self, state: int, spec: StateSpec, tokens: int) -> tuple[Tensor, StateRuns]:
        """A recurrent state `[places, *spec.shape]` float32, to update in place, and which tokens continue which state.

        Called once per state in each call of the model.

        Args:
            state: index of the state, from 0.
            spec: shape of the state.
            tokens: T of this call.
        """
        ...


class CausalLM(Protocol):
    """A decoder-only transformer. Immutable: whatever changes between calls lives in `attend`."""

    @property
    def shape(self) -> ModelShape:
        """The sizes that callers must know."""
        ...

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        adapted: Adapted = (),
        taps: Tensor | None = None,
    ) -> Tensor:
        """Compute the hidden state of each token, after the final norm.

        Args:
            token_ids: `[T]` int64, each below `shape.vocab_size`.
            positions: `[T]` int64, each token's index in its own sequence, below `shape.max_positions`.
            attend: called once per attention operation, in order; if it is a `PagedAttend`, a model may instead read
                and write its caches directly.
            adapted: the tokens that have adapters; () unless the model takes them.
            taps: `[T, width]` float32, contiguous; filled with what the program hands out (`Program.taps`).

        Returns:
            `[T, H]` in the dtype of the weights, or wider.
        """
        ...

    def forward_given(self, given: Tensor, positions: Tensor, attend: Attend, taps: Tensor | None = None) -> Tensor:
        """As `forward`, for a program whose stream is computed from a register that the caller fills.

        Args:
            given: `[T, width]` float32, contiguous; overwritten.
            positions: as for `forward`.
            attend: as for `forward`.
            taps: as for `forward`.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the next token, `[S, H]` to `[S, V]` float32, for the rows that need them."""
        ...
