"""The engine stepped by hand: text, stops, choices, failures."""

import gc
import weakref

import engine_harness as harness
import pytest
from engine_harness import finishes_of, terminal_of, text_of, tokens_of

from penstock.contract.errors import EngineDead, InvalidParameter, RequestPoisoned
from penstock.contract.events import FinishReason, RequestFailed, RequestFinished
from penstock.core.replaying import replay


def test_tokens_are_those_of_the_model_and_text_is_their_decoding():
    bench = harness.build()
    one = bench.submit("hello", max_tokens=20)
    bench.run()
    outputs = bench.outputs[one]
    assert tokens_of(outputs) == bench.expected("hello", 20)
    assert text_of(outputs) == bench.spelled(bench.expected("hello", 20))
    assert [f.reason for f in finishes_of(outputs)] == [FinishReason.LENGTH]
    usage = terminal_of(outputs).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (5, 20, 0)


def test_requests_that_share_batches_do_not_change_each_other():
    bench = harness.build(num_blocks=24)  # too few for all at once: preemption and queueing happen
    prompts = [f"prompt number {'x' * i}" for i in range(12)]
    requests = {prompt: bench.submit(prompt, max_tokens=15) for prompt in prompts}
    bench.run()
    for prompt, one in requests.items():
        assert tokens_of(bench.outputs[one]) == bench.expected(prompt, 15)
    assert bench.engine.health().free_blocks == 24


def test_the_models_own_end_stops_and_is_not_reported_as_a_callers_stop():
    bench = harness.build()
    expected = bench.expected("go", 120)
    assert harness.END_ID in expected
    one = bench.submit("go", max_tokens=120, ignore_eos=False)
    bench.run()
    [finish] = finishes_of(bench.outputs[one])
    assert (finish.reason, finish.stop) == (FinishReason.STOP, None)
    assert tokens_of(bench.outputs[one]) == expected[: expected.index(harness.END_ID) + 1]
    assert harness.END not in text_of(bench.outputs[one])


def test_a_stop_token_of_the_caller_is_reported():
    bench = harness.build()
    third = bench.expected("go", 3)[2]
    one = bench.submit("go", token_ids=(third,), max_tokens=50)
    bench.run()
    [finish] = finishes_of(bench.outputs[one])
    assert (finish.reason, finish.stop) == (FinishReason.STOP, third)


def stop_text(bench, prompt="go", start=4, length=3):
    text = bench.spelled(bench.expected(prompt, 40))
    return text, text[start : start + length]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_text_and_tokens(include):
    bench = harness.build()
    text, stop = stop_text(bench)
    one = bench.submit("go", max_tokens=40, strings=(stop,), include_stop_string=include)
    bench.run()
    outputs = bench.outputs[one]
    cut = text.index(stop) + (len(stop) if include else 0)
    assert text_of(outputs) == text[:cut]
    assert bench.spelled(tokens_of(outputs)) == text[:cut]
    [finish] = finishes_of(outputs)
    assert (finish.reason, finish.stop) == (FinishReason.STOP, stop)
    assert terminal_of(outputs).usage.completion_tokens >= cut
    assert bench.engine.health().free_blocks == bench.config.num_blocks


def test_text_that_might_become_a_stop_string_is_held_back_and_then_released_with_its_tokens():
    bench = harness.build()
    _, stop = stop_text(bench)
    almost = stop + "\u00e9"  # never comes
    one = bench.submit("go", max_tokens=8, strings=(almost,))
    bench.run()
    assert text_of(bench.outputs[one]) == bench.spelled(bench.expected("go", 8))
    assert tokens_of(bench.outputs[one]) == bench.expected("go", 8)


def test_a_stop_string_before_min_tokens_does_not_stop():
    bench = harness.build()
    text, stop = stop_text(bench, start=1)
    one = bench.submit("go", max_tokens=30, min_tokens=25, strings=(stop,))
    bench.run()
    assert len(tokens_of(bench.outputs[one])) >= min(25, 30 - len(stop))
    assert text_of(bench.outputs[one]).startswith(text[:5])


def test_a_stop_string_completed_by_the_last_allowed_token_is_a_stop_not_a_length():
    bench = harness.build()
    _, stop = stop_text(bench, start=5, length=3)
    count = next(n for n in range(1, 41) if stop in bench.spelled(bench.expected("go", n)))
    one = bench.submit("go", max_tokens=count, strings=(stop,))
    bench.run()
    [finish] = finishes_of(bench.outputs[one])
    assert (finish.reason, finish.stop) == (FinishReason.STOP, stop)


def test_choices_each_finish_once_and_the_prompt_is_counted_once():
    bench = harness.build()
    one = bench.submit("a long shared prompt", n=4, max_tokens=6)
    bench.run()
    outputs = bench.outputs[one]
    for choice in range(4):
        assert tokens_of(outputs, choice) == bench.expected("a long shared prompt", 6, choice=choice)
    assert sorted(f.choice for f in finishes_of(outputs)) == [0, 1, 2, 3]
    usage = terminal_of(outputs).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (20, 24, 0)


def test_cached_tokens_are_reported_for_the_second_equal_prompt():
    bench = harness.build()
    bench.submit("a long shared prompt")
    bench.run()
    again = bench.submit("a long shared prompt")
    bench.run()
    assert terminal_of(bench.outputs[again]).usage.cached_tokens == 16  # whole blocks, and one position is left to do


def test_abort_ends_every_choice_once_and_frees_the_blocks_at_once():
    bench = harness.build()
    gone, stays = bench.submit("first", n=3, max_tokens=50), bench.submit("second", max_tokens=12)
    for _ in range(4):
        bench.step()
    bench.collect(bench.engine.abort(gone))
    assert [f.reason for f in finishes_of(bench.outputs[gone])] == [FinishReason.ABORT] * 3
    assert isinstance(terminal_of(bench.outputs[gone]), RequestFinished)
    assert bench.engine.abort(gone) == []
    bench.run()
    assert tokens_of(bench.outputs[stays]) == bench.expected("second", 12)
    assert bench.engine.health().free_blocks == bench.config.num_blocks
    bench.engine.scheduler.check()


def test_a_row_that_fails_ends_its_request_alone():
    bench = harness.build()
    bad, good = bench.submit("bad", n=2, max_tokens=30), bench.submit("good", max_tokens=30)
    bench.step()
    bench.runner.fail_sequence(f"{bad}/1", "logits are not finite")
    bench.run()
    end = terminal_of(bench.outputs[bad])
    assert isinstance(end, RequestFailed)
    assert end.message == "logits are not finite"
    assert tokens_of(bench.outputs[good]) == bench.expected("good", 30)
    assert bench.engine.health().alive
    assert bench.engine.health().free_blocks == bench.config.num_blocks


def test_text_that_cannot_be_produced_ends_its_request_alone(monkeypatch, caplog):
    bench = harness.build()
    bad, good = bench.submit("bad", max_tokens=30), bench.submit("good", max_tokens=30)
    bench.step()
    choice = next(c for a, c in bench.engine._owners.values() if a.id == bad)
    monkeypatch.setattr(choice, "push", lambda *_: 1 / 0)
    bench.run()
    assert isinstance(terminal_of(bench.outputs[bad]), RequestFailed)
    assert tokens_of(bench.outputs[good]) == bench.expected("good", 30)
    assert bench.engine.health().free_blocks == bench.config.num_blocks


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_raises_once_changes_no_answer(depth, tmp_path):
    bench = harness.build(depth=depth, record=tmp_path / "trace")
    requests = {f"prompt {i}": bench.submit(f"prompt {i}", max_tokens=30) for i in range(5)}
    bench.runner.crash_at(3)
    bench.run()
    for prompt, one in requests.items():
        assert tokens_of(bench.outputs[one]) == bench.expected(prompt, 30)
    health = bench.engine.health()
    assert (health.alive, health.free_blocks) == (True, bench.config.num_blocks)
    assert bench.engine.measurements().failed_steps == 1
    bench.engine.close()
    report = replay((tmp_path / "trace").read_text().splitlines(keepends=True))
    assert report.same, report.explain()


def test_a_request_that_makes_steps_fail_ends_alone_after_two_of_them():
    bench = harness.build()
    good = {f"prompt {i}": bench.submit(f"prompt {i}", max_tokens=30) for i in range(5)}
    bad = bench.submit("poison", n=2, max_tokens=30)
    bench.step()
    bench.runner.poison(next(seq_id for seq_id, (live, choice) in bench.engine._owners.items() if live.id == bad))
    bench.run()
    end = terminal_of(bench.outputs[bad])
    assert isinstance(end, RequestFailed)
    assert end.poisoned
    assert isinstance(end.error, RequestPoisoned)
    for prompt, one in good.items():
        assert tokens_of(bench.outputs[one]) == bench.expected(prompt, 30)
    assert bench.runner.crashes == bench.engine.measurements().failed_steps == 2
    assert bench.engine.health().free_blocks == bench.config.num_blocks


def test_a_runner_whose_every_step_fails_turns_health_red():
    bench = harness.build(max_num_seqs=2)
    for step in range(20):
        bench.runner.crash_at(step)
    first = [bench.submit(f"prompt {i}", max_tokens=30) for i in range(8)]
    bench.run()
    assert all(isinstance(terminal_of(bench.outputs[one]), RequestFailed) for one in first)
    health = bench.engine.health()
    assert not health.alive
    assert health.reason == "5 steps in a row failed, the last one was step 4"
    with pytest.raises(EngineDead):
        bench.submit("more")
    with pytest.raises(EngineDead):
        bench.engine.step()


def test_a_refused_request_leaves_nothing_behind():
    bench = harness.build()
    first = harness.request_of("same", bench.text, "one")
    bench.submit_request(first)
    with pytest.raises(InvalidParameter):
        bench.engine.submit(bench.intake.resolve(harness.request_of("same", bench.text, "two", n=3)))
    assert bench.engine.scheduler.num_waiting == 1
    bench.run()
    assert tokens_of(bench.outputs["same"]) == bench.expected("one", 8)


def test_a_recorded_run_replays_to_the_same_plans(tmp_path):
    trace = tmp_path / "trace.jsonl"
    bench = harness.build(record=trace, num_blocks=20)
    for index in range(6):
        bench.submit("shared prefix " + "y" * index, n=2, max_tokens=10)
        bench.step()
    _, stop = stop_text(bench)
    bench.submit("go", max_tokens=40, strings=(stop,))
    bench.step()
    bench.collect(bench.engine.abort("request-1"))
    bench.run()
    bench.engine.close()
    report = replay(trace.read_text().splitlines())
    assert report.same, report.explain()
    assert report.steps == bench.engine.health().steps


def test_a_closed_engine_lets_go_of_its_runner():
    bench = harness.build()
    one = bench.submit("hello")
    bench.step()
    runner = weakref.ref(bench.runner)
    bench.engine.close()
    bench.runner = None
    gc.collect()
    assert runner() is None
    assert not bench.engine.has_work
    bench.engine.close()
    assert bench.engine.abort(one) == []


def test_health_counts_what_was_computed_generated_and_found_in_the_cache():
    bench = harness.build()
    assert bench.engine.health().slots == bench.config.max_num_seqs
    for _ in range(2):
        bench.submit("a" * 40, max_tokens=8)
        bench.run()
    health, stats = bench.engine.health(), bench.engine.scheduler.stats
    assert health.generated_tokens == 16
    cached = health.hit_tokens
    assert 0 < cached < 40
    assert health.computed_tokens == 2 * (40 + 7) - cached  # the last token of each is never computed
    assert (health.query_tokens, cached) == (stats.query_tokens, stats.hit_tokens)
    assert (health.cached_blocks, health.preemptions) == (stats.cached_blocks, 0)
