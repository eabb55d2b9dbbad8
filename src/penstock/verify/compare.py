"""Comparing what a request came to with what it comes to alone.

Decides what counts as the same: equal token ids, log probabilities that are equal as floats, and all else that a caller
is told. There is no tolerance anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

from penstock.verify.episode import Outcome

__all__ = ["Difference", "Mismatch", "HistogramBuilder", "compare", "total"]

Drawn = tuple[int, float]

_BESIDE = ("tops", "ranks", "text", "end", "prompt")


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two outcomes part, as (token id, log probability); None where there is no token.

    Attributes:
        at: index among the generated tokens.
        failure: why the request ended there; "" where it did not fail.
        what: where no token differs, what does: tops, ranks, text, end or prompt.
    """

    at: int
    alone: Drawn | None
    here: Drawn | None
    failure: str
    what: str = ""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A request that law 1 does not hold for.

    Attributes:
        run: which run of the schedule, from 1.
    """

    request: str
    run: int
    difference: Difference

    def explain(self) -> str:
        """One line for people."""
        at = self.difference
        failed = f" ({at.failure})" if at.failure else ""
        if at.what:
            return f"request {self.request} in run {self.run}: the tokens are the same, but not its {at.what}{failed}"
        return (
            f"request {self.request} in run {self.run}, generated token {at.at}:"
            f" alone {_spell(at.alone)}, here {_spell(at.here)}{failed}"
        )


@dataclass(frozen=True, slots=True)
class HistogramBuilder:
    """How far outcomes agree.

    Attributes:
        tokens: that were compared.
        requests: of which something differs.
        ids: places with another token id, a token too few or a token too many. One is followed by many, since what
            comes after it has another past.
        logprobs: places with the same id and another log probability.
        others: requests with the same tokens and log probabilities, and other alternatives, ranks, text, end or prompt
            scores.
        largest: largest difference of log probabilities, as long as the tokens so far are the same.
    """

    tokens: int
    requests: int
    ids: int
    logprobs: int
    largest: float
    others: int = 0

    @property
    def mismatches(self) -> int:
        """Places where anything differs."""
        return self.ids + self.logprobs + self.others


def compare(alone: Outcome, here: Outcome) -> tuple[HistogramBuilder, Difference | None]:
    """Compare one request's outcomes; the difference is None where there is none."""
    ids = logprobs = 0
    largest = 0.0
    first: Difference | None = None
    pairs = zip_longest(_drawn(alone), _drawn(here))
    for at, (expected, got) in enumerate(pairs):
        if expected == got:
            continue
        first = first or Difference(at, expected, got, here.failure)
        if expected is None or got is None or expected[0] != got[0]:
            ids += 1
            continue
        logprobs += 1
        if not ids:
            largest = max(largest, abs(expected[1] - got[1]))
    other = next((name for name in _BESIDE if getattr(alone, name) != getattr(here, name)), "") if not first else ""
    if other:
        first = Difference(len(alone.tokens), None, None, here.failure, other)
    return HistogramBuilder(len(alone.tokens), int(first is not None), ids, logprobs, largest, int(bool(other))), first


def total(tallies: Iterable[HistogramBuilder]) -> HistogramBuilder:
    """Many tallies as one."""
    each = list(tallies)
    return HistogramBuilder(
        tokens=sum(tally.tokens for tally in each),
        requests=sum(tally.requests for tally in each),
        ids=sum(tally.ids for tally in each),
        logprobs=sum(tally.logprobs for tally in each),
        largest=max((tally.largest for tally in each), default=0.0),
        others=sum(tally.others for tally in each),
    )


def _drawn(outcome: Outcome) -> list[Drawn]:
    return list(zip(outcome.tokens, outcome.logprobs, strict=True))


def _spell(drawn: Drawn | None) -> str:
    """A token for people, with every bit of its log probability."""
    return "none" if drawn is None else f"id {drawn[0]} logprob {drawn[1]!r}"
