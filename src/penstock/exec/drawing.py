"""Draws the tokens of a step's rows from their logits, and judges drafts by what is drawn.

This is why drafts change no answer: each place draws exactly what it would draw without drafts, and a row ends at the
first place that draws a token other than its draft.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from penstock.contract.plan import Row, SampledToken
from penstock.exec.batch import SlotTables
from penstock.exec.grammar_masking import GrammarMasking, PendingMasks
from penstock.exec.sampler import Sampled, see_nothing
from penstock.sampling import RowViews

__all__ = ["NOT_FINITE", "Drawing", "Drawn"]

NOT_FINITE = "The model's output for this request is not finite."
_NOT_FOLLOWED = "The grammar of this request became too complex to follow."


class Drawn(NamedTuple):
    """What the rows of a step drew, by slot.

    Attributes:
        tokens: in order of position.
        failures: why the last draw failed.
        waiting: the place in the logits at which a draw waits.
        foreseen: likely next tokens, for the rows that have any.
    """

    tokens: defaultdict[int, list[SampledToken]]
    failures: dict[int, str]
    waiting: dict[int, int]
    foreseen: dict[int, tuple[int, ...]]


class Drawing:
    """Draws for the rows of one step.

    Args:
        slots: the sequences' tables; drawn tokens are appended to them.
        masking: knows their grammars and thinking budgets.
        drawn: the results are added here.
    """

    __slots__ = ("_drawn", "_masking", "_slots")

    def __init__(self, slots: SlotTables, masking: GrammarMasking, drawn: Drawn) -> None:
        self._slots = slots
        self._masking = masking
        self._drawn = drawn

    def draw(self, rows: Sequence[Row], logits: Tensor, pending: PendingMasks | None) -> None:
        """Draw the next token of all `rows`, then of those whose token was their next draft, until none is left.

        Draws one place after the other, as without drafts, so whatever a place depends on (masks, budgets, penalties)
        has seen exactly the tokens before it. Rows that depend on none of these draw at all places at once, and so do
        rows whose grammars can follow their drafts.

        Args:
            rows: at least one; all sample.
            logits: `[S, V]`, of each row's last known position and its drafts, row after row; changed.
            pending: the masks of the first places.
        """
        going, places = rows, list(accumulate([1 + len(row.drafts) for row in rows[:-1]], initial=0))
        if len(rows) < logits.shape[0]:
            watched = self._masking.watched(pending)
            free = [at for at, row in enumerate(rows) if row.drafts and self._draws_freely(row, watched)]
            if free:
                self._draw_at_once([rows[at] for at in free], [places[at] for at in free], logits)
            along = [at for at, row in enumerate(rows) if row.drafts and self._draws_along(row)]
            further = self._draw_along([(rows[at], places[at]) for at in along], logits)
            done = {*free, *along}
            further += [(rows[at], places[at]) for at in range(len(rows)) if at not in done]
            if not further:
                return
            going, places = [row for row, _ in further], [place for _, place in further]
            pending = self._masking.begin(going)
        while True:
            here = logits if len(places) == logits.shape[0] else logits[places]
            sampled = self._draw_once(going, here, pending)
            for row, place in zip(going, places, strict=True):
                if self._masking.waits(row.slot):
                    self._drawn.waiting[row.slot] = place
            right = [at for at, row in enumerate(going) if self._keep(row, sampled, at)]
            if not right:
                return
            going, places = [going[at] for at in right], [places[at] + 1 for at in right]
            pending = self._masking.begin(going)

    def foresee(self, rows: Sequence[Row]) -> None:
        """Note which next tokens are likely by the grammars of `rows`, which have drawn."""
        for row in rows:
            if row.slot not in self._drawn.waiting and row.slot not in self._drawn.failures:
                self._drawn.foreseen[row.slot] = self._masking.foresee(row.slot)

    def _draws_freely(self, row: Row, watched: Set[int]) -> bool:
        """Whether the draws of a row depend only on logits and positions, not on the tokens before."""
        return row.slot not in watched and not self._slots.sampling(row.slot).row_stages

    def _draw_at_once(self, rows: Sequence[Row], places: Sequence[int], logits: Tensor) -> None:
        """Draw at every place of `rows`, which draw freely and begin at `places`; keep draws up to the first misfit."""
        counts = [1 + len(row.drafts) for row in rows]
        own, next_positions = self._slots.next_draws(rows)
        samplings = [sampling for sampling, count in zip(own, counts, strict=True) for _ in range(count)]
        positions = [
            at for first, count in zip(next_positions, counts, strict=True) for at in range(first, first + count)
        ]
        if len(positions) < logits.shape[0]:
            chosen = [at for first, count in zip(places, counts, strict=True) for at in range(first, first + count)]
            logits = logits[chosen]
        sampled = self._masking.sample(logits, samplings, positions, None, see_nothing)
        first = 0
        for row, count in zip(rows, counts, strict=True):
            at = first
            while self._keep(row, sampled, at):
                at += 1
            first += count

    def _draws_along(self, row: Row) -> bool:
        """Whether the draws of a row depend only on their places and on a grammar that can follow its drafts."""
        return not self._slots.sampling(row.slot).row_stages and self._masking.goes_along(row.slot)

    def _draw_along(self, rows: Sequence[tuple[Row, int]], logits: Tensor) -> list[tuple[Row, int]]:
        """Draw at every place of rows whose grammars follow their drafts. Returns the rows that go on, and from where.

        Args:
            rows: each with its first place.
            logits: as for `draw`.
        """
        if not rows:
            return []
        own, next_positions = self._slots.next_draws([row for row, _ in rows])
        of = [logits[place : place + 1 + len(row.drafts)] for row, place in rows]
        sampled, spans = self._masking.sample_along([row for row, _ in rows], of, own, next_positions)
        further: list[tuple[Row, int]] = []
        for (row, place), span in zip(rows, spans, strict=True):
            for at in span[:-1]:
                self._keep(row, sampled, at)
            if self._masking.waits(row.slot):
                self._drawn.waiting[row.slot] = place + len(span) - 1
            elif self._keep(row, sampled, span[-1]):
                further.append((row, place + len(span)))
        return further

    def _draw_once(self, rows: Sequence[Row], logits: Tensor, pending: PendingMasks | None) -> Sampled:
        """One token of each row, from `logits` `[R, V]`."""
        samplings, positions = self._slots.next_draws(rows)

        def row_views(chosen: Sequence[int]) -> RowViews:
            return self._slots.views([rows[at].slot for at in chosen])

        return self._masking.sample(logits, samplings, positions, pending, row_views)

    def _keep(self, row: Row, sampled: Sampled, at: int) -> bool:
        """Keep what entry `at` drew for `row`. Returns whether it is the row's next draft."""
        if row.slot in self._drawn.waiting:
            return False
        if sampled.failed[at]:
            self._drawn.failures[row.slot] = _NOT_FOLLOWED if self._masking.is_broken(row.slot) else NOT_FINITE
            return False
        token, tokens = sampled.tokens[at], self._drawn.tokens[row.slot]
        self._slots.append(row.slot, token)
        tokens.append(SampledToken(token, sampled.logprobs[at], sampled.ranks[at], sampled.top_logprobs[at]))
        if len(tokens) > len(row.drafts) or token != row.drafts[len(tokens) - 1]:
            return False
        self._slots.confirm_draft(row.slot)
        return True
