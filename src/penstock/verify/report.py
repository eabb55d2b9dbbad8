"""What a verification found, for people (a table and one last line) and for programs (JSON).

Decides how it is said. Knows no model and runs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock.contract.request import SequenceRequest
from penstock.verify.compare import HistogramBuilder, Mismatch, total
from penstock.verify.extent import Extent
from penstock.verify.schedules import Schedule

__all__ = ["Report", "Verdict"]

Cell = str | int

_COLUMNS = (
    "schedule", "seqs", "chunk", "block", "blocks", "cache", "threads", "comers", "strangers",
    "steps", "preempted", "hits", "bad requests", "bad ids", "bad logprobs", "bad others", "largest",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one schedule.

    Attributes:
        preemptions: how often a sequence was preempted.
        hit_tokens: positions found in the prefix cache.
        first: the first request, of the first run that has one, that came out otherwise than alone; None if none did.
        trace: the record of the schedule, a line each; () where nothing differs.
    """

    schedule: Schedule
    steps: int
    preemptions: int
    hit_tokens: int
    tally: HistogramBuilder
    first: Mismatch | None
    trace: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What a verification found."""

    extent: Extent
    requests: tuple[SequenceRequest, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def tally(self) -> HistogramBuilder:
        """All schedules together; `requests` counts a request once for each schedule that it differs in."""
        return total(verdict.tally for verdict in self.verdicts)

    @property
    def exact(self) -> bool:
        """Whether nothing differed anywhere."""
        return self.first_failed is None

    @property
    def first_failed(self) -> Verdict | None:
        """The first schedule in which something differed."""
        return next((verdict for verdict in self.verdicts if verdict.first is not None), None)

    def table(self) -> str:
        """A line of headings, and one line a schedule."""
        rows = [_COLUMNS, *(_row(verdict) for verdict in self.verdicts)]
        widths = [max(len(str(row[column])) for row in rows) for column in range(len(_COLUMNS))]
        lines = ["  ".join(f"{cell!s:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(lines)

    def verdict_line(self) -> str:
        """The last word."""
        tally = self.tally
        if self.exact:
            return f"exact: 0 mismatching tokens of {tally.tokens}, largest logprob difference 0"
        return (
            f"not exact: {tally.mismatches} mismatching tokens of {tally.tokens} ({tally.ids} ids,"
            f" {tally.logprobs} logprobs, {tally.others} others), largest logprob difference {tally.largest:.3g}"
        )

    def as_json(self) -> dict[str, Any]:
        """All but the traces and the prompts, in what JSON has."""
        return {
            "exact": self.exact,
            "extent": asdict(self.extent),
            "prompt_tokens": [len(request.prompt) for request in self.requests],
            "tally": _tally(self.tally),
            "schedules": [_as_json(verdict) for verdict in self.verdicts],
        }


def _row(verdict: Verdict) -> Sequence[Cell]:
    schedule, config, tally = verdict.schedule, verdict.schedule.config, verdict.tally
    return (
        schedule.index, config.max_num_seqs, config.max_num_batched_tokens, config.block_size, config.num_blocks,
        schedule.cache, schedule.threads, schedule.arrivals_in_words, len(schedule.strangers),
        verdict.steps, verdict.preemptions, verdict.hit_tokens,
        tally.requests, tally.ids, tally.logprobs, tally.others, f"{tally.largest:.3g}",
    )  # fmt: skip


def _as_json(verdict: Verdict) -> dict[str, Any]:
    schedule, config = verdict.schedule, verdict.schedule.config
    return {
        "schedule": schedule.index,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "block_size": config.block_size,
        "num_blocks": config.num_blocks,
        "cache": schedule.cache,
        "tight": schedule.tight,
        "threads": schedule.threads,
        "runs": schedule.runs,
        "arrivals": [[arrival.step, arrival.request.id] for arrival in schedule.arrivals],
        "strangers": len(schedule.strangers),
        "steps": verdict.steps,
        "preemptions": verdict.preemptions,
        "hit_tokens": verdict.hit_tokens,
        "tally": _tally(verdict.tally),
        "first_mismatch": None if verdict.first is None else asdict(verdict.first),
    }


def _tally(tally: HistogramBuilder) -> dict[str, Any]:
    return {**asdict(tally), "mismatches": tally.mismatches}
