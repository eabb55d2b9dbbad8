"""What the engine measured: of one request (`Timings`), and of all its work so far (`Measurements`). Plain numbers.

`LatencyParts` divide the wall time of one request among what it was spent on.

Knows neither who reads them nor in which format they are published.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from penstock.contract.stats import SchedulerStats

__all__ = [
    "NEXT_STEP",
    "NO_PARTS",
    "PARTS",
    "TURN",
    "UNTIMED",
    "AdaptersInUse",
    "AnswerCacheUse",
    "DraftCount",
    "Histogram",
    "LatencyParts",
    "Measurements",
    "Timings",
]

NEXT_STEP, TURN = "next_step", "turn"
"""What a request waits for in the queue, beside the reasons of a `Stall`: the end of the step that was under way when
it came; and another prompt of the same body, before it is handed to the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyParts:
    """Where the wall time of one request went. Every moment of it is in one part, so the parts sum to the whole.

    All but the last two are seconds.

    Attributes:
        intake: from its arrival at the server until it is ready for the engine: body, template, tokens, grammar.
        queue: waiting for its first step.
        prompt: steps in which some of its prompt was computed, as far as that took the time.
        other_prompts: what other sequences' prompts, computed or read from the store, took of its steps.
        decode: steps in which it got its next tokens, together with all others that did.
        other_decodes: what other sequences' decoding took of the steps that computed its prompt.
        drafting: what a draft model took of its steps.
        grammar: steps in which it had no next token because the grammar's mask was not ready.
        left_out: steps without a row of it, because others went first.
        preempted: from the loss of its blocks until it had again what it had.
        recovery: the same after a step that failed as a whole, with that step.
        restored: what reading its own blocks from the store took of its steps.
        engine: the engine's own work around its steps: plans, messages, text of all.
        text: from its last step to its last text in the hands of the event loop.
        transport: between the server and an engine elsewhere.
        reader: from then until its last byte was taken; a slow reader, or a busy event loop.
        queue_for: what it waited for in the queue, and how many seconds: reasons of stalls, `NEXT_STEP`, `TURN`.
        behind: ids of sequences that it waited for in the queue, a few at most. Not for its caller, whose they may
            not be.
    """

    intake: float = 0.0
    queue: float = 0.0
    prompt: float = 0.0
    other_prompts: float = 0.0
    decode: float = 0.0
    other_decodes: float = 0.0
    drafting: float = 0.0
    grammar: float = 0.0
    left_out: float = 0.0
    preempted: float = 0.0
    recovery: float = 0.0
    restored: float = 0.0
    engine: float = 0.0
    text: float = 0.0
    transport: float = 0.0
    reader: float = 0.0
    queue_for: tuple[tuple[str, float], ...] = ()
    behind: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """Seconds of all parts together."""
        return float(sum([getattr(self, name) for name in PARTS]))

    def within(self, began: float, arrived: float, now: float) -> LatencyParts:
        """The parts of the whole request, which came to the server when it `began` and has its last byte taken `now`.

        Args:
            began: on the server's clock.
            arrived: when it was ready for the engine, on the same clock. If that cannot be, it was another one, and
                what the engine does not know of is `intake`.
            now: on the server's clock.
        """
        intake, reader = arrived - began, now - arrived - self.total
        if intake < 0.0 or reader < 0.0:
            intake, reader = max(0.0, now - began - self.total), 0.0
        return replace(self, intake=self.intake + intake, reader=self.reader + reader)

    def queued(self, seconds: float, reason: str) -> LatencyParts:
        """The same after so much more waiting in the queue."""
        reasons = dict(self.queue_for)
        reasons[reason] = reasons.get(reason, 0.0) + seconds
        return replace(self, queue=self.queue + seconds, queue_for=tuple(reasons.items()))


PARTS = tuple(each.name for each in fields(LatencyParts) if each.name not in ("queue_for", "behind"))
"""The names of the parts, in the order in which a request mostly meets them."""

NO_PARTS = LatencyParts()
"""Of a request whose time nobody divided."""


@dataclass(frozen=True, slots=True)
class Timings:
    """The life of one request, as instants on the engine's clock, in seconds; none lies before the one above it.

    What never happened (the first token of a request that was aborted in the queue) has the instant of the end. Of a
    request with several choices, the first admission, the first token and the last token of any choice count.

    Attributes:
        drafted: tokens that were guessed for it and computed.
        accepted: how many of these were right.
        parts: where the time from `arrived` on went: to its last step, and later to what followed that. Of several
            choices, those of the one that ended last.
    """

    arrived: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    ended: float = 0.0
    drafted: int = 0
    accepted: int = 0
    parts: LatencyParts = NO_PARTS

    @property
    def queue(self) -> float:
        """Seconds from arrival to the first step that computed something of it."""
        return self.admitted - self.arrived

    @property
    def prefill(self) -> float:
        """Seconds from the beginning of that step to the first token."""
        return self.first_token - self.admitted

    @property
    def decode(self) -> float:
        """Seconds from the first token to the last."""
        return self.last_token - self.first_token

    @property
    def total(self) -> float:
        """Seconds from arrival to the end."""
        return self.ended - self.arrived

    def delivered(self, now: float) -> Timings:
        """The same with its last text in the hands of the event loop now; what came since the last step is `text`."""
        since = now - self.arrived - self.parts.total
        if self.parts == NO_PARTS or since < 0.0:
            return self
        return replace(self, parts=replace(self.parts, text=self.parts.text + since))

    def joined(self, other: Timings) -> Timings:
        """Two requests of one caller as one: from the first arrival to the last end."""
        last, arrived = max(self, other, key=lambda each: each.ended), min(self.arrived, other.arrived)
        waited = last.arrived - arrived
        return Timings(
            arrived=arrived,
            admitted=min(self.admitted, other.admitted),
            first_token=min(self.first_token, other.first_token),
            last_token=max(self.last_token, other.last_token),
            ended=max(self.ended, other.ended),
            drafted=self.drafted + other.drafted,
            accepted=self.accepted + other.accepted,
            parts=last.parts.queued(waited, TURN) if waited > 0.0 and last.parts != NO_PARTS else last.parts,
        )


UNTIMED = Timings()
"""Of a request that nobody measured."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often values fell between bounds.

    Attributes:
        edges: upper bounds, ascending, each inclusive.
        counts: values in each interval, one more than edges: the last holds what lies above all of them.
        total: sum of all values.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class DraftCount(NamedTuple):
    """What came of guesses.

    Attributes:
        rows: that carried one.
        tokens: that were guessed and computed.
        accepted: how many of these were right.
    """

    rows: int = 0
    tokens: int = 0
    accepted: int = 0


class AdaptersInUse(NamedTuple):
    """The adapters of sequences, by name.

    Attributes:
        most: how many may be loaded at once.
        running: those of sequences that hold a slot.
        waiting: those of sequences that wait for one.
    """

    most: int
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


class AnswerCacheUse(NamedTuple):
    """What came of a cache of answers.

    Attributes:
        queries: requests whose answer was looked for.
        hits: how many of these were answered without computing.
        bytes: what the cache takes, of all models together.
        evicted: answers that made room for others, of all models together.
    """

    queries: int = 0
    hits: int = 0
    bytes: int = 0
    evicted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements(SchedulerStats):
    """The engine after a step: what it holds, and what it did since it was started.

    A sequence is one choice of one prompt. Histograms of times and sizes hold the sequences that were answered (ended
    by a stop or by length); counters hold everything. Times are seconds.

    Attributes:
        prompt_tokens: tokens of the prompts that have their first token, or their embedding.
        cached_tokens: how many of these came out of the prefix cache.
        generated_tokens: tokens sampled for a sequence that was still wanted.
        wasted_tokens: how many of these belong to a sequence that was aborted later.
        rejections: requests refused because the queue was full, or the wait too long.
        failed_steps: steps that failed as a whole, and whose rows were computed again.
        lost_runners: processes that computed and are gone, and were followed by another.
        drafts: (drafter, what came of its guesses), a pair for each that has guessed.
        adapters: which adapters are in use; None of an engine that takes none.
        answer_cache: what came of the cache of answers; None without one.
        store_written: KV blocks that are in files now, by the process that computes now.
        store_dropped: those that were handed out again before they were written.
        store_failed: those that the disk did not take.
        store_damaged: files that were found not to be what was written.
        store_evicted: files that made place for others.
        store_bytes: what the store takes of the disk.
        events_published: batches of what the prefix cache holds that were taken to be sent.
        events_dropped: batches that were left out, because too many waited to be sent.
        finished: (finish reason, sequences), a pair for each reason.
        time_to_first_token: arrival to first token.
        inter_token_latency: between two tokens of a sequence.
        time_per_output_token: the mean of these in one sequence.
        e2e_latency: arrival to end.
        queue_time: arrival to admission.
        prefill_time: admission to first token.
        decode_time: first token to last.
        inference_time: admission to last token.
        request_prompt_tokens: prompt length.
        request_generation_tokens: tokens generated.
        request_max_tokens: tokens allowed.
        request_preemptions: how often it was preempted.
        request_computed_tokens: prompt tokens that were not cached.
        request_choices: choices that a request asks for.
        request_longest_choice: tokens of a request's longest choice.
        step_tokens: positions computed in one step.
        step_time_error: by how much a step's time was foreseen wrongly, as a share of what it took.
    """

    block_size: int
    prefix_caching: bool
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    wasted_tokens: int
    rejections: int
    failed_steps: int
    lost_runners: int
    drafts: tuple[tuple[str, DraftCount], ...]
    store_written: int
    store_dropped: int
    store_failed: int
    store_damaged: int
    store_evicted: int
    store_bytes: int
    events_published: int
    events_dropped: int
    finished: tuple[tuple[str, int], ...]
    time_to_first_token: Histogram
    inter_token_latency: Histogram
    time_per_output_token: Histogram
    e2e_latency: Histogram
    queue_time: Histogram
    prefill_time: Histogram
    decode_time: Histogram
    inference_time: Histogram
    request_prompt_tokens: Histogram
    request_generation_tokens: Histogram
    request_max_tokens: Histogram
    request_preemptions: Histogram
    request_computed_tokens: Histogram
    request_choices: Histogram
    request_longest_choice: Histogram
    step_tokens: Histogram
    step_time_error: Histogram
    adapters: AdaptersInUse | None = None
    answer_cache: AnswerCacheUse | None = None
