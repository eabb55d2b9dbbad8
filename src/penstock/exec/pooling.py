"""Embeddings in the runner: hidden states become one vector a prompt, over as many steps as its rows take.

Decides how states are added up, cut and scaled, and when layers behind pooling compute. Does not know how states were
computed or for whom.

Invariant: a vector's bits depend on the states of its prompt alone, in the order of its positions. They are added one
after the other in float64, so where one row ends and the next begins cannot be seen, and neither can other rows.
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
    """One prompt on its way; `total` is `[H]` float64, what was taken of the states of all positions so far."""

    spec: EmbeddingSpec
    length: int
    total: Tensor | None = None


class Pools:
    """The prompts that are being embedded, by slot. Owned by the runner; changed by plans and hidden states only.

    Args:
        layers: what a pooled vector goes through before it is cut and scaled.
    """

    def __init__(self, layers: Sequence[EmbeddingLayer] = ()) -> None:
        self._pools: dict[int, _Pool] = {}
        self._layers = tuple(layers)

    def admit(self, admit: Admit) -> None:
        """Take in a sequence; one that was preempted begins again."""
        if admit.embedding is None:
            return
        skips = admit.computed and not admit.embedding.pooling.takes_cached
        assert not skips, f"{admit.seq_id}: pools positions that are not computed"
        self._pools[admit.slot] = _Pool(admit.embedding, len(admit.tokens))

    def release(self, slot: int) -> None:
        """Forget the sequence in `slot`."""
        self._pools.pop(slot, None)

    def take(self, rows: Sequence[Row], q_start: Tensor, hidden: Tensor) -> dict[int, bytes | None]:
        """Add the states of `rows`, `hidden` `[T, H]`, of which row `r` has `q_start[r]` to `q_start[r + 1]`.

        Returns:
            Slot to vector, as results carry it, of each prompt that is complete now; None where it is not finite.
        """
        if not self._pools:
            return {}
        vectors: dict[int, bytes | None] = {}
        for row, first in zip(rows, q_start.tolist(), strict=False):  # of which the last is an end
            pool = self._pools.get(row.slot)
            if pool is None:
                continue
            _add(pool, hidden[first : first + row.count])
            if row.start + row.count < pool.length:
                continue
            vectors[row.slot] = _finished(pool, self._layers)
        return vectors


def _add(pool: _Pool, states: Tensor) -> None:
    """Take in the `[n, H]` states of the next positions."""
    if pool.spec.pooling is Pooling.LAST:
        pool.total = states[-1].double()
        return
    if pool.spec.pooling is Pooling.CLS:
        pool.total = states[0].double() if pool.total is None else pool.total
        return
    total = torch.zeros(states.shape[1], dtype=torch.float64, device=states.device)
    if pool.total is not None:
        total = pool.total
    for state in states.double():  # one by one: a `sum` may group them, by their number
        total = total + state
    pool.total = total


def _finished(pool: _Pool, layers: Sequence[EmbeddingLayer]) -> bytes | None:
    """The vector as results carry it; None where it is not finite."""
    assert pool.total is not None, "a prompt has a position"
    vector = pool.total / pool.length if pool.spec.pooling is Pooling.MEAN else pool.total
    for layer in layers:
        vector = layer(vector)
    if pool.spec.dimensions:
        vector = vector[: pool.spec.dimensions]
    vector = vector.cpu()
    length = vector.square().sum().sqrt()  # of one row that is always as long: its order of additions never changes
    if pool.spec.normalize and length > 0:
        vector = vector / length
    vector = vector.float()
    return vector.numpy().astype("<f4").tobytes() if bool(vector.isfinite().all()) else None
