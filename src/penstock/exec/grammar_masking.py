"""Grammars and thinking budgets in the runner: which tokens each masked row may choose, so that its answer can end.

Decides what happens to a choice after which the answer could not end in time: it is ruled out and the row chooses
again, with the same randomness; after a few such choices the row takes the next token of the known ending. Raw log
probabilities are the model's, before any mask.
Side threads make matchers, compute masks as soon as a row's last token is known, and advance matchers if that takes a
search. A step waits for them briefly; if a row's grammar is still not ready, the row waits, and draws in a later step
what it would have drawn in this one.
When reasoning has used up its budget, only one token may be chosen: the next of the closing tag. Knows no grammar and
no tag, only matchers and `Thinking`s (`contract.ports`).

Invariants: a row's outcome depends on that row alone; rows with neither grammar nor budget, or whose reasoning is over,
are not touched and cost nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from penstock.contract.grammar import Grammar
from penstock.contract.plan import Admit, Row
from penstock.contract.ports import Grammars, Matcher, Thinking, ThinkingBudgets
from penstock.contract.thinking import ThinkingBudget
from penstock.exec.guided_row import GuidedRow
from penstock.exec.sampler import RowSampling, Sampled, ViewRows, sample, score_again, see_nothing
from penstock.exec.side_threads import SideThreads
from penstock.kernels.backend import Backend

__all__ = ["GrammarMasking", "PendingMasks"]

_MOST_REJECTIONS = 8
_PATIENCE_SECONDS = 0.05
"""How long a step may wait for masks, and again for matchers to take its draws; for all rows together."""
_MOST_FORESEEN = 16
"""Most tokens of a guess."""
_SHORT_PATIENCE_SECONDS = 0.002
"""The same if the step also has rows without a grammar: many times as long as nearly every mask takes."""


@dataclass(frozen=True, slots=True, eq=False)
class PendingMasks:
    """Which sampling rows of a step have a grammar or a thinking budget.

    Attributes:
        guided: index, slot and form of the rows with a grammar.
        thinking: index and slot of the rows whose reasoning has a budget and is not over.
    """

    guided: list[tuple[int, int, GuidedRow]]
    thinking: list[tuple[int, int]]


_Guided = tuple[int, int, GuidedRow]
"""A row's index among the rows that sample, its slot and its form."""


class GrammarMasking:
    """The forms and budgets of the slots. Owned by the runner; only plans and samples change it.

    Args:
        backend: samples, and rules tokens out.
        grammars: None in a runner that is never given a grammar.
        budgets: None in a runner that is never given a thinking budget.
    """

    def __init__(
        self, backend: Backend, grammars: Grammars | None = None, budgets: ThinkingBudgets | None = None
    ) -> None:
        self._choose = backend.choose
        self._rule_out = backend.rule_out
        self._grammars = grammars
        self._budgets = budgets
        self._thinking: dict[int, Thinking] = {}
        self._guided: dict[int, GuidedRow] = {}
        self._broken: set[int] = set()
        self._waiting: set[int] = set()
        self._step_rows = 0
        self._patience = _PATIENCE_SECONDS  # of the current step
        self._threads = SideThreads("penstock-forms")

    def admit(self, admit: Admit) -> None:
        """Admit a sequence. After a preemption, matcher and budget advance past the generated tokens. Never waits."""
        if admit.thinking is not None:
            self._watch(admit, admit.thinking)
        if admit.grammar is None:
            return
        assert self._grammars is not None, f"{admit.seq_id} has a grammar, and this runner knows none"
        self._guided[admit.slot] = GuidedRow(
            self._threads, partial(_matcher, self._grammars, admit, admit.grammar), self._rule_out
        )

    def _watch(self, admit: Admit, budget: ThinkingBudget) -> None:
        assert self._budgets is not None, f"{admit.seq_id} has a thinking budget, and this runner knows none"
        end = len(admit.tokens) if admit.prompt_tokens < 0 else admit.prompt_tokens
        thinking = self._budgets.begin(budget, admit.tokens[:end])
        self._thinking[admit.slot] = thinking
        for token in admit.tokens[end:]:
            if admit.slot in self._thinking:
                self._think(admit.slot, token)

    def begin_step(self, rows: Sequence[Row]) -> None:
        """Decide how long the draws of a step may wait. `rows` are all its rows: those that do not draw wait too."""
        self._step_rows = len(rows)
        alone = not self._guided or all(row.slot in self._guided for row in rows)
        self._patience = _PATIENCE_SECONDS if alone else _SHORT_PATIENCE_SECONDS

    def is_broken(self, slot: int) -> bool:
        """Whether the grammar of the sequence in `slot` can no longer be followed."""
        return slot in self._broken

    def waits(self, slot: int) -> bool:
        """Whether the last draw of the sequence in `slot` waits for its grammar and must be repeated."""
        return slot in self._waiting

    def goes_along(self, slot: int) -> bool:
        """Whether the draws of the sequence in `slot` may be made by `sample_along`."""
        return slot in self._guided and slot not in self._thinking and self._guided[slot].goes_along

    def sample_along(
        self,
        rows: Sequence[Row],
        logits: Sequence[Tensor],
        own: Sequence[RowSampling],
        next_positions: Sequence[int],
    ) -> tuple[Sampled, list[range]]:
        """Draw at all places of rows whose grammars follow their drafts.

        Their matchers advance past what was drawn, up to the first draw that differs from its draft.

        Args:
            rows: rows with drafts and without stages that look back.
            logits: for each row `[1 + D, V]` float32; not changed.
            own: how each row samples.
            next_positions: for each row, the index in its sequence of the first token that it chooses.

        Returns:
            The draws, and for each row the range of draws that are valid, including its last one.
        """
        forms = [self._guided[row.slot] for row in rows]
        width = logits[0].shape[-1]
        lowered = logits[0].new_empty((sum([len(of) for of in logits]), width))
        counts: list[int] = []
        for form, of, row in zip(forms, logits, rows, strict=True):
            counts.append(1 + form.lower_along(of, lowered[sum(counts) :], row.drafts))
        lowered = lowered[: sum(counts)]
        samplings = [each for each, count in zip(own, counts, strict=True) for _ in range(count)]
        positions = [at + place for at, count in zip(next_positions, counts, strict=True) for place in range(count)]
        sampled = sample(lowered, samplings, positions, see_nothing, self._choose)
        firsts = list(accumulate(counts[:-1], initial=0))
        spans: list[range] = []
        for row, form, first, count in zip(rows, forms, firsts, counts, strict=True):
            right = _right(row.drafts[: count - 1], sampled, first)
            form.arrive(right)
            spans.append(range(first, first + right + 1))
        last = [(span[-1], row.slot, form) for span, row, form in zip(spans, rows, forms, strict=True)]
        self._waiting.difference_update([row.slot for row in rows])
        drawn = [each for each in last if not sampled.failed[each[0]]]
        self._settle(drawn, sampled, (lowered, samplings, positions), see_nothing, _SHORT_PATIENCE_SECONDS)
        for at, slot, _ in last:
            sampled.failed[at] |= slot in self._broken
        for each, of, first, count in zip(own, logits, firsts, counts, strict=True):
            if each.wants_logprob and not each.processed:
                score_again(sampled, of[:count], samplings, range(first, first + count), self._choose)
        return sampled, spans

    def foresee(self, slot: int) -> tuple[int, ...]:
        """Tokens that are likely to come next in the sequence in `slot`; a guess, () for none."""
        thinking, form = self._thinking.get(slot), self._guided.get(slot)
        if thinking is not None and thinking.due is not None:
            return (thinking.due,)
        return () if form is None else form.foresee(_MOST_FORESEEN)

    def release(self, slot: int) -> None:
        """Forget the sequence in `slot`. Work under way for it finishes, and its result is not used."""
        self._thinking.pop(slot, None)
        self._guided.pop(slot, None)
        self._broken.discard(slot)
        self._waiting.discard(slot)

    def reset(self) -> None:
        """Forget every sequence."""
        self._thinking.clear()
        self._guided.clear()
        self._broken.clear()
        self._waiting.clear()

    def begin(self, sampling: Sequence[Row]) -> PendingMasks | None:
        """Which rows of `sampling` have a grammar or a thinking budget; None if none has."""
        if not self._guided and not self._thinking:  # nearly every step
            return None
        guided = [
            (index, row.slot, self._guided[row.slot]) for index, row in enumerate(sampling) if row.slot in self._guided
        ]
        thinking = [(index, row.slot) for index, row in enumerate(sampling) if row.slot in self._thinking]
        return PendingMasks(guided, thinking) if guided or thinking else None

    def watched(self, pending: PendingMasks | None) -> frozenset[int]:
        """The slots of rows with a grammar or a thinking budget."""
        if pending is None:
            return frozenset()
        return frozenset([*(slot for _, slot, _ in pending.guided), *(slot for _, slot in pending.thinking)])

    def sample(
        self,
        logits: Tensor,
        samplings: Sequence[RowSampling],
        positions: Sequence[int],
        pending: PendingMasks | None,
        row_views: ViewRows,
    ) -> Sampled:
        """`sampler.sample` under the pending masks and due tokens; then advance matchers and budgets.

        Tokens that a mask rules out become -inf in `logits`, `[S, V]` float32.
        """
        if pending is None:
            return sample(logits, samplings, positions, row_views, self._choose)
        due = {row: token for row, slot in pending.thinking if (token := self._thinking[slot].due) is not None}
        watched = [*(row for row, _, _ in pending.guided), *due]
        raw = [row for row in watched if samplings[row].wants_logprob and not samplings[row].processed]
        before = logits[raw] if raw else None  # [W, V], a copy
        masked = self._lower(logits, pending.guided)
        for row, token in due.items():
            _leave_only(logits[row], token)
        sampled = sample(logits, samplings, positions, row_views, self._choose)
        drawn = [each for each in masked if not sampled.failed[each[0]]]
        self._settle(drawn, sampled, (logits, samplings, positions), row_views, self._patience)
        for row, slot, _ in pending.guided:
            sampled.failed[row] |= slot in self._broken
        for row, slot in pending.thinking:
            if not sampled.failed[row] and slot not in self._waiting:
                self._think(slot, sampled.tokens[row])
        if before is not None:
            score_again(sampled, before, samplings, raw, self._choose)
        if len(self._waiting) == self._step_rows:  # every row waits: no other is held up
            unknown = [form.unknown for _, _, form in pending.guided]
            self._threads.wait_for_any(unknown, _PATIENCE_SECONDS)
        return sampled

    def _lower(self, logits: Tensor, guided: list[_Guided]) -> list[_Guided]:
        """Mask, in place, the logits of rows whose mask is ready; return these rows. The others wait or are broken."""
        self._waiting.clear()
        self._threads.wait_until([form.mask for _, _, form in guided], time.monotonic() + self._patience)
        masked: list[_Guided] = []
        for row, slot, form in guided:
            if not form.mask.done():
                self._waiting.add(slot)
            elif form.mask.result():
                form.lower(logits[row], logits[row])
                masked.append((row, slot, form))
            else:
                self._broken.add(slot)
        return masked

    def _think(self, slot: int, token: int) -> None:
        """Advance the thinking budget past `token`, while there may be reasoning."""
        thinking = self._thinking[slot]
        thinking.take(token)
        if thinking.over:
            del self._thinking[slot]

    def _settle(
        self,
        drawn: list[_Guided],
        sampled: Sampled,
        given: tuple[Tensor, Sequence[RowSampling], Sequence[int]],
        row_views: ViewRows,
        patience: float,
    ) -> None:
        """Advance the matchers of `drawn` rows; let a row choose again if its answer could not be completed."""
        deadline = time.monotonic() + patience
        for rejections in range(1, _MOST_REJECTIONS + 2):
            with self._threads.together():
                verdicts = [form.take(sampled.tokens[row]) for row, _, form in drawn]
            self._threads.wait_until(verdicts, deadline)
            refused: list[_Guided] = []
            with self._threads.together():
                for (row, slot, form), verdict in zip(drawn, verdicts, strict=True):
                    if not verdict.done():
                        self._waiting.add(slot)
                        continue
                    form.settle(sampled.tokens[row], verdict.result())
                    if not verdict.result():
                        refused.append((row, slot, form))
            drawn = [each for each in refused if self._choose_again(each, rejections, sampled, given, row_views)]
            if not drawn:
                return
        self._broken.update(slot for _, slot, _ in drawn)

    def _choose_again(
        self,
        refused: _Guided,
        rejections: int,
        sampled: Sampled,
        given: tuple[Tensor, Sequence[RowSampling], Sequence[int]],
        row_views: ViewRows,
    ) -> bool:
        """Rule out what a row drew and draw again; after some `rejections` take the known ending. False if it fails."""
        row, _, form = refused
        logits, samplings, positions = given
        logits[row, sampled.tokens[row]] = -torch.inf
        if rejections >= _MOST_REJECTIONS or bool(logits[row].amax() == -torch.inf):
            logits[row] = -torch.inf
            logits[row, form.closing()] = 0.0
        one = (logits[row : row + 1], samplings[row : row + 1], positions[row : row + 1])
        sampled.put([row], sample(*one, lambda rows: row_views([row for _ in rows]), self._choose))
        return not sampled.failed[row]


def _matcher(grammars: Grammars, admit: Admit, grammar: Grammar) -> Matcher | None:
    """The matcher of a sequence, advanced past what was generated before a preemption; None if that is impossible."""
    matcher = grammars.matcher(grammar, admit.max_new_tokens, admit.tokens[: admit.prompt_tokens])
    followed = all(matcher.take(token) for token in admit.tokens[admit.prompt_tokens :])
    return matcher if followed else None


def _right(drafts: Sequence[int], sampled: Sampled, first: int) -> int:
    """How many leading `drafts` were drawn, in the entries from `first` on."""
    for count, draft in enumerate(drafts):
        if sampled.failed[first + count] or sampled.tokens[first + count] != draft:
            return count
    return len(drafts)


def _leave_only(logits: Tensor, token: int) -> None:
    """Rule out every other token of one row `[V]`, in place. NaN stays NaN, so that such a row still fails."""
    bias = torch.full_like(logits, -torch.inf)
    bias[token] = torch.inf
    torch.minimum(logits, bias, out=logits)
