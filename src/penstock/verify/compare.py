"""Compares the outcome of a request in a schedule with its outcome alone.

Two outcomes are the same if their token ids, their log probabilities (as floats) and everything else that a caller is
told are equal. No comparison has a tolerance.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

from penstock.verify.run import Outcome

__all__ = ["Difference", "Mismatch", "Tally", "compare", "total"]

Drawn = tuple[int, float]

_BESIDE = ("tops", "ranks", "text", "end", "prompt")


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two outcomes differ, each as (token id, log probability); None where there is no token.

    Attributes:
        at: index among the generated tokens.
        failure: why the request failed there; "" if it did not.
        what: what differs if all tokens are equal: tops, ranks, text, end or prompt; "" otherwise.
    """

    at: int
    alone: Drawn | None
    here: Drawn | None
    failure: str
    what: str = ""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A request whose answer depended on the schedule.

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
class Tally:
    """How many of the compared places agree.

    Attributes:
        tokens: how many tokens were compared.
        requests: how many requests differ anywhere.
        ids: places with another token id, a token too few or a token too many. The first one in a request is usually
            followed by many, because everything after it continues a different text.
        logprobs: places with the same id and a different log probability.
        others: requests with the same tokens and log probabilities, but other top tokens, ranks, text, end or prompt
            scores.
        largest: largest difference of log probabilities before the first token id that differs.
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


def compare(alone: Outcome, here: Outcome) -> tuple[Tally, Difference | None]:
    """Compare two outcomes of one request; the difference is None if they are the same."""
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
    return Tally(len(alone.tokens), int(first is not None), ids, logprobs, largest, int(bool(other))), first


def total(tallies: Iterable[Tally]) -> Tally:
    """The sum of tallies."""
    each = list(tallies)
    return Tally(
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
