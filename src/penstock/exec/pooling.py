"""Embeddings in the runner: the hidden states of a prompt become one vector, over as many steps as its rows take.

Decides how states are summed, cut and scaled, and when the layers after pooling compute. Does not know how states were
computed or for which request.

Invariant: a vector's bits depend only on the states of its prompt in order of position. States are added one by one in
float64, so neither the boundaries between rows nor other rows make a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.contract.embedding import EmbeddingSpec, Pooling
from penstock.contract.plan import Admit, Row
from penstock.weights.embedding_layers import EmbeddingLayer

__all__ = ["Pools"]


@dataclass(slots=True)
class _Pool:
    """A prompt being pooled; `total` is `[H]` float64: the sum of its states so far, or the first or last of them."""

    spec: EmbeddingSpec
    length: int
    total: Tensor | None = None


class Pools:
    """The prompts that are being embedded, by slot. Owned by the runner; changed by plans and hidden states only.

    Args:
        layers: layers applied to a pooled vector before it is cut and scaled.
    """

    def __init__(self, layers: Sequence[EmbeddingLayer] = ()) -> None:
        self._pools: dict[int, _Pool] = {}
        self._layers = tuple(layers)

    def admit(self, admit: Admit) -> None:
        """Admit a sequence; the pooling of a preempted one starts again."""
        if admit.embedding is None:
            return
        skips = admit.computed and not admit.embedding.pooling.takes_cached
        assert not skips, f"{admit.seq_id}: pools positions that are not computed"
        self._pools[admit.slot] = _Pool(admit.embedding, len(admit.tokens))

    def release(self, slot: int) -> None:
        """Forget the sequence in `slot`."""
        self._pools.pop(slot, None)

    def take(self, rows: Sequence[Row], q_start: Tensor, hidden: Tensor) -> dict[int, bytes | None]:
        """Add the states of `rows`, `hidden` `[T, H]`; row `r` has states `q_start[r]` to `q_start[r + 1]`.

        Returns:
            For each prompt that is complete now, its vector by slot; None if a value is not finite.
        """
        if not self._pools:
            return {}
        vectors: dict[int, bytes | None] = {}
        for row, first in zip(rows, q_start.tolist(), strict=False):  # the last entry is an end
            pool = self._pools.get(row.slot)
            if pool is None:
                continue
            _add(pool, hidden[first : first + row.count])
            if row.start + row.count < pool.length:
                continue
            vectors[row.slot] = _finished(pool, self._layers)
        return vectors


def _add(pool: _Pool, states: Tensor) -> None:
    """Add the `[n, H]` states of the next positions."""
    if pool.spec.pooling is Pooling.LAST:
        pool.total = states[-1].double()
        return
    if pool.spec.pooling is Pooling.CLS:
        pool.total = states[0].double() if pool.total is None else pool.total
        return
    total = torch.zeros(states.shape[1], dtype=torch.float64, device=states.device)
    if pool.total is not None:
        total = pool.total
    for state in states.double():  # one by one: `sum` may group them, depending on their number
        total = total + state
    pool.total = total


def _finished(pool: _Pool, layers: Sequence[EmbeddingLayer]) -> bytes | None:
    """The finished vector; None if a value is not finite."""
    assert pool.total is not None, "a prompt has a position"
    vector = pool.total / pool.length if pool.spec.pooling is Pooling.MEAN else pool.total
    for layer in layers:
        vector = layer(vector)
    if pool.spec.dimensions:
        vector = vector[: pool.spec.dimensions]
    vector = vector.cpu()
    length = vector.square().sum().sqrt()  # one row of fixed length: its order of additions never changes
    if pool.spec.normalize and length > 0:
        vector = vector / length
    vector = vector.float()
    return vector.numpy().astype("<f4").tobytes() if bool(vector.isfinite().all()) else None
