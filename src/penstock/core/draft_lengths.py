"""How many guessed tokens a step computes: as many as increase its tokens per second.

A drafted position costs time, having any costs some more, and a position yields a token with the probability that it
and all drafts before it are right. Times come from `core.step_time`, probabilities from `core.draft_chances`. Both
follow from inputs of the scheduler, so the replay of a recorded run decides the same.

A right token saves one row of a later step. It also saves that row's share of the step's fixed cost, the time that a
step takes however many rows it has, but only if all rows get ahead alike, or if a sequence waits to take the place of
one that ends. Otherwise the remaining rows need as many steps as before, each with fewer rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import inf

__all__ = ["AHEAD", "DELAY", "Offer", "draft_lengths"]

DELAY = 0.25
"""The fraction by which drafts of some rows may lengthen a step while other rows have none: rows without drafts would
wait for nothing."""

AHEAD = 0.5
"""The part of its share of a step's fixed cost that counts as saved by a row that gets ahead of others. It lies between
none, as in a batch that ends with its slowest row, and all, as when newcomers take the places of rows that end."""

Offer = Sequence[float]
"""For each token of a guess, the probability that it is right if the tokens before it are; below 1."""


def draft_lengths(
    offers: Sequence[Offer],
    rows: int,
    seconds: float,
    price: float,
    budget: int,
    target: float = inf,
    *,
    once: float = 0.0,
    row_price: float = 0.0,
    common: float = inf,
) -> list[int]:
    """How many tokens of each offer are worth their time; the most likely tokens are taken first.

    If every draft costs the same, the best set holds all drafts that yield more per second than the step as a whole; or
    it is empty, if all that they save is less than the cost of having any.

    Args:
        offers: one for each row that has a guess.
        rows: all rows that draw a token, with and without offers.
        seconds: time of the step without drafts; 0.0 if unknown.
        price: seconds that one more drafted position takes.
        once: seconds that having any drafts adds to a step, besides the price of each.
        budget: most drafts in all.
        target: seconds that a step with drafts may take, since readers of streams see the pause.
        row_price: seconds that a row takes, without its share of the step's fixed cost.
        common: right tokens by which all rows get ahead alike; a token beyond them is worth less (`AHEAD`).
    """
    counts, ahead = [0] * len(offers), [0.0] * len(offers)
    likeliest = [(-offer[0], index) for index, offer in enumerate(offers) if offer]
    heapify(likeliest)
    brought, taken, saved = float(rows), seconds + once, -once
    undrafted = seconds / rows
    longest = min(target, seconds * (1 + DELAY) if len(likeliest) < rows else inf)
    while likeliest and budget > 0:
        chance, index = -likeliest[0][0], likeliest[0][1]
        value = taken / brought
        if chance * value < price or (price > 0 and taken + price > longest):
            break
        heappop(likeliest)
        leads = ahead[index] + chance > common
        if leads and chance * _in_the_lead(value, row_price) < price:
            continue
        saved += chance * (_in_the_lead(undrafted, row_price) if leads else undrafted) - price
        counts[index] += 1
        budget -= 1
        brought += chance
        taken += price
        ahead[index] += chance
        if counts[index] < len(offers[index]):
            heappush(likeliest, (-chance * offers[index][counts[index]], index))
    return counts if saved >= 0.0 else [0] * len(offers)


def _in_the_lead(value: float, row_price: float) -> float:
    """Seconds saved by a right token with which its row gets ahead of others; `value` if all rows got ahead alike."""
    return row_price + AHEAD * max(0.0, value - row_price)
