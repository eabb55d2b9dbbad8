"""One step's attention over paged caches: all the tensors it needs, so that a model may compute it in one call.

Decides nothing: a backend computes, or a compiled program reads the fields itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.contract.model import StateSpec
from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.backend import Backend
from penstock.kernels.state_runs import StateRuns

__all__ = ["PagedAttend"]


@dataclass(frozen=True, slots=True, eq=False)
class PagedAttend:
    """An `Attend` over the rows of one step.

    Attributes:
        keys: the keys of each cache: natural, `[num_blocks, block_size, Hkv, D]`, or in a packed, int8 or latent layout
            of `kernels.native_attention`.
        values: the values of each cache, of the same kind as its keys; packed and int8 values have their own layouts.
        write_slots: `[T]` int64, where each token's keys and values go: `block * block_size + offset`.
        q_start: `[R + 1]` int32 on the host; row `r` has the tokens `q_start[r]` to `q_start[r + 1]`.
        kv_len: `[R]` int32 on the host, the number of positions in each row's sequence, new ones included.
        block_table: `[R, M]` int32.
        backend: writes and attends, one operation at a time.
        states: recurrent states, `[places, ...]` float32 each; () if the model has none.
        runs: which tokens continue which state; None if there are no states.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    write_slots: Tensor
    q_start: Tensor
    kv_len: Tensor
    block_table: Tensor
    backend: Backend
    states: Sequence[Tensor] = ()
    runs: StateRuns | None = None

    def __call__(
        self,
        cache: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `Attend`."""
        keys, values = self.keys[cache], self.values[cache]
        if k is not None and v is not None:
            self.backend.write_kv(keys, values, k, v, self.write_slots)
        return self.backend.paged_attention(q, keys, values, self.q_start, self.kv_len, self.block_table, spec, sinks)

    def carried(self, state: int, spec: StateSpec, tokens: int) -> tuple[Tensor, StateRuns]:  # noqa: ARG002 - as made
        """See `Attend`."""
        assert self.runs is not None, "a model that carries state was given no runs"
        return self.states[state], self.runs
