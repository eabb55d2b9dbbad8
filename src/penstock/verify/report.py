"""Reports what a verification found, for people (a table and two lines) and for programs (JSON).

A verification proves something only if the events that must not change answers did occur: a schedule built to preempt
must have preempted, and the compiled sampler must have drawn whole batches of plain requests. `lacking` names the
events that did not occur.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock.contract.request import SequenceRequest
from penstock.verify.budget import Budget
from penstock.verify.compare import Mismatch, Tally, total
from penstock.verify.schedules import Schedule

__all__ = ["Report", "Verdict"]

Cell = str | int

_COLUMNS = (
    "schedule", "seqs", "chunk", "block", "blocks", "cache", "threads", "comers", "strangers",
    "steps", "plain", "preempted", "recomputed", "hits",
    "bad requests", "bad ids", "bad logprobs", "bad others", "largest",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one schedule did and what differed in it.

    Attributes:
        preemptions: how often a sequence was preempted.
        recomputed: how often a request was preempted after it had generated tokens, and recomputed.
        plain_steps: steps that drew tokens for several plain requests and nothing else.
        hit_tokens: positions found in the prefix cache.
        given_back: blocks that running sequences gave back because they had left the attention window.
        restored: admissions that resumed from a checkpoint of recurrent state.
        drafted: draft tokens that were computed.
        accepted: how many draft tokens were right.
        accepted_of_model: how many right draft tokens came from the draft model.
        losses: how often the runner was lost.
        first: the first request, in the first run that has one, whose outcome differs from its reference; else None.
        trace: the lines of the schedule's record; () if nothing differs.
    """

    schedule: Schedule
    steps: int
    preemptions: int
    recomputed: int
    plain_steps: int
    hit_tokens: int
    given_back: int
    restored: int
    drafted: int
    accepted: int
    accepted_of_model: int
    losses: int
    tally: Tally
    first: Mismatch | None
    trace: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What a verification found."""

    budget: Budget
    requests: tuple[SequenceRequest, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def tally(self) -> Tally:
        """The sum over all schedules; `requests` counts a request once for each schedule in which it differs."""
        return total(verdict.tally for verdict in self.verdicts)

    @property
    def exact(self) -> bool:
        """Whether nothing differed anywhere."""
        return self.first_failed is None

    @property
    def lacking(self) -> tuple[str, ...]:
        """What the schedules were built for but did not do; nothing is proved while anything is lacking."""
        idle = [
            verdict.schedule.index for verdict in self.verdicts if verdict.schedule.tight and not verdict.recomputed
        ]
        lacks = [f"schedule {index} was built to preempt, and recomputed no request" for index in idle]
        expected = any(verdict.schedule.can_batch_plain for verdict in self.verdicts)
        if self._expects_guesses and not any(verdict.accepted for verdict in self.verdicts):
            lacks.append("no guess was right")
        if self._expects_model and not any(verdict.accepted_of_model for verdict in self.verdicts):
            lacks.append("no guess of the draft model was right")
        if any(each.schedule.losses for each in self.verdicts) and not any(each.losses for each in self.verdicts):
            lacks.append("no runner was lost")
        if self._expects_states and not any(verdict.restored for verdict in self.verdicts):
            lacks.append("no sequence went on from a checkpoint of its state")
        if expected and not any(verdict.plain_steps for verdict in self.verdicts):
            lacks.append("no step drew for several plain requests alone")
        return tuple(lacks)

    @property
    def _expects_states(self) -> bool:
        """Whether any schedule has checkpoints and runs everything twice with the prefix cache, which finds them."""
        runs = (verdict.schedule for verdict in self.verdicts)
        return any(each.config.checkpoints and each.cache == "warm" for each in runs)

    @property
    def _expects_guesses(self) -> bool:
        """Whether any schedule guesses, and some request is long enough for a guess to be right."""
        longest = max(request.stop.max_tokens for request in self.requests)
        return longest > 2 and any(each.schedule.right_guesses is not None for each in self.verdicts)

    @property
    def _expects_model(self) -> bool:
        """Whether any schedule has a draft model, and some request is long enough for its guesses to be right."""
        longest = max(request.stop.max_tokens for request in self.requests)
        return longest > 4 and any(each.schedule.config.draft_context for each in self.verdicts)

    @property
    def proved(self) -> bool:
        """Whether nothing differed, and every event that must not change answers did occur."""
        return self.exact and not self.lacking

    @property
    def first_failed(self) -> Verdict | None:
        """The first schedule in which something differed."""
        return next((verdict for verdict in self.verdicts if verdict.first is not None), None)

    def table(self) -> str:
        """A line of headings, and one line per schedule."""
        rows = [_COLUMNS, *(_row(verdict) for verdict in self.verdicts)]
        widths = [max(len(str(row[column])) for row in rows) for column in range(len(_COLUMNS))]
        lines = ["  ".join(f"{cell!s:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(lines)

    def coverage_line(self) -> str:
        """How often each event that must not change answers occurred."""
        tight = ", ".join(str(verdict.schedule.index) for verdict in self.verdicts if verdict.schedule.tight)
        counted = (
            "preemptions",
            "recomputed",
            "plain_steps",
            "hit_tokens",
            "given_back",
            "restored",
            "drafted",
            "accepted",
            "accepted_of_model",
            "losses",
        )
        preemptions, recomputed, plain_steps, hit_tokens, given_back, restored, drafted, accepted, of_model, losses = (
            sum(getattr(verdict, name) for verdict in self.verdicts) for name in counted
        )
        stateful = any(verdict.schedule.config.checkpoints is not None for verdict in self.verdicts)
        windowed = any(verdict.schedule.config.window is not None for verdict in self.verdicts)
        return (
            f"seen: {preemptions} preemptions, of which {recomputed} recomputed generated tokens"
            f" (built to preempt: schedules {tight or 'none'}), {plain_steps} steps of plain requests alone,"
            + (f" {losses} runners lost," if losses else "")
            + f" {hit_tokens} positions from the cache"
            + (f", {accepted} of {drafted} guessed tokens right" if drafted else "")
            + (f", {of_model} of them by the draft model" if of_model else "")
            + (f", {given_back} blocks given back behind a window" if windowed else "")
            + (f", {restored} states restored" if stateful else "")
        )

    def verdict_line(self) -> str:
        """The last line: exact, not exact, or not proved."""
        tally = self.tally
        if self.exact and self.lacking:
            return f"not proved: {'; '.join(self.lacking)}. More --requests or --new-tokens make it happen"
        if self.exact:
            return f"exact: 0 mismatching tokens of {tally.tokens}, largest logprob difference 0"
        return (
            f"not exact: {tally.mismatches} mismatching tokens of {tally.tokens} ({tally.ids} ids,"
            f" {tally.logprobs} logprobs, {tally.others} others), largest logprob difference {tally.largest:.3g}"
        )

    def as_json(self) -> dict[str, Any]:
        """Everything except the traces and the prompts, as JSON values."""
        return {
            "exact": self.exact,
            "proved": self.proved,
            "lacking": list(self.lacking),
            "budget": asdict(self.budget),
            "prompt_tokens": [len(request.prompt) for request in self.requests],
            "tally": _tally(self.tally),
            "schedules": [_as_json(verdict) for verdict in self.verdicts],
        }


def _row(verdict: Verdict) -> Sequence[Cell]:
    schedule, config, tally = verdict.schedule, verdict.schedule.config, verdict.tally
    return (
        schedule.index, config.max_num_seqs, config.max_num_batched_tokens, config.block_size, config.num_blocks,
        schedule.cache, schedule.threads, schedule.arrivals_in_words, len(schedule.strangers),
        verdict.steps, verdict.plain_steps, verdict.preemptions, verdict.recomputed, verdict.hit_tokens,
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
        "window": config.window,
        "checkpoints": config.checkpoints,
        "checkpoint_interval": config.checkpoint_interval,
        "spare_states": config.spare_states,
        "cache": schedule.cache,
        "tight": schedule.tight,
        "by_kind": schedule.by_kind,
        "threads": schedule.threads,
        "runs": schedule.runs,
        "arrivals": [[arrival.step, arrival.request.id] for arrival in schedule.arrivals],
        "strangers": len(schedule.strangers),
        "steps": verdict.steps,
        "preemptions": verdict.preemptions,
        "recomputed": verdict.recomputed,
        "plain_steps": verdict.plain_steps,
        "hit_tokens": verdict.hit_tokens,
        "given_back": verdict.given_back,
        "restored": verdict.restored,
        "right_guesses": schedule.right_guesses,
        "drafted": verdict.drafted,
        "accepted": verdict.accepted,
        "accepted_of_model": verdict.accepted_of_model,
        "draft_model": bool(config.draft_context),
        "losses": verdict.losses,
        "tally": _tally(verdict.tally),
        "first_mismatch": None if verdict.first is None else asdict(verdict.first),
    }


def _tally(tally: Tally) -> dict[str, Any]:
    return {**asdict(tally), "mismatches": tally.mismatches}
