"""Measures what the engine does: when each sequence arrived, was admitted, got its tokens and ended.

Told by the engine's step what happens, it reads the clock and counts; it decides nothing, and nothing waits for it.
Cost: two readings of the clock and a few additions a step, one reading an end. Not thread-safe: one owner, the engine.
What others may read is the frozen value that `measurements` makes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.contract.events import FinishReason
from penstock.contract.measurements import Measurements, Timings
from penstock.contract.plan import StepPlan
from penstock.contract.ports import Clock
from penstock.contract.request import SequenceRequest
from penstock.core import SchedulerStats
from penstock.engine import tally
from penstock.engine.tally import Tally

__all__ = ["Meter"]

NEVER = float("inf")
ANSWERED = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True)
class _AskLife:
    """An ask of several sequences: how many are left, and the outermost instants of those that ended."""

    arrived: float
    choices: int
    open: int
    admitted: float = NEVER
    first_token: float = NEVER
    last_token: float = -NEVER
    longest: int = 0
    answered: bool = False

    def timings(self, now: float) -> Timings:
        # What never happened has the instant of the end; and each instant must not lie before the one above it.
        first_token = min(self.first_token, now)
        last_token = self.last_token if self.first_token < NEVER else now
        return Timings(self.arrived, min(self.admitted, now), first_token, last_token, now)


@dataclass(slots=True)
class _SeqLife:
    """One sequence so far; -1 for instants that have not come."""

    request: SequenceRequest
    ask: _AskLife
    admitted: float = -1.0
    first_token: float = -1.0
    last_token: float = -1.0
    cached: int = 0
    generated: int = 0
    preemptions: int = 0


@dataclass(slots=True)
class _Tallies:
    """Every histogram, by its name in `Measurements`."""

    longest: int
    time_to_first_token: Tally = field(default_factory=lambda: Tally(tally.FIRST_TOKEN))
    inter_token_latency: Tally = field(default_factory=lambda: Tally(tally.TOKEN_GAP))
    time_per_output_token: Tally = field(default_factory=lambda: Tally(tally.TOKEN_GAP))
    e2e_latency: Tally = field(default_factory=lambda: Tally(tally.PHASES))
    queue_time: Tally = field(default_factory=lambda: Tally(tally.PHASES))
    prefill_time: Tally = field(default_factory=lambda: Tally(tally.PHASES))
    decode_time: Tally = field(default_factory=lambda: Tally(tally.PHASES))
    inference_time: Tally = field(default_factory=lambda: Tally(tally.PHASES))
    request_preemptions: Tally = field(default_factory=lambda: Tally(tally.PREEMPTIONS))
    ask_choices: Tally = field(default_factory=lambda: Tally(tally.CHOICES))
    step_tokens: Tally = field(default_factory=lambda: Tally(tally.STEP_TOKENS))
    request_prompt_tokens: Tally = field(init=False)
    request_generation_tokens: Tally = field(init=False)
    request_max_tokens: Tally = field(init=False)
    request_computed_tokens: Tally = field(init=False)
    ask_longest_choice: Tally = field(init=False)

    def __post_init__(self) -> None:
        edges = tally.lengths_up_to(self.longest)
        self.request_prompt_tokens = Tally(edges)
        self.request_generation_tokens = Tally(edges)
        self.request_max_tokens = Tally(edges)
        self.request_computed_tokens = Tally(edges)
        self.ask_longest_choice = Tally(edges)


class Meter:
    """See the module.

    Args:
        clock: the one that arrival times come from.
        longest: most tokens of one sequence; sets the intervals of lengths.
    """

    def __init__(self, clock: Clock, longest: int) -> None:
        self._clock = clock
        self._tallies = _Tallies(longest)
        self._finished = dict.fromkeys(FinishReason, 0)
        self._seqs: dict[str, _SeqLife] = {}
        self._slots: dict[int, _SeqLife] = {}
        self._now = 0.0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0
        self._wasted_tokens = 0
        self._rejections = 0

    # ---- what happens, in the order in which it can

    def rejected(self) -> None:
        """An ask was refused because too many wait."""
        self._rejections += 1

    def submitted(self, requests: tuple[SequenceRequest, ...]) -> None:
        """An ask was queued, one sequence a choice."""
        ask = _AskLife(requests[0].arrival, len(requests), len(requests))
        for request in requests:
            self._seqs[request.id] = _SeqLife(request, ask)

    def planned(self, plan: StepPlan) -> None:
        """A step begins."""
        now = self._clock.now()
        for slot in plan.releases:
            seq = self._slots.pop(slot, None)
            if seq is not None:  # of one that has ended nobody asks any more; any other gave its blocks up
                seq.preemptions += 1
        for admit in plan.admits:
            seq = self._seqs.get(admit.seq_id)
            if seq is None:  # not an ask's: whoever steps the scheduler by hand is not measured
                continue
            self._slots[admit.slot] = seq
            if seq.admitted < 0:
                seq.admitted = now
        if plan.rows:
            self._tallies.step_tokens.add(plan.num_tokens)

    def ran(self) -> None:
        """The step was computed; what follows until the next one comes of it."""
        self._now = self._clock.now()

    def admitted(self, seq_id: str, cached: int) -> None:
        """The first step of a sequence was computed; the prefix cache had `cached` tokens of its prompt."""
        self._seqs[seq_id].cached = cached

    def embedded(self, seq_id: str) -> None:
        """A sequence that is embedded has its vector: its prompt is all that it computes."""
        seq, now = self._seqs[seq_id], self._now
        self._count_prompt(seq)
        self._tallies.queue_time.add(seq.admitted - seq.request.arrival)
        self._tallies.prefill_time.add(now - seq.admitted)
        self._tallies.inference_time.add(now - seq.admitted)

    def generated(self, seq_id: str) -> None:
        """A sequence has one more token."""
        seq, now = self._seqs[seq_id], self._now
        if seq.generated:
            self._tallies.inter_token_latency.add(now - seq.last_token)
        else:
            seq.first_token = now
            self._count_prompt(seq)
        seq.last_token = now
        seq.generated += 1
        self._generated_tokens += 1

    def ended(self, seq_id: str, reason: FinishReason) -> Timings:
        """A sequence ended. The life of its ask until now: the whole one when this was its last sequence."""
        seq, now = self._seqs.pop(seq_id), self._clock.now()
        self._finished[reason] += 1
        if reason in ANSWERED:
            self._count_answer(seq, now)
        elif reason is FinishReason.ABORT:
            self._wasted_tokens += seq.generated
        self._join(seq, reason)
        return seq.ask.timings(now)

    # ---- what is counted

    def _count_prompt(self, seq: _SeqLife) -> None:
        self._prompt_tokens += len(seq.request.prompt)
        self._cached_tokens += seq.cached

    def _join(self, seq: _SeqLife, reason: FinishReason) -> None:
        ask = seq.ask
        ask.open -= 1
        ask.answered = ask.answered or reason in ANSWERED
        ask.longest = max(ask.longest, seq.generated)
        if seq.admitted >= 0:
            ask.admitted = min(ask.admitted, seq.admitted)
        if seq.generated:
            ask.first_token = min(ask.first_token, seq.first_token)
            ask.last_token = max(ask.last_token, seq.last_token)
        if not ask.open and ask.answered:
            self._tallies.ask_choices.add(ask.choices)
            self._tallies.ask_longest_choice.add(ask.longest)

    def _count_answer(self, seq: _SeqLife, now: float) -> None:
        tallies = self._tallies
        tallies.e2e_latency.add(now - seq.request.arrival)
        if seq.generated:
            self._count_phases(seq)
        tallies.request_prompt_tokens.add(len(seq.request.prompt))
        tallies.request_computed_tokens.add(len(seq.request.prompt) - seq.cached)
        tallies.request_generation_tokens.add(seq.generated)
        tallies.request_max_tokens.add(seq.request.stop.max_tokens)
        tallies.request_preemptions.add(seq.preemptions)

    def _count_phases(self, seq: _SeqLife) -> None:
        tallies, arrived = self._tallies, seq.request.arrival
        tallies.time_to_first_token.add(seq.first_token - arrived)
        tallies.queue_time.add(seq.admitted - arrived)
        tallies.prefill_time.add(seq.first_token - seq.admitted)
        tallies.decode_time.add(seq.last_token - seq.first_token)
        tallies.inference_time.add(seq.last_token - seq.admitted)
        if seq.generated > 1:
            tallies.time_per_output_token.add((seq.last_token - seq.first_token) / (seq.generated - 1))

    def measurements(self, stats: SchedulerStats, block_size: int, prefix_caching: bool) -> Measurements:
        """All of it as one frozen value, for readers in other threads."""
        tallies = self._tallies
        return Measurements(
            running=stats.running,
            waiting=stats.waiting,
            total_blocks=stats.total_blocks,
            free_blocks=stats.free_blocks,
            block_size=block_size,
            prefix_caching=prefix_caching,
            steps=stats.steps,
            preemptions=stats.preemptions,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            wasted_tokens=self._wasted_tokens,
            query_tokens=stats.query_tokens,
            hit_tokens=stats.hit_tokens,
            rejections=self._rejections,
            finished=tuple((reason.value, count) for reason, count in self._finished.items()),
            time_to_first_token=tallies.time_to_first_token.histogram(),
            inter_token_latency=tallies.inter_token_latency.histogram(),
            time_per_output_token=tallies.time_per_output_token.histogram(),
            e2e_latency=tallies.e2e_latency.histogram(),
            queue_time=tallies.queue_time.histogram(),
            prefill_time=tallies.prefill_time.histogram(),
            decode_time=tallies.decode_time.histogram(),
            inference_time=tallies.inference_time.histogram(),
            request_prompt_tokens=tallies.request_prompt_tokens.histogram(),
            request_generation_tokens=tallies.request_generation_tokens.histogram(),
            request_max_tokens=tallies.request_max_tokens.histogram(),
            request_preemptions=tallies.request_preemptions.histogram(),
            request_computed_tokens=tallies.request_computed_tokens.histogram(),
            ask_choices=tallies.ask_choices.histogram(),
            ask_longest_choice=tallies.ask_longest_choice.histogram(),
            step_tokens=tallies.step_tokens.histogram(),
        )
