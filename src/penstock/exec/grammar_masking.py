"""Grammars and thinking budgets in the runner: which tokens each masked row may choose, and that it can end well.

Decides when masks are computed (in a thread, from the moment at which a row's last token is known) and what happens to
a choice after which the answer could not end in time: it is struck out and the row chooses again, with the same
randomness; after a few such choices the row takes the next token of the ending that is known. Raw log probabilities are
the model's, before any mask.
Where reasoning has used up its budget, one token may be chosen: the next of the tag that closes it. Knows no grammar
and no tag: it goes by matchers and `Thinking`s (`contract.ports`).

Invariants: a row's outcome depends on that row alone; rows with neither, or whose reasoning is over,
are not touched and cost nothing.
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
from penstock.contract.ports import Grammars, Matcher, Thinking, ThinkingBudgets
from penstock.contract.thinking import ThinkingBudget
from penstock.exec.sampler import RowSampling, Sampled, ViewRows, sample, score_again
from penstock.kernels.backend import Choose

__all__ = ["GrammarMasking", "PendingMasks"]

_MOST_REJECTIONS = 8

_BITS = np.arange(256, dtype=np.uint8)[:, None] >> np.arange(8, dtype=np.uint8) & 1  # [256, 8], lowest bit first
_NUMBERS = np.where(_BITS == 1, np.float32(np.inf), np.float32(-np.inf))  # [256, 8]


@dataclass(frozen=True, slots=True, eq=False)
class PendingMasks:
    """The masked rows of a step, and the masks to come.

    Attributes:
        rows: their indices among the rows that sample.
        slots: their slots.
        masks: which of them cannot be followed any further; the others' biases are in place then. None without any.
        thinking: index and slot of the rows whose reasoning has a budget and is not over.
    """

    rows: list[int]
    slots: list[int]
    masks: Future[list[bool]] | None
    thinking: list[tuple[int, int]]


class _MaskBias:
    """What each masked row may choose, as numbers that its logits are never above: +inf, or -inf where it may not.

    Owned by `GrammarMasking`: filled by its thread between `begin` and the future's result, read after that. Kept
    between steps, because most masks are those of the step before: a string goes on.
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
        biases = torch.from_numpy(self._rows[: len(rows)]).flatten(1)[:, : logits.shape[-1]].to(logits.device)
        if not biases.shape[-1]:  # every row is broken
            return
        if len(rows) == len(logits):
            torch.minimum(logits, biases, out=logits)
            return
        for row, bias in zip(rows, biases, strict=True):
            torch.minimum(logits[row], bias, out=logits[row])


class GrammarMasking:
    """The matchers and budgets of the slots. Owned by the runner; changed by plans and samples only.

    Args:
        grammars: None in a runner that is never given a grammar.
        budgets: None in one that is never given a thinking budget.
        choose: the backend's compiled call, as for `sampler.sample`.
    """

    def __init__(
        self, grammars: Grammars | None, budgets: ThinkingBudgets | None = None, choose: Choose | None = None
    ) -> None:
        self._choose = choose
        self._grammars = grammars
        self._budgets = budgets
        self._thinking: dict[int, Thinking] = {}
        self._matchers: dict[int, Matcher] = {}
        self._broken: set[int] = set()
        self._bias = _MaskBias()
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: tuple[list[Matcher], Future[list[bool]]] | None = None

    def admit(self, admit: Admit) -> None:
        """Take in a sequence; after a preemption what watches it goes again past what was generated."""
        if admit.thinking is not None:
            self._watch(admit, admit.thinking)
        if admit.grammar is None:
            return
        assert self._grammars is not None, f"{admit.seq_id} has a grammar, and this runner knows none"
        try:
            matcher = self._grammars.matcher(admit.grammar, admit.max_new_tokens)
            self._matchers[admit.slot] = matcher
            if not all(matcher.take(token) for token in admit.tokens[admit.prompt_tokens :]):
                self._broken.add(admit.slot)
        except PenstockError:
            self._broken.add(admit.slot)

    def _watch(self, admit: Admit, budget: ThinkingBudget) -> None:
        assert self._budgets is not None, f"{admit.seq_id} has a thinking budget, and this runner knows none"
        end = len(admit.tokens) if admit.prompt_tokens < 0 else admit.prompt_tokens
        thinking = self._budgets.begin(budget, admit.tokens[:end])
        self._thinking[admit.slot] = thinking
        for token in admit.tokens[end:]:
            if admit.slot in self._thinking:
                self._think(admit.slot, token)

    def is_broken(self, slot: int) -> bool:
        """Whether the grammar of the sequence in `slot` cannot be followed any more."""
        return slot in self._broken

    def release(self, slot: int) -> None:
        """Forget the sequence in `slot`."""
        self._thinking.pop(slot, None)
        self._matchers.pop(slot, None)
        self._broken.discard(slot)

    def reset(self) -> None:
        """Forget every sequence. A mask that is being computed for one of them is let finish, and not used."""
        self._thinking.clear()
        self._matchers.clear()
        self._broken.clear()
        self._ahead = None

    def begin(self, sampling: Sequence[Row]) -> PendingMasks | None:
        """Start to compute the masks of the masked rows among `sampling`; None if there is nobody to watch."""
        if not self._matchers and not self._thinking:  # nearly every step
            return None
        rows = [index for index, row in enumerate(sampling) if row.slot in self._matchers]
        thinking = [(index, row.slot) for index, row in enumerate(sampling) if row.slot in self._thinking]
        if not rows and not thinking:
            return None
        slots = [sampling[index].slot for index in rows]
        return PendingMasks(rows, slots, self._begin_masks(slots) if rows else None, thinking)

    def _begin_masks(self, slots: Sequence[int]) -> Future[list[bool]]:
        """The masks that were begun behind the last step, if they are those of the same rows; else new ones."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-masks")
        matchers = [self._matchers[slot] for slot in slots]
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == matchers:
            return ahead[1]
        return self._thread.submit(self._bias.fill, matchers)  # after what was begun in vain: one at a time

    def _begin_ahead(self, slots: Sequence[int]) -> None:
        """Begin the masks of the next step, most likely of the same rows, while others do what lies between steps."""
        matchers = [self._matchers[slot] for slot in slots]
        self._ahead = matchers, self._begin_masks(slots)

    def sample(
        self,
        logits: Tensor,
        samplings: Sequence[RowSampling],
        positions: Sequence[int],
        pending: PendingMasks | None,
        row_views: ViewRows,
    ) -> Sampled:
        """`sampler.sample` under the pending masks and the tokens due, and everything that watches a row moved on.

        What a mask rules out becomes -inf in `logits`, `[S, V]` float32.
        """
        if pending is None:
            return sample(logits, samplings, positions, row_views, self._choose)
        due = {row: token for row, slot in pending.thinking if (token := self._thinking[slot].due) is not None}
        raw = [row for row in (*pending.rows, *due) if samplings[row].wants_logprob and not samplings[row].processed]
        before = logits[raw] if raw else None  # [W, V], a copy
        if pending.masks is not None:
            broken = pending.masks.result()
            self._broken.update(slot for slot, is_broken in zip(pending.slots, broken, strict=True) if is_broken)
            self._bias.lower(logits, pending.rows)
        for row, token in due.items():
            _leave_only(logits[row], token)
        sampled = sample(logits, samplings, positions, row_views, self._choose)
        for row, slot in pending.thinking:
            if not sampled.failed[row]:
                self._think(slot, sampled.tokens[row])
        for row, slot in zip(pending.rows, pending.slots, strict=True):
            if not sampled.failed[row] and slot not in self._broken:
                self._settle(row, slot, sampled, (logits, samplings, positions), row_views)
            if slot in self._broken:
                sampled.failed[row] = True
        if pending.rows:
            self._begin_ahead(pending.slots)
        if before is not None:
            score_again(sampled, before, samplings, raw)
        return sampled

    def _think(self, slot: int, token: int) -> None:
        """Go on past `token`, as long as there may be reasoning."""
        thinking = self._thinking[slot]
        thinking.take(token)
        if thinking.over:
            del self._thinking[slot]

    def _settle(
        self,
        row: int,
        slot: int,
        sampled: Sampled,
        given: tuple[Tensor, Sequence[RowSampling], Sequence[int]],
        row_views: ViewRows,
    ) -> None:
        """Move the matcher of `row` on; choose again where the answer could not be completed."""
        matcher, (logits, samplings, positions) = self._matchers[slot], given
        for rejections in range(1, _MOST_REJECTIONS + 2):
            if matcher.take(sampled.tokens[row]):
                return
            logits[row, sampled.tokens[row]] = -torch.inf
            if rejections >= _MOST_REJECTIONS or bool(logits[row].amax() == -torch.inf):
                logits[row] = -torch.inf
                logits[row, matcher.closing()] = 0.0
            one = (logits[row : row + 1], samplings[row : row + 1], positions[row : row + 1])
            sampled.put([row], sample(*one, lambda rows: row_views([row for _ in rows]), self._choose))
            if sampled.failed[row]:
                return
        self._broken.add(slot)


def _leave_only(logits: Tensor, token: int) -> None:
    """Rule out every other token of one row `[V]`, in place. A NaN stays one: such a row must fail, and not hide it."""
    bias = torch.full_like(logits, -torch.inf)
    bias[token] = torch.inf
    torch.minimum(logits, bias, out=logits)


def _mask(matcher: Matcher) -> bytes | None:
    try:
        return matcher.mask()
    except EngineFault:
        return None
