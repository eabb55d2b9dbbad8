"""Seconds for one of each of several amounts, learned from sums: a Kalman filter.

What was measured is the time of all amounts of a step together. The filter (Kalman 1960; Haykin, "Adaptive Filter
Theory") knows how certain each part is: a step whose time could be due to any part changes the least certain parts
most. Parts change over time: all together, as when other programs use the CPU, and each a little on its own.

No clock and no randomness, only sums, products, quotients and square roots: the same steps and seconds give the same
numbers on every machine. Does not know what the amounts are.
"""

from __future__ import annotations

from math import sqrt

from penstock.contract.errors import ConfigError
from penstock.contract.known_times import KnownParts

__all__ = ["PartTimes"]

_PACE = 0.03
"""By how much all parts change together from one step to the next."""

_DRIFT = 0.003
"""By how much each part changes on its own from one step to the next."""

_DOUBT = 2.0
"""The uncertainty of a part after the first step, and its maximum, as a multiple of its value."""

_KNOWN = 64
_SELDOM = 4
"""After `_KNOWN` steps, only one in `_SELDOM` of the steps that take about as long as expected is learned from."""

_UNPROVEN = 8
"""Number of steps after which a single one has bounded influence: the first ones of a process are slow."""

_NOTHING = 1e-6
"""Seconds; no step takes less. If less is expected, all parts of the step were set to 0: nothing is known of it."""

_SURPRISE = 1.5
"""No step counts as more than this many times longer or shorter than expected: machines pause now and then."""


class PartTimes:
    """Seconds for one of each amount: a Kalman filter, whose state drifts and is never negative.

    Args:
        units: how much of each costs about as much as one of the first. Believed until measurements tell the parts
            apart, if nothing better is known; it need not be right.
        known: what is known before the first step; None if nothing is.
        noise: standard deviation of a step's time around the sum of its parts, as a fraction of that sum. The less
            noise, the more of an error is due to parts that have changed: 0.1 corrects a quarter at once, 0.06 two
            fifths.

    Raises:
        ConfigError: `known` has another number of parts.

    Attributes:
        learned: how many steps it was learned from, including those of earlier processes.
    """

    __slots__ = ("_doubts", "_noise", "_seconds", "_units", "learned")

    def __init__(self, units: tuple[float, ...], known: KnownParts | None = None, noise: float = 0.1) -> None:
        self._units = units
        self._noise = noise
        self._seconds = [0.0] * len(units)
        self._doubts: list[list[float]] = []  # the covariance of `_seconds`; empty while nothing is known
        self.learned = 0
        if known is not None:
            self._trust(known)

    def _trust(self, known: KnownParts) -> None:
        if len(known.seconds) != len(self._units):
            raise ConfigError("step_times", f"{len(known.seconds)} parts where there are {len(self._units)}")
        self._seconds = list(known.seconds)
        self._doubts = [[known.pace**2 * one * other for other in known.seconds] for one in known.seconds]
        for index, doubt in enumerate(known.doubts):
            self._doubts[index][index] += doubt * doubt
        self.learned = known.learned

    @property
    def known(self) -> KnownParts | None:
        """What is known now; None if nothing is. How the doubts of parts are correlated is left out."""
        if not self.learned:
            return None
        doubts = [sqrt(max(0.0, row[index])) for index, row in enumerate(self._doubts)]
        return KnownParts(tuple(self._seconds), tuple(doubts), learned=self.learned)

    def of(self, amounts: tuple[float, ...]) -> float:
        """Seconds that these amounts take together; 0.0 while nothing is known."""
        return sum([seconds * amount for seconds, amount in zip(self._seconds, amounts, strict=True)])

    def learn(self, amounts: tuple[float, ...], seconds: float, others: float) -> None:
        """A step with these amounts took this long; other parts are expected to take `others` of it."""
        if not self._doubts:
            self._begin(amounts, seconds, others)
            self.learned = 1
            return
        own = self.of(amounts)
        expected = others + own
        if self.learned >= _UNPROVEN and expected > _NOTHING:
            seconds = min(max(seconds, expected / _SURPRISE), expected * _SURPRISE)
        error, noise = seconds - expected, self._noise * max(seconds, expected)
        if self.learned < _KNOWN or self.learned % _SELDOM == 0 or abs(error) > noise:
            self._correct(amounts, own, error, noise)
            self._drift(self._believed(amounts, seconds))
        self.learned += 1

    def forget(self, seconds: tuple[float, ...], share: float) -> None:
        """Move the parts by a share of the way towards `seconds`, and increase their doubts by as much."""
        for index, each in enumerate(seconds):
            gap = share * (each - self._seconds[index])
            self._seconds[index] += gap
            self._doubts[index][index] += gap**2

    def _begin(self, amounts: tuple[float, ...], seconds: float, others: float) -> None:
        """Start from `units`, with doubt about every part."""
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
