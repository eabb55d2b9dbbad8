"""Grammars in the runner: which tokens each guided row may choose, and that what it chose can be completed.

Decides when masks are computed (in a thread, while the model runs) and what happens to a choice after which the answer
could not end in time: it is struck out and the row chooses again, with the same randomness; after a few such choices
the row takes the next token of the ending that is known. Knows no grammar: a matcher answers (`contract.ports`).

Invariants: a row's outcome depends on that row alone; rows without a grammar are not touched and cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from penstock.contract.errors import EngineFault, PenstockError
from penstock.contract.plan import Admit, Row
from penstock.contract.ports import Grammars, Matcher
from penstock.exec.sampler import Draw, Look, Sampled, sample

__all__ = ["Guidance"]

_MOST_REJECTIONS = 8

Masks = dict[int, Tensor]
"""Index among the rows that sample -> `[V]` bool, the tokens that the row may choose."""


class Guidance:
    """The matchers of the slots. Owned by the runner; changed by plans and samples only.

    Args:
        grammars: None in a runner that is never given a grammar.
    """

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._matchers: dict[int, Matcher] = {}
        self._broken: set[int] = set()
        self._thread: ThreadPoolExecutor | None = None

    def admit(self, admit: Admit) -> None:
        """Take in a sequence; after a preemption its matcher goes again past what was generated."""
        if admit.grammar is None:
            return
        assert self._grammars is not None, f"{admit.seq_id} has a grammar, and this runner knows none"
        try:
            matcher = self._grammars.matcher(admit.grammar, admit.room)
            self._matchers[admit.slot] = matcher
            if not all(matcher.take(token) for token in admit.tokens[admit.prompt_tokens :]):
                self._broken.add(admit.slot)
        except PenstockError:
            self._broken.add(admit.slot)

    def release(self, slot: int) -> None:
        """Forget the sequence in `slot`."""
        self._matchers.pop(slot, None)
        self._broken.discard(slot)

    def begin(self, sampling: Sequence[Row]) -> list[tuple[int, int, Future[Tensor]]]:
        """Start to compute the masks of the guided rows among `sampling`: index, slot, and the mask to come."""
        guided = [(i, row.slot) for i, row in enumerate(sampling) if row.slot in self._matchers]
        if guided and self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-masks")
        return [(i, slot, self._thread.submit(_mask, self._matchers[slot])) for i, slot in guided]

    def sample(
        self,
        logits: Tensor,
        draws: Sequence[Draw],
        positions: Sequence[int],
        begun: Sequence[tuple[int, int, Future[Tensor]]],
        look: Look,
    ) -> Sampled:
        """`sampler.sample` under the masks begun, and every guided row's matcher moved on."""
        masks = self._masks(begun)
        sampled = sample(logits, draws, positions, look, masks)
        for i, slot, _ in begun:
            if i in masks and not sampled.failed[i]:
                self._settle(i, slot, masks[i], sampled, (logits, draws, positions), look)
            if slot in self._broken:
                sampled.failed[i] = True
        return sampled

    def _masks(self, begun: Sequence[tuple[int, int, Future[Tensor]]]) -> Masks:
        masks: Masks = {}
        for i, slot, future in begun:
            try:
                masks[i] = future.result()
            except EngineFault:
                self._broken.add(slot)
        return masks

    def _settle(
        self,
        i: int,
        slot: int,
        mask: Tensor,
        sampled: Sampled,
        given: tuple[Tensor, Sequence[Draw], Sequence[int]],
        look: Look,
    ) -> None:
        """Move the matcher of row `i` on; choose again where the answer could not be completed."""
        matcher, (logits, draws, positions) = self._matchers[slot], given
        for rejections in range(1, _MOST_REJECTIONS + 2):
            if matcher.take(sampled.tokens[i]):
                return
            mask[sampled.tokens[i]] = False
            if rejections >= _MOST_REJECTIONS or not mask.any():
                mask.fill_(False)
                mask[matcher.closing()] = True
            one = (logits[i : i + 1], draws[i : i + 1], positions[i : i + 1])
            again = sample(*one, lambda rows: look([i for _ in rows]), {0: mask})
            for mine, other in zip(sampled, again, strict=True):
                mine[i] = other[0]
            if sampled.failed[i]:
                return
        self._broken.add(slot)


def _mask(matcher: Matcher) -> Tensor:
    bits = np.unpackbits(np.frombuffer(matcher.mask(), dtype=np.uint8), bitorder="little")
    return torch.from_numpy(bits).bool()
