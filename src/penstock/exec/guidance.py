"""Grammars in the runner: which tokens each guided row may choose, and that what it chose can be completed.

Decides when masks are computed (in a thread, while the model runs) and what happens to a choice after which the answer
could not end in time: it is struck out and the row chooses again, with the same randomness; after a few such choices
the row takes the next token of the ending that is known. Raw log probabilities are those of the model, before any mask.
Knows no grammar: a matcher answers (`contract.ports`).

Invariants: a row's outcome depends on that row alone; rows without a grammar are not touched and cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.contract.errors import EngineFault, PenstockError
from penstock.contract.plan import Admit, Row
from penstock.contract.ports import Grammars, Matcher
from penstock.exec.sampler import Draw, Look, Sampled, sample, score_again

__all__ = ["Begun", "Guidance"]

_MOST_REJECTIONS = 8

_BITS = np.arange(256, dtype=np.uint8)[:, None] >> np.arange(8, dtype=np.uint8) & 1  # [256, 8], lowest bit first
_NUMBERS = np.where(_BITS == 1, np.float32(np.inf), np.float32(-np.inf))  # [256, 8]


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """The guided rows of a step, and the masks to come.

    Attributes:
        rows: their indices among the rows that sample.
        slots: their slots.
        masks: which of them cannot be followed any further; the others' ceilings are in place then.
    """

    rows: list[int]
    slots: list[int]
    masks: Future[list[bool]]


class _Ceilings:
    """What each guided row may choose, as numbers that its logits are never above: +inf, or -inf where it may not.

    Owned by `Guidance`: filled by its thread between `begin` and the future's result, read after that. Kept between
    steps, because most masks are those of the step before: a string goes on.
    """

    def __init__(self) -> None:
        self._masks: list[bytes] = []
        self._rows: NDArray[np.float32] = np.empty((0, 0, 8), dtype=np.float32)

    def fill(self, matchers: Sequence[Matcher]) -> list[bool]:
        """Compute the masks; which of them there is none of."""
        given = [_mask(matcher) for matcher in matchers]
        width = max((len(mask) for mask in given if mask is not None), default=0)
        if self._rows.shape[0] < len(given) or self._rows.shape[1] != width:
            self._rows = np.empty((len(given), width, 8), dtype=np.float32)
            self._masks = [b""] * len(given)
        for at, mask in enumerate(given):
            if mask is not None and mask != self._masks[at]:
                _NUMBERS.take(np.frombuffer(mask, dtype=np.uint8), axis=0, out=self._rows[at], mode="clip")
                self._masks[at] = mask
        return [mask is None for mask in given]

    def lower(self, logits: Tensor, rows: Sequence[int]) -> None:
        """Lower the logits `[S, V]` of `rows` in place. A NaN stays one: such a row must fail, and not hide it.

        Not a `masked_fill_`, which takes twenty times as long.
        """
        ceilings = torch.from_numpy(self._rows[: len(rows)]).flatten(1)[:, : logits.shape[-1]].to(logits.device)
        if not ceilings.shape[-1]:  # every row is broken
            return
        if len(rows) == len(logits):
            torch.minimum(logits, ceilings, out=logits)
            return
        for row, ceiling in zip(rows, ceilings, strict=True):
            torch.minimum(logits[row], ceiling, out=logits[row])


class Guidance:
    """The matchers of the slots. Owned by the runner; changed by plans and samples only.

    Args:
        grammars: None in a runner that is never given a grammar.
    """

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._matchers: dict[int, Matcher] = {}
        self._broken: set[int] = set()
        self._ceilings = _Ceilings()
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

    def begin(self, sampling: Sequence[Row]) -> Begun | None:
        """Start to compute the masks of the guided rows among `sampling`; None if there are none."""
        rows = [index for index, row in enumerate(sampling) if row.slot in self._matchers]
        if not rows:
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-masks")
        slots = [sampling[index].slot for index in rows]
        return Begun(rows, slots, self._thread.submit(self._ceilings.fill, [self._matchers[slot] for slot in slots]))

    def sample(
        self, logits: Tensor, draws: Sequence[Draw], positions: Sequence[int], begun: Begun | None, look: Look
    ) -> Sampled:
        """`sampler.sample` under the masks begun, and every guided row's matcher moved on.

        What a mask rules out becomes -inf in `logits`, `[S, V]` float32.
        """
        if begun is None:
            return sample(logits, draws, positions, look)
        broken = begun.masks.result()
        self._broken.update(slot for slot, is_broken in zip(begun.slots, broken, strict=True) if is_broken)
        raw = [row for row in begun.rows if draws[row].wants_logprob and not draws[row].processed]
        before = logits[raw] if raw else None  # [W, V], a copy
        self._ceilings.lower(logits, begun.rows)
        sampled = sample(logits, draws, positions, look)
        for row, slot in zip(begun.rows, begun.slots, strict=True):
            if not sampled.failed[row] and slot not in self._broken:
                self._settle(row, slot, sampled, (logits, draws, positions), look)
            if slot in self._broken:
                sampled.failed[row] = True
        if before is not None:
            score_again(sampled, before, draws, raw)
        return sampled

    def _settle(
        self, row: int, slot: int, sampled: Sampled, given: tuple[Tensor, Sequence[Draw], Sequence[int]], look: Look
    ) -> None:
        """Move the matcher of `row` on; choose again where the answer could not be completed."""
        matcher, (logits, draws, positions) = self._matchers[slot], given
        for rejections in range(1, _MOST_REJECTIONS + 2):
            if matcher.take(sampled.tokens[row]):
                return
            logits[row, sampled.tokens[row]] = -torch.inf
            if rejections >= _MOST_REJECTIONS or bool(logits[row].amax() == -torch.inf):
                logits[row] = -torch.inf
                logits[row, matcher.closing()] = 0.0
            one = (logits[row : row + 1], draws[row : row + 1], positions[row : row + 1])
            again = sample(*one, lambda rows: look([row for _ in rows]))
            for mine, other in zip(sampled, again, strict=True):
                mine[row] = other[0]
            if sampled.failed[row]:
                return
        self._broken.add(slot)


def _mask(matcher: Matcher) -> bytes | None:
    try:
        return matcher.mask()
    except EngineFault:
        return None
