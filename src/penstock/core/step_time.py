"""How long a step takes, learned from the steps that were measured.

A step's time is modelled as a sum of six parts: one for the step itself, one for each of the first rows that decode,
which are computed while weights are read, one for each further row and one for each position that a row looks back at,
one for each position of a chunk and one for each pair of positions that attention joins in chunks. All six are learned
from every step (`core.part_times`). What is known before the first step (`contract.known_times`) comes from an earlier
process or from the program's cost; it need not be right.

Drafts have a price of their own, learned from decoding steps with drafts: for having any, since one position more than
there are rows may begin another tile of every product, and for each position. It depends on the number of rows, because
the products of a few rows cost little more than those of one. If every step has drafts, these steps also correct the
parts of everything else: nothing else would. The time of a draft model is learned separately, for each pass through it
and for each position that it computes. The time of reading stored positions is also learned separately.

No clock and no randomness: the same steps and seconds give the same numbers on every machine. Knows plans, but neither
sequences nor how long a step should take.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.contract.known_times import KnownTimes
from penstock.contract.plan import GuessWork, Row, StepPlan
from penstock.core.part_times import PartTimes

__all__ = ["FEW", "Amounts", "Chunks", "Decoding", "DraftPrice", "StepTimes", "chunk_of", "row_decodes"]

FEW = 4
"""Rows that a processor computes in little more time than one: it waits for the weights of all of them anyway."""

_FORGETTING = 1 / 32
_UNDRAFTED = 32
"""After `_UNDRAFTED` steps in a row without drafts, each further one lowers what is known of their price by this share.
"""

_ONLY_DRAFTED = 4
"""After so many steps in a row with drafts, further ones correct what the rest of a step takes. Before that, only steps
without drafts do: otherwise the rest would seem to take what having drafts costs."""

_MOST_FOR_ANY = 4
"""Having drafts costs at most as much as so many positions of a prompt, however slow a few steps were."""


class Decoding(NamedTuple):
    """What a step computes besides chunks.

    Attributes:
        steps: 1: the step itself.
        few: the first rows that decode, `FEW` at most: each computes one position of known tokens and draws.
        rows: further rows that decode.
        seen: positions that all these rows look back at together.
    """

    steps: float = 1.0
    few: float = 0.0
    rows: float = 0.0
    seen: float = 0.0


class Chunks(NamedTuple):
    """What a step computes of prompts.

    Attributes:
        positions: number of positions that it computes.
        pairs: number of pairs of such a position and one that it looks back at.
    """

    positions: float = 0.0
    pairs: float = 0.0


class Amounts(NamedTuple):
    """What a step computes.

    Attributes:
        starts: where the rows that decode begin.
        decoding: the amounts of these rows.
        chunks: the amounts of prompts.
        drafts: positions of guessed tokens.
    """

    starts: list[int]
    decoding: Decoding
    chunks: Chunks
    drafts: int


class DraftPrice(NamedTuple):
    """What drafts take in a step.

    Attributes:
        once: seconds of a step for having any.
        each: seconds of each drafted position.
    """

    once: float = 0.0
    each: float = 0.0

    def of(self, count: int) -> float:
        """Seconds of so many drafted positions."""
        return self.once + count * self.each if count else 0.0


_STEP = (*Decoding(1.0, 16.0, 8.0, 8000.0), *Chunks(6.0, 24_000.0))
"""How much of each costs about as much as one of the first, on CPUs: believed after one step."""

_GUESSING = (1.0, 8.0)
"""The same for a draft model's passes and positions."""

_DRAFTS = (1.0, 2.0)
"""The same for having drafts, and for each drafted position."""

_ONE = (1.0,)
"""The same where there is one part."""

_NOISE = 0.06
"""Of a step (`PartTimes`). Machines change their pace within a second: with 0.1, as for all other times, errors of
expected times were a tenth to a quarter larger (ADR 52)."""


def chunk_of(start: int, count: int, window: int | None) -> Chunks:
    """The amounts of positions `[start, start + count)` of one sequence.

    Args:
        start: the first position.
        count: how many positions.
        window: the most positions that one looks back to, itself included; None for all.
    """
    back = start + count / 2
    return Chunks(count, count * (back if window is None else min(back, window)))


class StepTimes:
    """The parts of a step's time. Owned by the scheduler.

    Args:
        window: see `chunk_of`.
        known: what is known before the first step; None if nothing is.

    Raises:
        ConfigError: `known` has other parts than these.

    Attributes:
        knows_chunks: whether a step with a chunk was measured.
        error: error of the predicted time of the last step given to `learn`, as a share of the time that it took; None
            if nothing was learned from it, or nothing was known before.
        foreseen: seconds that the last step was expected to take, without a draft model's work and what it read; 0.0
            if nothing was known.
    """

    __slots__ = (
        "_drafts",
        "_guessing",
        "_in_a_row",
        "_reading",
        "_steps",
        "error",
        "foreseen",
        "knows_chunks",
        "window",
    )

    def __init__(self, window: int | None = None, known: KnownTimes | None = None) -> None:
        self.window = window
        self.error: float | None = None
        self.foreseen = 0.0
        self.knows_chunks = known is not None and known.chunks
        self._steps = PartTimes(_STEP, None if known is None else known.steps, _NOISE)
        self._guessing = PartTimes(_GUESSING, None if known is None else known.guessing)
        self._reading = PartTimes(_ONE, None if known is None else known.reading)
        self._in_a_row = 0  # steps with drafts since the last one without; or minus the steps since the last one with
        drafts = () if known is None else known.drafts
        self._drafts = {rows: PartTimes(_DRAFTS, parts) for rows, parts in drafts}

    @property
    def known(self) -> KnownTimes | None:
        """All that is known now, for another process; None if no step was measured."""
        steps = self._steps.known
        if steps is None:
            return None
        drafts = ((rows, self._drafts[rows].known) for rows in sorted(self._drafts))
        return KnownTimes(
            steps,
            self.knows_chunks,
            self._guessing.known,
            tuple((rows, parts) for rows, parts in drafts if parts is not None),
            self._reading.known,
        )

    def guessing(self, passes: float, positions: float) -> float:
        """Seconds that a draft model takes for these; 0.0 while unknown."""
        return self._guessing.of((passes, positions))

    def learn_guessing(self, work: GuessWork) -> None:
        """Learn how long a draft model took. Nothing is learned unless the time is positive and finite."""
        if 0.0 < work.seconds < float("inf") and work.passes:
            self._guessing.learn((float(work.passes), float(work.positions)), work.seconds, 0.0)

    def reading(self, positions: float) -> float:
        """Seconds that reading so many stored positions takes; 0.0 while unknown."""
        return self._reading.of((positions,))

    def learn_reading(self, positions: float, seconds: float) -> None:
        """Learn how long reading took. Nothing is learned unless both are positive, and the time is finite."""
        if positions > 0 and 0.0 < seconds < float("inf"):
            self._reading.learn((positions,), seconds, 0.0)

    def of(self, work: Decoding | Chunks) -> float:
        """Seconds that these amounts take; 0.0 while unknown."""
        return self._steps.of((*work, 0.0, 0.0) if isinstance(work, Decoding) else (0.0, 0.0, 0.0, 0.0, *work))

    def of_plan(self, plan: StepPlan) -> float:
        """Seconds that a plan takes, without a draft model's work and what it reads from a store; 0.0 while unknown."""
        return self.of_step(self.amounts(plan))

    def of_step(self, step: Amounts) -> float:
        """Seconds that a step with these amounts takes; 0.0 while unknown."""
        return self._steps.of((*step.decoding, *step.chunks)) + self._of_drafts(step)

    def _of_drafts(self, step: Amounts) -> float:
        return self.draft_price(step.starts).of(step.drafts) if step.drafts else 0.0

    def amounts(self, plan: StepPlan) -> Amounts:
        """What a plan computes."""
        starts: list[int] = []
        positions = pairs = 0.0
        drafts = 0
        for row in plan.rows:
            drafts += len(row.drafts)
            if row_decodes(row):
                starts.append(row.start)
            elif not row.stored:
                of = chunk_of(row.start, row.count, self.window)
                positions, pairs = positions + of.positions, pairs + of.pairs
        return Amounts(starts, self.decoding(starts), Chunks(positions, pairs), drafts)

    def decoding(self, starts: list[int]) -> Decoding:
        """The amounts of rows that compute one position each, at `starts`, and draw."""
        seen = starts if self.window is None else [min(start, self.window) for start in starts]
        few = min(FEW, len(starts))
        return Decoding(1.0, few, len(starts) - few, sum(seen))

    def draft_price(self, starts: list[int]) -> DraftPrice:
        """What drafts take in a step with rows that decode at `starts`; 0.0 while nothing is known.

        A position never takes more than twice what one of a prompt does, so that a few slow steps do not end drafting
        for good; nor less than an eighth, so that a few quick ones do not make it free.
        """
        if not starts:
            return DraftPrice()
        of_prompt = self.of(chunk_of(sum(starts) // len(starts), 1, self.window))
        learned = self._drafts.get(len(starts).bit_length())
        if learned is None:
            return DraftPrice(0.0, of_prompt)
        once, each = learned.of((1.0, 0.0)), learned.of((0.0, 1.0))
        if of_prompt <= 0:
            return DraftPrice(once, each)
        return DraftPrice(min(once, _MOST_FOR_ANY * of_prompt), min(max(each, of_prompt / 8), 2 * of_prompt))

    def row_price(self, starts: list[int]) -> float:
        """Seconds that a row takes in a step with rows that decode at `starts`; 0.0 if nothing is known."""
        return self.of(self.decoding(starts)._replace(steps=0.0)) / len(starts) if starts else 0.0

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Learn how long a plan took. Nothing is learned unless the time is positive and finite.

        Nor is anything learned from a plan that draws nothing: some devices return before they have computed it.
        """
        self.error = None
        step = self.amounts(plan)
        self.foreseen = expected = self.of_step(step)
        if not 0.0 < seconds < float("inf") or not any(row.sample for row in plan.rows):
            return
        if expected > 0.0:
            self.error = abs(expected - seconds) / seconds
        self._in_a_row = max(0, self._in_a_row) + 1 if step.drafts else min(0, self._in_a_row) - 1
        if not step.chunks.positions:
            self._learn_price(step.starts, step.drafts, seconds, self.of(step.decoding))
        self.knows_chunks = self.knows_chunks or step.chunks.positions > 0
        if not 0 < self._in_a_row <= _ONLY_DRAFTED:
            self._steps.learn((*step.decoding, *step.chunks), seconds, self._of_drafts(step))

    def _learn_price(self, starts: list[int], drafts: int, seconds: float, of_rows: float) -> None:
        """Learn the price of drafts from a decoding step, of whose `seconds` its rows are expected to take `of_rows`.

        While drafts are too expensive to be computed, none are measured, and the price of one returns to that of a
        position of a prompt.
        """
        rows = len(starts).bit_length()
        if drafts:
            self._drafts.setdefault(rows, PartTimes(_DRAFTS)).learn((1.0, float(drafts)), seconds, of_rows)
        elif rows in self._drafts and self._in_a_row < -_UNDRAFTED:
            learned = self._drafts[rows]
            of_prompt = self.of(chunk_of(sum(starts) // len(starts), 1, self.window))
            if 0 < of_prompt < learned.of((1.0, 1.0)):
                learned.forget((0.0, min(of_prompt, learned.of((0.0, 1.0)))), _FORGETTING)


def row_decodes(row: Row) -> bool:
    """Whether a row computes one known token and draws the next; with drafts or without."""
    return row.sample and row.count == 1 + len(row.drafts)
