"""What the engine measures, computed by hand for scripted runs on a simulated clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_harness import VOCABULARY, Harness, build, request_of, terminal_of
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.contract.events import FinishReason
from penstock.contract.measurements import NO_PARTS, Histogram, Timings
from penstock.contract.plan import StepPlan, StepResult
from penstock.engine import Engine
from penstock.engine.histogram_builder import STEP_TOKENS, HistogramBuilder, lengths_up_to
from penstock.sim.clock import SimClock
from penstock.sim.fake_runner import FakeRunner


class Ticking:
    """A runner whose every step takes a second of simulated time."""

    def __init__(self, harness: Harness) -> None:
        self._clock = harness.clock
        self._runner = FakeRunner(harness.config, vocab_size=len(VOCABULARY), clock=SimClock())

    def run(self, plan: StepPlan) -> StepResult:
        self._clock.advance(1.0)
        return self._runner.run(plan)


def timed(**options) -> Harness:
    """A harness whose engine has the clock, a second a step."""
    harness = build(**options)
    harness.engine = Engine(harness.engine.scheduler, Ticking(harness), harness.text, clock=harness.clock)
    return harness


def values(histogram: Histogram) -> tuple[int, float]:
    return sum(histogram.counts), histogram.total


def timings_of(harness: Harness, request_id: str) -> Timings:
    """The instants; `tests/latency` looks at the parts."""
    return replace(terminal_of(harness.outputs[request_id]).timings, parts=NO_PARTS)


def test_every_duration_of_one_ask_is_what_the_clock_says():
    harness = timed()
    request_id = harness.submit("hello", max_tokens=4)
    harness.clock.advance(2.5)  # in the queue
    harness.run()
    assert timings_of(harness, request_id) == Timings(
        arrived=0.0, admitted=2.5, first_token=3.5, last_token=6.5, ended=6.5
    )
    m = harness.engine.measurements()
    assert values(m.queue_time) == (1, 2.5)
    assert values(m.prefill_time) == (1, 1.0)
    assert values(m.time_to_first_token) == (1, 3.5)
    assert values(m.decode_time) == (1, 3.0)
    assert values(m.inference_time) == (1, 4.0)
    assert values(m.e2e_latency) == (1, 6.5)
    assert values(m.inter_token_latency) == (3, 3.0)
    assert values(m.time_per_output_token) == (1, 1.0)
    assert values(m.request_prompt_tokens) == (1, 5)
    assert values(m.request_generation_tokens) == (1, 4)
    assert values(m.request_max_tokens) == (1, 4)
    assert values(m.request_computed_tokens) == (1, 5)
    assert values(m.request_preemptions) == (1, 0)
    assert values(m.request_choices) == (1, 1)
    assert values(m.request_longest_choice) == (1, 4)
    assert values(m.step_tokens) == (4, 8)  # 5 of the prompt, then 3 tokens: the last is never computed
    assert (m.prompt_tokens, m.cached_tokens, m.generated_tokens, m.wasted_tokens) == (5, 0, 4, 0)
    assert dict(m.finished) == {"stop": 0, "length": 1, "repetition": 0, "tool_calls": 0, "abort": 0, "error": 0}
    assert (m.running, m.waiting, m.free_blocks, m.total_blocks, m.steps) == (0, 0, 64, 64, 4)
    assert (m.block_size, m.prefix_caching) == (4, True)


def test_a_chunked_prompt_spends_a_step_a_chunk_in_prefill():
    harness = timed(max_num_batched_tokens=8)
    request_id = harness.submit("a" * 20, max_tokens=1)
    harness.run()
    assert timings_of(harness, request_id).prefill == 3.0
    m = harness.engine.measurements()
    assert m.step_tokens.counts[STEP_TOKENS.index(8.0)] == 3  # 8, 8 and 4 positions
    assert values(m.time_per_output_token) == (0, 0.0)  # one token has no gap


def test_how_wrongly_a_step_was_foreseen_is_counted_from_the_second_step_on():
    harness = timed()
    harness.submit("abcde", max_tokens=4)
    harness.run()
    m = harness.engine.measurements()
    count, total = values(m.step_time_error)
    assert count == 3  # nothing was expected of the first step
    assert 0 < total < 3 * 2.0


def test_cached_prompt_tokens_are_counted_apart():
    harness = timed()
    harness.submit("abcdefghij", max_tokens=1)
    harness.run()
    harness.submit("abcdefghij", max_tokens=1)
    harness.run()
    m = harness.engine.measurements()
    assert (m.prompt_tokens, m.cached_tokens) == (20, 8)
    assert (m.query_tokens, m.hit_tokens) == (20, 8)
    assert values(m.request_computed_tokens) == (2, 12)


def test_choices_are_sequences_of_one_request():
    harness = timed()
    request_id = harness.submit("hello", n=3, max_tokens=2)
    harness.run()
    m = harness.engine.measurements()
    assert dict(m.finished)["length"] == 3
    assert values(m.request_choices) == (1, 3)
    assert values(m.request_longest_choice) == (1, 2)
    assert m.generated_tokens == 6
    timings = timings_of(harness, request_id)
    assert timings.arrived == 0.0
    assert timings.last_token == timings.ended == harness.clock.now()


def test_an_abort_in_the_queue_waited_until_its_end_and_is_no_latency():
    harness = timed(max_num_seqs=1)
    harness.submit("first", max_tokens=4)
    waiting = harness.submit("second")
    harness.step()
    harness.clock.advance(0.5)
    harness.collect(harness.engine.abort(waiting))
    timings = timings_of(harness, waiting)
    assert (timings.queue, timings.prefill, timings.decode, timings.total) == (1.5, 0.0, 0.0, 1.5)
    m = harness.engine.measurements()
    assert dict(m.finished)["abort"] == 1
    assert values(m.e2e_latency) == (0, 0.0)
    assert (m.running, m.waiting) == (1, 0)


def test_tokens_of_aborted_sequences_are_waste():
    harness = timed()
    request_id = harness.submit("hello", max_tokens=8)
    for _ in range(3):
        harness.step()
    harness.collect(harness.engine.abort(request_id))
    m = harness.engine.measurements()
    assert (m.generated_tokens, m.wasted_tokens) == (3, 3)
    assert timings_of(harness, request_id).decode == 2.0


def test_preemptions_are_counted_for_the_engine_and_for_the_sequence():
    harness = timed(num_blocks=8, max_num_batched_tokens=16)
    for letter in "abc":
        harness.submit(letter * 6, max_tokens=14)
    harness.run()
    m = harness.engine.measurements()
    assert m.preemptions > 0
    assert values(m.request_preemptions) == (3, m.preemptions)
    assert values(m.time_to_first_token)[0] == 3


def test_a_stop_string_ends_the_measuring_too():
    harness = timed()
    text = harness.spelled(harness.expected("hello", 8))
    request_id = harness.submit("hello", max_tokens=8, strings=(text[2],))
    harness.run()
    m = harness.engine.measurements()
    assert dict(m.finished)["stop"] == 1
    generated = terminal_of(harness.outputs[request_id]).usage.completion_tokens
    assert values(m.request_generation_tokens) == (1, generated)


def test_requests_that_die_with_the_engine_are_errors():
    harness = timed()
    request_id = harness.submit("hello", n=2, max_tokens=8)
    harness.step()
    harness.collect(harness.engine.die("power cut"))
    assert dict(harness.engine.measurements().finished)["error"] == 2
    assert timings_of(harness, request_id).ended == 1.0


def test_an_engine_without_a_clock_measures_counts_and_no_time():
    harness = build()
    request_id = harness.submit("hello", max_tokens=3)
    harness.run()
    assert timings_of(harness, request_id).total == 0.0
    assert harness.engine.measurements().generated_tokens == 3


def test_unchanged_histograms_are_not_copied_again():
    harness = timed()
    harness.submit("hello", max_tokens=1)
    harness.run()
    assert harness.engine.measurements().e2e_latency is harness.engine.measurements().e2e_latency


def test_two_requests_joined_reach_from_the_first_arrival_to_the_last_end():
    early, late = Timings(1, 2, 3, 4, 5), Timings(1.5, 1.75, 6, 7, 8)
    assert early.joined(late) == late.joined(early) == Timings(1, 1.75, 3, 7, 8)


@pytest.mark.parametrize("reason", list(FinishReason))
def test_every_reason_has_a_count(reason):
    assert reason.value in dict(build().engine.measurements().finished)


def test_bounds_are_inclusive_and_what_lies_above_has_a_place():
    tally = HistogramBuilder((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        tally.add(value)
    assert tally.histogram() == Histogram((1.0, 2.0), (2, 2, 1), 7.5)


def test_lengths_are_counted_in_ones_twos_and_fives():
    assert lengths_up_to(2048) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
    assert lengths_up_to(1) == (1,)


def test_two_engines_measure_apart():
    one, other = timed(), timed()
    one.submit_request(request_of("same-id", one.text, "hello"))
    one.run()
    assert one.engine.measurements().generated_tokens == 8
    assert other.engine.measurements().generated_tokens == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 3), st.integers(1, 10), st.booleans()), max_size=8),
    st.integers(6, 24),
    st.randoms(use_true_random=False),
)
def test_whatever_happens_the_account_adds_up(asked, num_blocks, random):
    """Random requests in a small pool, some aborted on the way: every sequence and token is counted once, in order."""
    harness = timed(num_blocks=num_blocks, max_num_seqs=4)
    submitted: dict[str, int] = {}
    for length, n, max_tokens, doomed in asked:
        request_id = harness.submit("hello there you"[:length], n=n, max_tokens=max_tokens)
        submitted[request_id] = n
        for _ in range(random.randrange(4)):
            if harness.engine.has_work:
                harness.step()
        if doomed:
            harness.collect(harness.engine.abort(request_id))
    harness.run()
    m = harness.engine.measurements()
    ends = [terminal_of(harness.outputs[request_id]) for request_id in submitted]
    assert sum(count for _, count in m.finished) == sum(submitted.values())
    assert m.generated_tokens == sum(end.usage.completion_tokens for end in ends)
    assert m.cached_tokens <= m.prompt_tokens
    assert m.hit_tokens <= m.query_tokens
    answered = dict(m.finished)["length"] + dict(m.finished)["stop"]
    for histogram in (m.e2e_latency, m.time_to_first_token, m.queue_time, m.request_prompt_tokens):
        assert sum(histogram.counts) == answered
    assert m.request_preemptions.total <= m.preemptions
    assert m.time_to_first_token.total == pytest.approx(m.queue_time.total + m.prefill_time.total)
    assert m.inference_time.total == pytest.approx(m.prefill_time.total + m.decode_time.total)
    for end in ends:
        life = end.timings
        assert life.arrived <= life.admitted <= life.first_token <= life.last_token <= life.ended
