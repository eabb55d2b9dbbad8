"""How long a step takes, learned from the steps that were measured.

A step's time is taken to be a sum of five parts: for being a step, for each row that decodes, and for each position
that such a row looks back at; for each position of a chunk, and for each pair of positions that attention joins in
chunks. Steps that only decode teach the first three, steps with chunks the last two: what remains when the others are
taken off. A drafted position has a price of its own, learned from steps that decode and have drafts: products of a few
rows cost little more than those of one, so it depends on how many rows there are. Each part takes a share of the error
by how much there was of it: the normalised least mean squares rule (Nagumo and Noda 1967; Haykin, "Adaptive Filter
Theory", chapter 6).

What a draft model takes is learned apart: for each pass through it, and for each position that it computes.

No clock and no randomness: the same steps and seconds give the same numbers on every machine, by nothing but sums,
products and quotients. Knows plans, but neither sequences nor what anybody wants of a step.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.contract.plan import GuessWork, Row, StepPlan

__all__ = ["Chunks", "Decoding", "StepTimes", "chunk_of"]

_RATE = 0.25
"""The share of an error that is corrected at once: a quarter follows a change within some ten steps."""

_UNPROVEN = 8
"""Steps after which a single one may no longer surprise: the first ones of a process are slow."""

_SURPRISE = 2.0
"""No step counts as more than so many times as long as expected, or as short: machines pause now and then."""


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


_DECODING = Decoding(1.0, 8.0, 8000.0)
_CHUNKS = Chunks(1.0, 4000.0)
"""How much of each is about as dear as one of the first, on processors. This decides who takes which share of an error
until measurements tell the parts apart; it need not be right."""


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

    __slots__ = ("_chunks", "_decoding", "_drafts", "_guessing", "window")

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        self._drafts: dict[int, _Parts] = {}  # by the number of rows that decode, in powers of two
        self._decoding = _Parts(_DECODING)
        self._chunks = _Parts(_CHUNKS)
        self._guessing = _Parts(_GUESSING)

    @property
    def knows_chunks(self) -> bool:
        """Whether a step with a chunk was measured."""
        return self._chunks.learned > 0

    def guessing(self, passes: float, positions: float) -> float:
        """Seconds that a draft model takes for these; 0.0 while nothing is known of it."""
        return self._guessing.of((passes, positions))

    def learn_guessing(self, work: GuessWork) -> None:
        """A draft model took so long. Nothing is learned without a positive, finite number."""
        if 0.0 < work.seconds < float("inf") and work.passes:
            self._guessing.learn((float(work.passes), float(work.positions)), work.seconds, 0.0)

    def of(self, work: Decoding | Chunks) -> float:
        """Seconds that so much takes; 0.0 while nothing is known of it."""
        return (self._decoding if isinstance(work, Decoding) else self._chunks).of(work)

    def decoding(self, starts: list[int]) -> Decoding:
        """What rows take that compute one position each, at `starts`, and draw."""
        seen = starts if self.window is None else [min(start, self.window) for start in starts]
        return Decoding(1.0, len(starts), sum(seen))

    def draft_price(self, starts: list[int]) -> float:
        """Seconds that a drafted position takes in a step with rows that decode at `starts`; 0.0 if nothing is known.

        Never more than twice what one of a prompt takes, so that a few slow steps do not end drafting for good.
        """
        if not starts:
            return 0.0
        of_prompt = self.of(chunk_of(sum(starts) // len(starts), 1, self.window))
        learned = self._drafts.get(len(starts).bit_length())
        if learned is None:
            return of_prompt
        price = learned.of((1.0,))
        return min(price, 2 * of_prompt) if of_prompt > 0 else price

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """The plan took so long. Nothing is learned without a positive, finite number.

        Nor from a plan that draws nothing: some devices return from that before they have computed it.
        """
        if not 0.0 < seconds < float("inf") or not any(row.sample for row in plan.rows):
            return
        starts = [row.start for row in plan.rows if _decodes(row)]
        decoding, chunks = self.decoding(starts), self._chunks_of(plan)
        drafts = float(sum([len(row.drafts) for row in plan.rows]))
        if chunks.positions:
            self._chunks.learn(chunks, seconds, self.of(decoding) + drafts * self.draft_price(starts))
        elif drafts:
            prices = self._drafts.setdefault(len(starts).bit_length(), _Parts((1.0,)))
            prices.learn((drafts,), seconds, self.of(decoding))
        else:
            self._decoding.learn(decoding, seconds, 0.0)

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
    """Seconds for one of each amount; corrected with every step that tells something of them."""

    __slots__ = ("_seconds", "_units", "learned")

    def __init__(self, units: tuple[float, ...]) -> None:
        self._units = units
        self._seconds = [0.0] * len(units)
        self.learned = 0

    def of(self, amounts: tuple[float, ...]) -> float:
        return sum([seconds * amount for seconds, amount in zip(self._seconds, amounts, strict=True)])

    def learn(self, amounts: tuple[float, ...], seconds: float, others: float) -> None:
        """A step with these amounts took so long, of which `others` is what other parts are expected to take."""
        expected = others + self.of(amounts)
        if self.learned >= _UNPROVEN:
            seconds = min(max(seconds, expected / _SURPRISE), expected * _SURPRISE)
        shares = [amount / unit for amount, unit in zip(amounts, self._units, strict=True)]
        rate = max(_RATE, 1 / (1 + self.learned))
        error = rate * (seconds - expected) / sum([share * share for share in shares])
        for index, share in enumerate(shares):
            self._seconds[index] = max(0.0, self._seconds[index] + error * share / self._units[index])
        self.learned += 1
