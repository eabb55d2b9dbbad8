"""What the engine measured for one request (`Timings`), and for all its work so far (`Measurements`). Plain numbers.

`LatencyParts` say what the wall time of one request was spent on.

Knows neither their readers nor the format in which they are published.
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
"""What a request waits for in the queue, besides the reasons of a `Stall`: the end of the step that was running when it
came; and, before it is handed to the engine, another prompt of the same body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyParts:
    """Where the wall time of one request went. Every moment of it is in one part, so the parts sum to the whole.

    All but the last two are seconds.

    Attributes:
        intake: from its arrival at the server until it is ready for the engine: body, template, tokens, grammar.
        queue: waiting for its first step.
        prompt: what computing its own prompt took of its steps.
        other_prompts: what other sequences' prompts, computed or read from the store, took of its steps.
        decode: what decoding, for it and all others together, took of the steps that gave it its next tokens.
        other_decodes: what other sequences' decoding took of the steps that computed its prompt.
        drafting: what a draft model took of its steps.
        grammar: steps in which it had no next token because the grammar's mask was not ready.
        left_out: steps in which it had no row, because others went first.
        preempted: from the loss of its blocks until it was back where it had been.
        recovery: the same after a step that failed as a whole, including that step.
        restored: what reading its own blocks from the store took of its steps.
        engine: the engine's own work around its steps: plans, messages, the text of all requests.
        text: from its last step until the event loop has its last text.
        transport: between the server and an engine elsewhere.
        reader: from then until its last byte was taken; a slow reader, or a busy event loop.
        queue_for: what it waited for in the queue, and for how many seconds: reasons of stalls, `NEXT_STEP`, `TURN`.
        behind: ids of sequences that it waited for in the queue, a few at most. Not for its caller: they may belong
            to others.
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
        """The parts of the whole request, which came to the server at `began` and whose last byte is taken `now`.

        Args:
            began: on the server's clock.
            arrived: when it was ready for the engine, on the same clock. If that is impossible, it was another clock,
                and all time that the engine does not know of is `intake`.
            now: on the server's clock.
        """
        intake, reader = arrived - began, now - arrived - self.total
        if intake < 0.0 or reader < 0.0:
            intake, reader = max(0.0, now - began - self.total), 0.0
        return replace(self, intake=self.intake + intake, reader=self.reader + reader)

    def queued(self, seconds: float, reason: str) -> LatencyParts:
        """A copy with so many more seconds of waiting in the queue for this reason."""
        reasons = dict(self.queue_for)
        reasons[reason] = reasons.get(reason, 0.0) + seconds
        return replace(self, queue=self.queue + seconds, queue_for=tuple(reasons.items()))


PARTS = tuple(each.name for each in fields(LatencyParts) if each.name not in ("queue_for", "behind"))
"""The names of the parts, in the order in which a request usually goes through them."""

NO_PARTS = LatencyParts()
"""For a request whose time was not divided into parts."""


@dataclass(frozen=True, slots=True)
class Timings:
    """The life of one request, as instants on the engine's clock, in seconds; none is earlier than the one above it.

    What never happened (the first token of a request that was aborted in the queue) has the instant of the end. For a
    request with several choices, the first admission, the first token and the last token of any choice count.

    Attributes:
        drafted: tokens that were guessed for it and computed.
        accepted: how many of these were right.
        parts: where the time from `arrived` on went: at first only up to its last step, later also after it. With
            several choices, the parts of the one that ended last.
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
        """Seconds from arrival to the first step that computed any of it."""
        return self.admitted - self.arrived

    @property
    def prefill(self) -> float:
        """Seconds from the beginning of its first step to the first token."""
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
        """A copy in which the event loop has the last text now; the time since the last step is `text`."""
        since = now - self.arrived - self.parts.total
        if self.parts == NO_PARTS or since < 0.0:
            return self
        return replace(self, parts=replace(self.parts, text=self.parts.text + since))

    def joined(self, other: Timings) -> Timings:
        """Join two requests of one caller: from the first arrival to the last end."""
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
"""For a request that was not measured."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often values fell between bounds.

    Attributes:
        edges: upper bounds, ascending, each inclusive.
        counts: values in each interval, one more than edges; the last one counts values above all edges.
        total: sum of all values.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class DraftCount(NamedTuple):
    """How many guesses there were, and how many were right.

    Attributes:
        rows: rows that carried a guess.
        tokens: tokens that were guessed and computed.
        accepted: how many of these were right.
    """

    rows: int = 0
    tokens: int = 0
    accepted: int = 0


class AdaptersInUse(NamedTuple):
    """The adapters of sequences, by name.

    Attributes:
        most: how many may be loaded at once.
        running: adapters of sequences that hold a slot.
        waiting: adapters of sequences that wait for one.
    """

    most: int
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


class AnswerCacheUse(NamedTuple):
    """Use of the answer cache.

    Attributes:
        queries: requests whose answer was looked up.
        hits: how many of these were answered without computing.
        bytes: size of the cache, for all models together.
        evicted: answers that were dropped to make room for others, for all models together.
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
        prompt_tokens: tokens of the prompts whose first token, or embedding, has been computed.
        cached_tokens: how many of these came from the prefix cache.
        generated_tokens: tokens sampled for a sequence that was still wanted.
        wasted_tokens: how many of these belong to a sequence that was aborted later.
        rejections: requests refused because the queue was full, or the wait too long.
        failed_steps: steps that failed as a whole, and whose rows were computed again.
        lost_runners: runner processes that were lost and replaced by another.
        drafts: a pair (drafter, count of its guesses) for each drafter that has guessed.
        adapters: which adapters are in use; None for an engine that takes none.
        answer_cache: use of the answer cache; None without one.
        store_written: KV blocks that the present runner process has written to files.
        store_dropped: blocks that were handed out again before they were written.
        store_failed: blocks that could not be written to disk.
        store_damaged: files whose contents were not what was written.
        store_evicted: files that were deleted to make room.
        store_bytes: size of the store on disk.
        events_published: batches of KV events that were accepted for sending.
        events_dropped: batches that were left out because too many waited to be sent.
        finished: a pair (finish reason, sequences) for each reason.
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
        step_time_error: error of the predicted time of a step, as a share of the time that it took.
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
