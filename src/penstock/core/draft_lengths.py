"""How many of the guessed tokens a step computes: as many as bring more tokens a second than the step does without.

A drafted position costs time, and brings a token with the chance that it and all drafts before it are right. Time is
what `core.step_time` learned, chances what `core.draft_chances` did. Both are inputs of the scheduler or follow from
them, so a recorded run decides the same again.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import inf

__all__ = ["DELAY", "Offer", "draft_lengths"]

DELAY = 0.25
"""By how much of its time a step may get longer for the drafts of some rows while others have none: these would wait,
and gain nothing."""


Offer = Sequence[float]
"""A guess: for each token the chance that it is right if those before it are, below 1."""


def draft_lengths(
    offers: Sequence[Offer], rows: int, seconds: float, price: float, budget: int, target: float = inf
) -> list[int]:
    """How many tokens of each offer are worth their time, the likeliest first.

    With a price that does not depend on how many there are, the best set is that of all drafts which bring more for
    their time than the step as a whole brings then.

    Args:
        offers: of different rows.
        rows: that draw a token in any case, those with offers among them.
        seconds: the step takes without drafts; 0.0 where nothing is known yet.
        price: seconds that one more drafted position takes.
        budget: most drafts in all.
        target: seconds that a step with drafts may take; whoever reads a stream sees how long each takes.
    """
    counts = [0] * len(offers)
    likeliest = [(-offer[0], index) for index, offer in enumerate(offers) if offer]
    heapify(likeliest)
    brought, taken = float(rows), seconds
    longest = min(target, seconds * (1 + DELAY) if len(likeliest) < rows else inf)
    while likeliest and budget > 0:
        chance, index = -likeliest[0][0], likeliest[0][1]
        if chance * taken < brought * price or (price > 0 and taken + price > longest):
            break
        heappop(likeliest)
        counts[index] += 1
        budget -= 1
        brought += chance
        taken += price
        if counts[index] < len(offers[index]):
            heappush(likeliest, (-chance * offers[index][counts[index]], index))
    return counts
