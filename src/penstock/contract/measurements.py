"""What the engine measured: of one request (`Timings`), and of all its work so far (`Measurements`). Plain numbers.

Knows neither who reads them nor in which format they are published.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from penstock.contract.stats import SchedulerStats

__all__ = ["UNTIMED", "AdaptersInUse", "AnswerCacheUse", "DraftCount", "Histogram", "Measurements", "Timings"]


@dataclass(frozen=True, slots=True)
class Timings:
    """The life of one request, as instants on the engine's clock, in seconds; none lies before the one above it.

    What never happened (the first token of a request that was aborted in the queue) has the instant of the end. Of a
    request with several choices, the first admission, the first token and the last token of any choice count.

    Attributes:
        drafted: tokens that were guessed for it and computed.
        accepted: how many of these were right.
    """

    arrived: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    ended: float = 0.0
    drafted: int = 0
    accepted: int = 0

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

    def joined(self, other: Timings) -> Timings:
        """Two requests of one caller as one: from the first arrival to the last end."""
        return Timings(
            arrived=min(self.arrived, other.arrived),
            admitted=min(self.admitted, other.admitted),
            first_token=min(self.first_token, other.first_token),
            last_token=max(self.last_token, other.last_token),
            ended=max(self.ended, other.ended),
            drafted=self.drafted + other.drafted,
            accepted=self.accepted + other.accepted,
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
    adapters: AdaptersInUse | None = None
    answer_cache: AnswerCacheUse | None = None
