"""Measures what the engine does: when each sequence arrived, was admitted, got its tokens and ended.

The engine's step reports what happens, and when; this module counts. `penstock.latency` divides each request's time.
This costs a few additions per step, and one clock reading per sequence that ends. Not thread-safe: the engine owns it,
and other threads read the frozen value that `measurements` makes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.contract.cache_events import EventCounts
from penstock.contract.engine_views import TenantShare
from penstock.contract.events import DraftsJudged, FinishReason
from penstock.contract.measurements import AdaptersInUse, DraftCount, LatencyParts, Measurements, Timings
from penstock.contract.plan import StepPlan, StepResult, StoreCounts
from penstock.contract.ports import Clock
from penstock.contract.request import SequenceRequest
from penstock.contract.stats import SchedulerStats
from penstock.core.step_time import StepTimes
from penstock.core.waiting import TenantLoad
from penstock.engine import histogram_builder as intervals
from penstock.engine.histogram_builder import HistogramBuilder
from penstock.engine.tenant_book import TenantBook
from penstock.latency import LatencyBook, StepShares

__all__ = ["MetricsCollector"]

NEVER = float("inf")
ANSWERED = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True)
class _RequestLife:
    """One request: how many of its sequences are still open, and the earliest or latest instants of ended ones."""

    arrived: float
    choices: int
    open: int
    admitted: float = NEVER
    first_token: float = NEVER
    last_token: float = -NEVER
    longest: int = 0
    answered: bool = False
    drafted: int = 0
    accepted: int = 0

    def timings(self, now: float, parts: LatencyParts) -> Timings:
        # An event that never happened gets the instant of the end, so that no instant precedes an earlier phase.
        first_token = min(self.first_token, now)
        last_token = self.last_token if self.first_token < NEVER else now
        admitted = min(self.admitted, now)
        return Timings(self.arrived, admitted, first_token, last_token, now, self.drafted, self.accepted, parts)


@dataclass(slots=True)
class _SequenceLife:
    """One sequence so far; -1 for what has not happened."""

    sequence: SequenceRequest
    request: _RequestLife
    admitted: float = -1.0
    first_token: float = -1.0
    last_token: float = -1.0
    cached: int = 0
    generated: int = 0
    preemptions: int = 0

    @property
    def computed(self) -> int:
        """Tokens computed for the sequence: prompt tokens, counted once it has its first token, and answer tokens."""
        return len(self.sequence.prompt) - self.cached + self.generated if self.generated else 0


@dataclass(slots=True)
class _Histograms:
    """Every histogram, under its name in `Measurements`."""

    longest: int
    time_to_first_token: HistogramBuilder = field(default_factory=lambda: HistogramBuilder(intervals.FIRST_TOKEN))
    inter_token_latency: HistogramBuilder = field(default_factory=lambda: HistogramBuilder(intervals.TOKEN_GAP))
    time_per_output_token: HistogramBuilder = field(default_factory=lambda: HistogramBuilder(intervals.TOKEN_GAP))
    e2e_latency: HistogramBuilder = field(default_factory=lambda: HistogramBuilder(intervals.PHASES))
    queue_time: HistogramBuilder = field(default_factory=lambda: HistogramBuilder(intervals.PHASES))
    prefill_time: HistogramBuilder = field(default_factory=lambda: HistogramBuilder(intervals.PHASES))
    decode_time: HistogramBuilder = field(default_factory=lambda: HistogramBuilder(intervals.PHASES))
    inference_time: HistogramBuilder = field(default_factory=lambda: HistogramBuilder(intervals.PHASES))
    request_preemptions: HistogramBuilder = field(default_factory=lambda: HistogramBuilder(intervals.PREEMPTIONS))
    request_choices: HistogramBuilder = field(default_factory=lambda: HistogramBuilder(intervals.CHOICES))
    step_tokens: HistogramBuilder = field(default_factory=lambda: HistogramBuilder(intervals.STEP_TOKENS))
    step_time_error: HistogramBuilder = field(default_factory=lambda: HistogramBuilder(intervals.SHARES))
    request_prompt_tokens: HistogramBuilder = field(init=False)
    request_generation_tokens: HistogramBuilder = field(init=False)
    request_max_tokens: HistogramBuilder = field(init=False)
    request_computed_tokens: HistogramBuilder = field(init=False)
    request_longest_choice: HistogramBuilder = field(init=False)

    def __post_init__(self) -> None:
        edges = intervals.lengths_up_to(self.longest)
        self.request_prompt_tokens = HistogramBuilder(edges)
        self.request_generation_tokens = HistogramBuilder(edges)
        self.request_max_tokens = HistogramBuilder(edges)
        self.request_computed_tokens = HistogramBuilder(edges)
        self.request_longest_choice = HistogramBuilder(edges)


class MetricsCollector:
    """See the module.

    Args:
        clock: the clock that arrival times come from.
        longest: most tokens that a sequence can have; sets the intervals of lengths.
        times: how long steps take, as the scheduler has learned it.
    """

    def __init__(self, clock: Clock, longest: int, times: StepTimes) -> None:
        self._clock = clock
        self._latency = LatencyBook(times)
        self._tenants = TenantBook()
        self._histograms = _Histograms(longest)
        self._finished = dict.fromkeys(FinishReason, 0)
        self._seqs: dict[str, _SequenceLife] = {}
        self._slots: dict[int, _SequenceLife] = {}
        self._now = 0.0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0
        self._wasted_tokens = 0
        self._rejections = 0
        self._failed_steps = 0
        self._lost_runners = 0
        self._drafts: dict[str, DraftCount] = {}
        self._store = StoreCounts()
        self._events = EventCounts()

    # ---- events, in the order in which they can happen

    def rejected(self, count: int = 1) -> None:
        """`count` requests were refused because too many wait, or because they would wait too long."""
        self._rejections += count

    def step_failed(self, at: float) -> None:
        """The runner raised, and all plans in flight are taken back."""
        self._failed_steps += 1
        self._latency.failed(at)

    def dropped(self, at: float) -> None:
        """All plans in flight are taken back, because the caller interrupted the step."""
        self._latency.failed(at)

    def runner_lost(self) -> None:
        """The process that computed is gone, and another one computes."""
        self._lost_runners += 1

    def stored(self, counts: StoreCounts) -> None:
        """Take the progress of saving blocks, from the process that computes."""
        self._store = counts

    def cache_events(self, counts: EventCounts) -> None:
        """Take the progress of publishing cache events."""
        self._events = counts

    def submitted(self, sequences: tuple[SequenceRequest, ...], at: float) -> None:
        """A request was queued, one sequence for each choice."""
        request = _RequestLife(sequences[0].arrival, len(sequences), len(sequences))
        for sequence in sequences:
            self._seqs[sequence.id] = _SequenceLife(sequence, request)
            self._latency.submitted(sequence, at)

    def planned(self, plan: StepPlan, now: float) -> None:
        """A step begins."""
        self._latency.planned(plan, now)
        for slot in plan.releases:
            seq = self._slots.pop(slot, None)
            if seq is not None:  # ended sequences are not in the table, so this one was preempted
                seq.preemptions += 1
        for admit in plan.admits:
            seq = self._seqs.get(admit.seq_id)
            if seq is None:  # submitted to the scheduler by hand, not as a request: not measured
                continue
            self._slots[admit.slot] = seq
            if seq.admitted < 0:
                seq.admitted = now
        if plan.rows:
            self._histograms.step_tokens.add(plan.num_tokens)

    def ran(self, result: StepResult, now: float) -> StepShares:
        """The step was computed. Everything reported until the next step happened at this instant.

        Returns:
            The shares of the step's time.
        """
        self._now = now
        return self._latency.ran(result, now)

    def foreseen(self, error: float) -> None:
        """The scheduler's expected time for the step was off by `error`, as a share of the time it took."""
        self._histograms.step_time_error.add(error)

    def admitted(self, seq_id: str, cached: int) -> None:
        """The first step of a sequence was computed; the prefix cache had `cached` tokens of its prompt."""
        self._seqs[seq_id].cached = cached

    def embedded(self, seq_id: str) -> None:
        """An embedded sequence has its vector; it computes only its prompt."""
        seq, now = self._seqs[seq_id], self._now
        self._count_prompt(seq)
        self._histograms.queue_time.add(seq.admitted - seq.sequence.arrival)
        self._histograms.prefill_time.add(now - seq.admitted)
        self._histograms.inference_time.add(now - seq.admitted)

    def drafted(self, judged: DraftsJudged) -> None:
        """A row of a sequence carried drafts."""
        before = self._drafts.get(judged.drafter, DraftCount())
        count = DraftCount(before.rows + 1, before.tokens + judged.drafts, before.accepted + judged.right)
        self._drafts[judged.drafter] = count
        request = self._seqs[judged.seq_id].request
        request.drafted += judged.drafts
        request.accepted += judged.right

    def generated(self, seq_id: str) -> None:
        """A sequence has one more token."""
        seq, now = self._seqs[seq_id], self._now
        if seq.generated:
            self._histograms.inter_token_latency.add(now - seq.last_token)
        else:
            seq.first_token = now
            self._count_prompt(seq)
        seq.last_token = now
        seq.generated += 1
        self._generated_tokens += 1

    def ended(self, seq_id: str, reason: FinishReason, at: float) -> Timings:
        """A sequence ended, by an event at `at`. Returns its request's timings so far; the last ones are final."""
        seq, now = self._seqs.pop(seq_id), self._clock.now()
        self._finished[reason] += 1
        if reason in ANSWERED:
            self._count_answer(seq, now)
        elif reason is FinishReason.ABORT:
            self._wasted_tokens += seq.generated
        self._tenants.ended(seq.sequence, seq.computed)
        self._join(seq, reason)
        return seq.request.timings(now, self._latency.ended(seq_id, at))

    def tenant_shares(self, loads: dict[str, TenantLoad]) -> tuple[TenantShare, ...]:
        """Each tenant's share of the engine; `loads` says how much of each tenant runs and waits now."""
        return self._tenants.shares(loads, [(seq.sequence, seq.computed) for seq in self._seqs.values()])

    # ---- counts

    def _count_prompt(self, seq: _SequenceLife) -> None:
        self._prompt_tokens += len(seq.sequence.prompt)
        self._cached_tokens += seq.cached

    def _join(self, seq: _SequenceLife, reason: FinishReason) -> None:
        request = seq.request
        request.open -= 1
        request.answered = request.answered or reason in ANSWERED
        request.longest = max(request.longest, seq.generated)
        if seq.admitted >= 0:
            request.admitted = min(request.admitted, seq.admitted)
        if seq.generated:
            request.first_token = min(request.first_token, seq.first_token)
            request.last_token = max(request.last_token, seq.last_token)
        if not request.open and request.answered:
            self._histograms.request_choices.add(request.choices)
            self._histograms.request_longest_choice.add(request.longest)

    def _count_answer(self, seq: _SequenceLife, now: float) -> None:
        histograms = self._histograms
        histograms.e2e_latency.add(now - seq.sequence.arrival)
        if seq.generated:
            self._count_phases(seq)
        histograms.request_prompt_tokens.add(len(seq.sequence.prompt))
        histograms.request_computed_tokens.add(len(seq.sequence.prompt) - seq.cached)
        histograms.request_generation_tokens.add(seq.generated)
        histograms.request_max_tokens.add(seq.sequence.stop.max_tokens)
        histograms.request_preemptions.add(seq.preemptions)

    def _count_phases(self, seq: _SequenceLife) -> None:
        histograms, arrived = self._histograms, seq.sequence.arrival
        histograms.time_to_first_token.add(seq.first_token - arrived)
        histograms.queue_time.add(seq.admitted - arrived)
        histograms.prefill_time.add(seq.first_token - seq.admitted)
        histograms.decode_time.add(seq.last_token - seq.first_token)
        histograms.inference_time.add(seq.last_token - seq.admitted)
        if seq.generated > 1:
            histograms.time_per_output_token.add((seq.last_token - seq.first_token) / (seq.generated - 1))

    def measurements(
        self, stats: SchedulerStats, block_size: int, prefix_caching: bool, adapters: AdaptersInUse | None = None
    ) -> Measurements:
        """Everything as one frozen value, for readers in other threads."""
        histograms = self._histograms
        return Measurements(
            **stats.numbers(),
            block_size=block_size,
            prefix_caching=prefix_caching,
            adapters=adapters,
            answer_cache=None,  # it is in front of the engine
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            wasted_tokens=self._wasted_tokens,
            rejections=self._rejections,
            failed_steps=self._failed_steps,
            lost_runners=self._lost_runners,
            drafts=tuple(self._drafts.items()),
            **{f"store_{name}": count for name, count in self._store._asdict().items()},
            **{f"events_{name}": count for name, count in self._events._asdict().items()},
            finished=tuple((reason.value, count) for reason, count in self._finished.items()),
            time_to_first_token=histograms.time_to_first_token.histogram(),
            inter_token_latency=histograms.inter_token_latency.histogram(),
            time_per_output_token=histograms.time_per_output_token.histogram(),
            e2e_latency=histograms.e2e_latency.histogram(),
            queue_time=histograms.queue_time.histogram(),
            prefill_time=histograms.prefill_time.histogram(),
            decode_time=histograms.decode_time.histogram(),
            inference_time=histograms.inference_time.histogram(),
            request_prompt_tokens=histograms.request_prompt_tokens.histogram(),
            request_generation_tokens=histograms.request_generation_tokens.histogram(),
            request_max_tokens=histograms.request_max_tokens.histogram(),
            request_preemptions=histograms.request_preemptions.histogram(),
            request_computed_tokens=histograms.request_computed_tokens.histogram(),
            request_choices=histograms.request_choices.histogram(),
            request_longest_choice=histograms.request_longest_choice.histogram(),
            step_tokens=histograms.step_tokens.histogram(),
            step_time_error=histograms.step_time_error.histogram(),
        )
