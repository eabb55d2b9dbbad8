"""Rank 0's model: has the other ranks compute with it whatever it is asked to compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from penstock.contract.model import ModelShape
from penstock.nn.adapters import Adapted
from penstock.nn.causal_lm import Attend, CausalLM
from penstock.nn.paged import PagedAttend
from penstock.ranks import messages
from penstock.ranks.messages import Array
from penstock.ranks.processes import RankProcesses

__all__ = ["DividedModel"]


class DividedModel:
    """A `CausalLM` that computes with other ranks.

    Args:
        own: rank 0's share.
        processes: the other ranks.
    """

    def __init__(self, own: CausalLM, processes: RankProcesses) -> None:
        self._own = own
        self._processes = processes

    @property
    def shape(self) -> ModelShape:
        """See `CausalLM.shape`."""
        return self._own.shape

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        adapted: Adapted = (),
        taps: Tensor | None = None,
    ) -> Tensor:
        """See `CausalLM.forward`.

        Raises:
            EngineFault: another rank is gone, so nothing can be computed any more.
        """
        assert isinstance(attend, PagedAttend), "each rank has its share of a paged cache"
        assert not adapted, "a divided model takes no adapters"
        runs = attend.runs
        order = messages.Forward(
            kv=self._processes.number_of(attend.keys),
            states=-1 if runs is None else self._processes.number_of(attend.states),
            token_ids=Array.of(token_ids),
            positions=Array.of(positions),
            write_slots=Array.of(attend.write_slots),
            q_start=Array.of(attend.q_start),
            kv_len=Array.of(attend.kv_len),
            block_table=Array.of(attend.block_table),
            runs=() if runs is None else tuple(map(Array.of, runs)),
        )
        with self._together():
            self._processes.tell(order)
            return self._own.forward(token_ids, positions, attend, adapted, taps)

    def forward_given(self, given: Tensor, positions: Tensor, attend: Attend, taps: Tensor | None = None) -> Tensor:
        """Never called: only a predictor is given a register in place of token ids, and predictors are not divided."""
        raise NotImplementedError("a divided model looks its tokens up")

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`; raises as `forward` does."""
        with self._together():
            self._processes.tell(messages.Logits(Array.of(hidden)))
            return self._own.logits(hidden)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """End the group if the block inside raises: the other ranks would be at a different point of the step."""
        try:
            yield
        except BaseException as error:
            self._processes.lose(f"the ranks are no longer together: {error!r}")
            raise
