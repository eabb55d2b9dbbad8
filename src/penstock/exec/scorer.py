"""Computes a model's predictions at every position of a text, with the same runner and plans that serve requests.

Decides how a text becomes plans: alone, in rows of at most `chunk` positions, as the scheduler would admit it to an
idle engine. Does not know what the predictions are compared with.

Holds hidden states, never logits: for a long text `[T, H]` is small, `[T, V]` is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.contract.model import ModelShape
from penstock.contract.plan import Admit, Row, StepPlan
from penstock.contract.ports import Runner
from penstock.contract.sampling import SamplingSpec
from penstock.nn.adapters import Adapted
from penstock.nn.causal_lm import Attend

if TYPE_CHECKING:
    from penstock.nn.causal_lm import CausalLM

__all__ = ["Listener", "Scorer"]

_GREEDY = SamplingSpec((("temperature", 0),))
"""A text's last row samples, as every last row does; its token is ignored."""


class Listener:
    """Wraps a `CausalLM` and keeps every hidden state that it computes. Owned by one scorer."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self._heard: list[Tensor] = []

    @property
    def shape(self) -> ModelShape:
        """See `CausalLM.shape`."""
        return self._model.shape

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        adapted: Adapted = (),
        taps: Tensor | None = None,
    ) -> Tensor:
        """See `CausalLM.forward`."""
        hidden = self._model.forward(token_ids, positions, attend, adapted, taps)
        self._heard.append(hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        return self._model.logits(hidden)

    def take(self) -> Tensor:
        """All hidden states computed since the last call, in order: `[T, H]`."""
        heard, self._heard = self._heard, []
        return torch.cat(heard)


class Scorer:
    """Predictions of one model. Owns its runner; not thread-safe."""

    def __init__(self, model: CausalLM, make_runner: Callable[[CausalLM], Runner], block_size: int, chunk: int) -> None:
        """`make_runner` makes a runner with at least one slot, and blocks of `block_size` for the longest text."""
        self._listener = Listener(model)
        self._runner = make_runner(self._listener)
        self._block_size = block_size
        self._chunk = chunk
        self._step = 0

    def hidden(self, token_ids: Sequence[int]) -> Tensor:
        """The hidden state after each token of a text, `[T, H]`; it begins at position 0 and knows no earlier text."""
        count = len(token_ids)
        blocks = tuple(range(-(-count // self._block_size)))
        admit = Admit(0, "text", tuple(token_ids), blocks, 0, _GREEDY, 0)
        for start in range(0, count, self._chunk):
            end = min(start + self._chunk, count)
            self._run((), (admit,) if start == 0 else (), (Row(0, start, end - start, (), end == count),))
        self._run((0,), (), ())
        return self._listener.take()

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[S, V]` float32 of hidden states `[S, H]`, as the runner has them before it samples."""
        return self._listener.logits(hidden)

    def _run(self, releases: tuple[int, ...], admits: tuple[Admit, ...], rows: tuple[Row, ...]) -> None:
        self._runner.run(StepPlan(self._step, releases, admits, rows))
        self._step += 1
