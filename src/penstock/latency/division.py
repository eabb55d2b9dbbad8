"""How the time of one step is divided among what it computed.

How long a step takes is learned from all steps (`core.step_time`). Here that is used in reverse: in a step with
decoding rows and chunks of prompts, each gets a share of the measured seconds in proportion to its expected seconds.
While nothing is known, positions decide the shares. Pure: the same plan, result and times give the same shares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from penstock.contract.plan import Row, StepPlan, StepResult
from penstock.core.step_time import StepTimes, chunk_of

__all__ = ["StepShares", "divide"]

_NO_ROWS: Mapping[int, float] = {}


class StepShares(NamedTuple):
    """What the seconds of a step were spent on. The first five sum to all of them.

    Attributes:
        decode: rows that decode, and the fixed cost of a step.
        prompts: chunks of prompts.
        drafting: the draft model.
        restored: reading stored blocks.
        engine: the rest: time in which the runner was not busy.
        decoding: how many rows decode.
        of_rows: seconds of each row that advances a prompt, by slot: a chunk, or a row that reads blocks.
    """

    decode: float
    prompts: float
    drafting: float
    restored: float
    engine: float
    decoding: int
    of_rows: Mapping[int, float]

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.decode + self.prompts + self.drafting + self.restored + self.engine


def divide(plan: StepPlan, result: StepResult, seconds: float, times: StepTimes) -> StepShares:
    """The shares of a step that began `seconds` before its result.

    Takes time in proportion to the number of rows, but makes no call for a row that decodes.
    """
    busy = min(result.seconds, seconds) if 0.0 < result.seconds < math.inf else seconds
    engine, drafting = seconds - busy, 0.0
    if result.guessing is not None:
        drafting = min(max(result.guessing.seconds, 0.0), busy)
        busy -= drafting
    others = [row for row in plan.rows if not row.sample or (row.count > 1 and row.count != 1 + len(row.drafts))]
    decoding = len(plan.rows) - len(others)
    if not others:
        decode = busy if decoding else 0.0
        return StepShares(decode, 0.0, drafting, 0.0, engine + busy - decode, decoding, _NO_ROWS)
    restored = min(max(result.restoring, 0.0), busy)
    reading = [row for row in others if row.stored]
    chunks = [row for row in others if not row.stored]
    if not chunks and not decoding:
        restored = busy
    of_rows = _weighed({row.slot: float(row.count) for row in reading}, restored)
    busy -= restored
    weights = _weights(plan, chunks, decoding, times)
    of_rows |= _weighed(weights, busy)
    decode = of_rows.pop(_DECODING, 0.0)
    return StepShares(decode, busy - decode, drafting, restored, engine, decoding, of_rows)


_DECODING = -1
"""Stands in place of a slot for all rows that decode."""


def _weights(plan: StepPlan, chunks: list[Row], decoding: int, times: StepTimes) -> dict[int, float]:
    """The expected seconds of each chunk, by slot, and of all rows that decode together; or their positions."""
    weights = {row.slot: times.of(chunk_of(row.start, row.count, times.window)) for row in chunks}
    if decoding:
        rows = [row for row in plan.rows if row.sample and (row.count == 1 or row.count == 1 + len(row.drafts))]
        starts, drafts = [row.start for row in rows], sum([len(row.drafts) for row in rows])
        weights[_DECODING] = times.of(times.decoding(starts))
        if drafts:
            weights[_DECODING] += times.draft_price(starts).of(drafts)
        if min(weights.values()) > 0.0:
            return weights
        weights[_DECODING] = float(decoding + drafts)
    elif not chunks or min(weights.values()) > 0.0:
        return weights
    return weights | {row.slot: float(row.count) for row in chunks}


def _weighed(weights: dict[int, float], seconds: float) -> dict[int, float]:
    """The seconds, divided in proportion to the weights."""
    whole = sum(weights.values())
    return {slot: seconds * weight / whole for slot, weight in weights.items()} if whole > 0.0 else {}
