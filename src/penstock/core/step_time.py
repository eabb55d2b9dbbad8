"""How long a step takes, learned from the steps that were measured.

A step's time is modelled as a sum of five parts: one for the step itself, one for each row that decodes and one for
each position that such a row looks back at, one for each position of a chunk and one for each pair of positions that
attention joins in chunks. All five are learned from every step, by a Kalman filter (Kalman 1960; Haykin, "Adaptive
Filter Theory"). It knows how certain each part is: a step with chunks, whose time could be due to any part, changes
the least certain parts most. Parts change over time: all together, as when other programs use the CPU, and each a
little on its own.

A drafted position has a price of its own, learned from decoding steps with drafts. The price depends on the number of
rows, because the products of a few rows cost little more than those of one. Such steps also correct what the rest of
them takes: where every step has drafts, nothing else would. The time of a draft model is learned
separately: for each pass through it, and for each position that it computes.

No clock and no randomness, only sums, products and quotients: the same steps and seconds give the same numbers on every
machine. Knows plans, but neither sequences nor what anybody wants of a step.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.contract.plan import GuessWork, Row, StepPlan

__all__ = ["Chunks", "Decoding", "StepTimes", "chunk_of"]

_NOISE = 0.1
"""Standard deviation of a step's time around the sum of its parts, as a fraction of that sum."""

_PACE = 0.03
"""By how much all parts change together from one step to the next. It corrects about a quarter of an error at once."""

_DRIFT = 0.003
"""By how much each part changes on its own from one step to the next."""

_DOUBT = 2.0
"""The uncertainty of a part after the first step, and its maximum, as a multiple of its value."""

_KNOWN = 64
_SELDOM = 4
"""After `_KNOWN` steps, one in `_SELDOM` is learned from, of those that take about as long as expected."""

_UNPROVEN = 8
"""Number of steps after which a single one has bounded influence: the first ones of a process are slow."""

_FORGETTING = 1 / 32
"""The share by which what is known of a draft's price becomes less in a step without drafts."""

_NOTHING = 1e-6
"""Seconds; no step takes less. Where less is expected, all parts of the step were set to 0: nothing is known of it."""

_SURPRISE = 2.0
"""No step counts as more than this many times longer or shorter than expected: machines pause now and then."""


class Decoding(NamedTuple):
    """What a step computes beside chunks.

    Attributes:
        steps: 1: the step itself.
        rows: rows that decode: each computes one position of known tokens and draws.
        seen: positions that these rows look back at, all together.
    """

    steps: float = 1.0
    rows: float = 0.0
    seen: float = 0.0


class Chunks(NamedTuple):
    """What a step computes of prompts.

    Attributes:
        positions: that it computes.
        pairs: of such a position and one that it looks back at.
    """

    positions: float = 0.0
    pairs: float = 0.0


_STEP = (*Decoding(1.0, 8.0, 8000.0), *Chunks(6.0, 24_000.0))
"""How much of each costs about as much as one of the first, on CPUs: believed after one step."""

_GUESSING = (1.0, 8.0)
"""The same for a draft model's passes and positions."""


def chunk_of(start: int, count: int, window: int | None) -> Chunks:
    """What positions `[start, start + count)` of one sequence take.

    Args:
        start: the first.
        count: how many.
        window: positions that one looks back to at most, itself included; None for all.
    """
    back = start + count / 2
    return Chunks(count, count * (back if window is None else min(back, window)))


class StepTimes:
    """The parts of a step's time. Owned by the scheduler.

    Args:
        window: see `chunk_of`.
    """

    __slots__ = ("_drafts", "_guessing", "_steps", "_with_chunks", "window")

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        self._drafts: dict[int, _Parts] = {}  # by the number of rows that decode, in powers of two
        self._steps = _Parts(_STEP)
        self._with_chunks = 0
        self._guessing = _Parts(_GUESSING)

    @property
    def knows_chunks(self) -> bool:
        """Whether a step with a chunk was measured."""
        return self._with_chunks > 0

    def guessing(self, passes: float, positions: float) -> float:
        """Seconds that a draft model takes for these; 0.0 while unknown."""
        return self._guessing.of((passes, positions))

    def learn_guessing(self, work: GuessWork) -> None:
        """A draft model took this long. Nothing is learned unless the time is positive and finite."""
        if 0.0 < work.seconds < float("inf") and work.passes:
            self._guessing.learn((float(work.passes), float(work.positions)), work.seconds, 0.0)

    def of(self, work: Decoding | Chunks) -> float:
        """Seconds that these amounts take; 0.0 while unknown."""
        return self._steps.of((*work, 0.0, 0.0) if isinstance(work, Decoding) else (0.0, 0.0, 0.0, *work))

    def of_plan(self, plan: StepPlan) -> float:
        """Seconds that a plan takes, without a draft model's work and what it reads from a store; 0.0 while unknown."""
        starts = [row.start for row in plan.rows if _decodes(row)]
        drafts = sum([len(row.drafts) for row in plan.rows])
        return self.of(self.decoding(starts)) + self.of(self._chunks_of(plan)) + drafts * self.draft_price(starts)

    def decoding(self, starts: list[int]) -> Decoding:
        """The amounts of rows that compute one position each, at `starts`, and draw."""
        seen = starts if self.window is None else [min(start, self.window) for start in starts]
        return Decoding(1.0, len(starts), sum(seen))

    def draft_price(self, starts: list[int]) -> float:
        """Seconds that a drafted position takes in a step with rows that decode at `starts`; 0.0 if nothing is known.

        Never more than twice what one of a prompt takes, so that a few slow steps do not end drafting for good; nor
        less than an eighth, so that a few quick ones do not make it free.
        """
        if not starts:
            return 0.0
        of_prompt = self.of(chunk_of(sum(starts) // len(starts), 1, self.window))
        learned = self._drafts.get(len(starts).bit_length())
        if learned is None:
            return of_prompt
        price = learned.of((1.0,))
        return min(max(price, of_prompt / 8), 2 * of_prompt) if of_prompt > 0 else price

    def row_price(self, starts: list[int]) -> float:
        """Seconds that a row takes in a step with rows that decode at `starts`; 0.0 if nothing is known."""
        return self.of(self.decoding(starts)._replace(steps=0.0)) / len(starts) if starts else 0.0

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """The plan took this long. Nothing is learned unless the time is positive and finite.

        Nor from a plan that draws nothing: some devices return before they have computed it.
        """
        if not 0.0 < seconds < float("inf") or not any(row.sample for row in plan.rows):
            return
        starts = [row.start for row in plan.rows if _decodes(row)]
        decoding, chunks = self.decoding(starts), self._chunks_of(plan)
        drafts = float(sum([len(row.drafts) for row in plan.rows]))
        if not chunks.positions:
            self._learn_price(starts, drafts, seconds, self.of(decoding))
        self._with_chunks += chunks.positions > 0
        self._steps.learn((*decoding, *chunks), seconds, drafts * self.draft_price(starts))

    def _learn_price(self, starts: list[int], drafts: float, seconds: float, of_rows: float) -> None:
        """A decoding step took this long, of which its rows are expected to take `of_rows`.

        While drafts are too expensive to be computed nothing is seen of them, and their price falls to that of a
        position of a prompt again.
        """
        rows = len(starts).bit_length()
        if drafts:
            self._drafts.setdefault(rows, _Parts((1.0,))).learn((drafts,), seconds, of_rows)
        elif rows in self._drafts:
            of_prompt = self.of(chunk_of(sum(starts) // len(starts), 1, self.window))
            if 0 < of_prompt < self._drafts[rows].of((1.0,)):
                self._drafts[rows].forget((of_prompt,), _FORGETTING)

    def _chunks_of(self, plan: StepPlan) -> Chunks:
        positions = pairs = 0.0
        for row in plan.rows:
            if not _decodes(row):
                of = chunk_of(row.start, row.count, self.window)
                positions, pairs = positions + of.positions, pairs + of.pairs
        return Chunks(positions, pairs)


def _decodes(row: Row) -> bool:
    """Whether a row computes one known token and draws the next; with drafts or without."""
    return row.sample and row.count == 1 + len(row.drafts)


class _Parts:
    """Seconds for one of each amount: a Kalman filter, whose state drifts and is never negative.

    Args:
        units: how much of each costs about as much as one of the first. Believed until measurements tell the parts
            apart; it need not be right.
    """

    __slots__ = ("_doubts", "_seconds", "_units", "learned")

    def __init__(self, units: tuple[float, ...]) -> None:
        self._units = units
        self._seconds = [0.0] * len(units)
        self._doubts: list[list[float]] = []  # the covariance of `_seconds`
        self.learned = 0

    def of(self, amounts: tuple[float, ...]) -> float:
        return sum([seconds * amount for seconds, amount in zip(self._seconds, amounts, strict=True)])

    def learn(self, amounts: tuple[float, ...], seconds: float, others: float) -> None:
        """A step with these amounts took this long; other parts are expected to take `others` of it."""
        if not self.learned:
            self._begin(amounts, seconds, others)
            self.learned = 1
            return
        own = self.of(amounts)
        expected = others + own
        if self.learned >= _UNPROVEN and expected > _NOTHING:
            seconds = min(max(seconds, expected / _SURPRISE), expected * _SURPRISE)
        error, noise = seconds - expected, _NOISE * max(seconds, expected)
        if self.learned < _KNOWN or self.learned % _SELDOM == 0 or abs(error) > noise:
            self._correct(amounts, own, error, noise)
            self._drift(self._believed(amounts, seconds))
        self.learned += 1

    def forget(self, seconds: tuple[float, ...], share: float) -> None:
        """Move by a share towards `seconds`, and doubt it as much."""
        for index, each in enumerate(seconds):
            gap = share * (each - self._seconds[index])
            self._seconds[index] += gap
            self._doubts[index][index] += gap**2

    def _begin(self, amounts: tuple[float, ...], seconds: float, others: float) -> None:
        """Believe `units`, and doubt every part."""
        believed = self._believed(amounts, seconds)
        left = max(0.0, 1.0 - others / seconds)
        self._seconds = [each * left for each in believed]
        self._doubts = [[0.0] * len(believed) for _ in believed]
        for index, each in enumerate(believed):
            self._doubts[index][index] = (_DOUBT * each) ** 2

    def _believed(self, amounts: tuple[float, ...], seconds: float) -> list[float]:
        """What one of each would take if `units` were right and these amounts took this many seconds together."""
        of_first = seconds / sum([amount / unit for amount, unit in zip(amounts, self._units, strict=True)])
        return [of_first / unit for unit in self._units]

    def _correct(self, amounts: tuple[float, ...], own: float, error: float, noise: float) -> None:
        """Give each part its share of an error in the time of these amounts, which was expected to be `own`."""
        parts, pace = self._seconds, _PACE * _PACE
        shares = [
            sum([doubt * amount for doubt, amount in zip(row, amounts, strict=True)]) + pace * own * part
            for row, part in zip(self._doubts, parts, strict=True)
        ]
        known = sum([share * amount for share, amount in zip(shares, amounts, strict=True)])
        whole = max(0.0, known) + noise * noise  # rounding may leave a little less than 0 of a doubt
        for share, part, row in zip(shares, parts, self._doubts, strict=True):
            less, more = share / whole, pace * part
            of_row = zip(row, parts, shares, strict=True)
            row[:] = [doubt + more * each - less * other for doubt, each, other in of_row]
        gain = error / whole
        self._seconds = [part + gain * share for part, share in zip(parts, shares, strict=True)]
        if min(self._seconds) < 0.0:
            self._lift()

    def _drift(self, believed: list[float]) -> None:
        """Increase the uncertainty of each part. None becomes so certain of 0 that it stays there."""
        for index, (part, row) in enumerate(zip(self._seconds, self._doubts, strict=True)):
            least = max(part, 0.1 * believed[index])
            if row[index] < (_DOUBT * least) ** 2:
                row[index] += (_DRIFT * least) ** 2

    def _lift(self) -> None:
        """If the lowest part is negative, set it to 0 and adjust correlated parts; repeat until none is negative."""
        lowest = min(range(len(self._seconds)), key=self._seconds.__getitem__)
        doubts = self._doubts[lowest]
        if doubts[lowest] > 0.0:
            back = self._seconds[lowest] / doubts[lowest]
            self._seconds = [part - back * doubt for part, doubt in zip(self._seconds, doubts, strict=True)]
        self._seconds = [max(0.0, part) for part in self._seconds]
