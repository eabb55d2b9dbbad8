"""Targets that are exact are found exact, under schedules that really happen."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from verify_fakes import SMALL, TEXT, VOCAB, Follower, RowLM, fake_target, row_attention, target_of

from needs import COMPILED
from penstock.contract.config import EngineConfig
from penstock.contract.request import StopRules
from penstock.contract.sampling import SamplingSpec
from penstock.contract.thinking import ThinkingBudget
from penstock.core.replaying import replay
from penstock.kernels import native
from penstock.kernels.attention_spec import AttentionSpec
from penstock.verify import Budget, profile, verify
from penstock.verify.compare import Difference, compare, total
from penstock.verify.dry_run import dry_run
from penstock.verify.requests import draw_requests, is_plain
from penstock.verify.run import Outcome, run_alone, run_schedule
from penstock.verify.schedules import draw_schedules

DRY_RUN = partial(dry_run, target=fake_target())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(3))
def test_a_model_that_computes_row_by_row_is_exact(seed):
    report = verify(target_of(RowLM()), replace(SMALL, seed=seed), EngineConfig())
    assert report.exact, report.table()
    assert report.first_failed is None
    assert report.tally.mismatches == 0
    assert report.verdict_line() == (
        f"exact: 0 mismatching tokens of {report.tally.tokens}, largest logprob difference 0"
    )
    assert any(verdict.preemptions for verdict in report.verdicts)
    assert any(verdict.hit_tokens for verdict in report.verdicts)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(3))
def test_the_fake_runner_is_exact(seed):
    report = verify(fake_target(), Budget(seed=seed, prompt_tokens=32), EngineConfig())
    assert report.exact, report.table()
    assert all(bool(verdict.preemptions) == verdict.schedule.tight for verdict in report.verdicts), report.table()
    assert all(verdict.hit_tokens for verdict in report.verdicts if verdict.schedule.cache == "warm"), report.table()
    assert not any(verdict.hit_tokens for verdict in report.verdicts if verdict.schedule.cache == "off")


def test_a_used_up_budget_closes_the_reasoning_in_every_schedule():
    """With all requests under a budget, so that preemptions and chunks fall before, into and after the tag."""
    target = target_of(RowLM())
    sizes = {"longest_prompt": 20, "new_tokens": 24}
    requests = tuple(
        replace(
            request,
            sampling=SamplingSpec((("logprobs", 0), ("seed", at))),
            stop=StopRules(max_tokens=24),
            thinking=ThinkingBudget(at % 6, opened=True),
            grammar=None,
        )
        for at, request in enumerate(draw_requests(8, 1, VOCAB, **sizes))
    )
    alone = {request.id: run_alone(target, request) for request in requests}
    for request in requests:
        letters = [TEXT.tokenizer.token_bytes(token) for token in alone[request.id].tokens]
        assert b"".join(letters[request.thinking.tokens :]).startswith(b"</think>")
    knobs = {"threads": 1, "model_digest": b"toy", "dry_run": partial(dry_run, target=target)}
    schedules = draw_schedules(4, 1, requests, EngineConfig(), vocab=VOCAB, **knobs)
    runs = [run_schedule(target, schedule, lambda: None) for schedule in schedules]
    assert any(run.preemptions for run in runs)
    for outcomes in (outcomes for run in runs for outcomes in run.outcomes):
        assert outcomes == alone


@pytest.mark.parametrize("seed", range(8))
def test_what_schedules_are_built_for_happens(seed):
    """In sizes as small as tests use: every tight schedule recomputes requests, and plain ones fill whole batches."""
    report = verify(fake_target(), replace(SMALL, schedules=4, requests=6, seed=seed), EngineConfig())
    assert report.proved, report.table()
    recomputed = [verdict.recomputed for verdict in report.verdicts]
    assert [count > 0 for count in recomputed] == [False, True, False, True]
    assert sum(verdict.plain_steps for verdict in report.verdicts) > 5
    assert f"{sum(recomputed)} recomputed generated tokens (built to preempt: schedules 1, 3)" in report.coverage_line()


def test_a_proof_in_which_nothing_was_preempted_or_batched_is_none():
    report = verify(fake_target(), replace(SMALL, schedules=2), EngineConfig())
    assert report.proved
    served, tight = report.verdicts
    idle = replace(report, verdicts=(served, replace(tight, recomputed=0)))
    assert idle.exact
    assert not idle.proved
    assert idle.verdict_line().startswith("not proved: schedule 1 was built to preempt, and recomputed no request.")
    apart = replace(report, verdicts=tuple(replace(verdict, plain_steps=0) for verdict in report.verdicts))
    assert apart.lacking == ("no step drew for several plain requests alone",)
    assert apart.as_json()["lacking"] == list(apart.lacking)
    assert verify(fake_target(), replace(SMALL, requests=1, schedules=2), EngineConfig()).lacking == idle.lacking


def test_plain_requests_have_other_rows_in_other_schedules():
    """The sampler of a whole batch sees the same request at several places, alone with other plain ones."""
    rows: dict[str, set[int]] = {}
    make = fake_target().make_runner

    class Watched:
        def __init__(self, config):
            self.runner, self.owners = make(config), {}

        def run(self, plan):
            self.owners |= {admit.slot: admit.seq_id for admit in plan.admits}
            drawing = [self.owners[row.slot] for row in plan.rows if row.sample]
            if plain.issuperset(drawing):
                for at, name in enumerate(drawing):
                    rows.setdefault(name, set()).add(at)
            return self.runner.run(plan)

    requests = draw_requests(16, 0, VOCAB, longest_prompt=20, new_tokens=8)
    plain = {request.id for request in requests if is_plain(request)}
    target = replace(fake_target(), make_runner=Watched)
    assert verify(target, replace(SMALL, requests=16), EngineConfig()).requests == requests
    assert rows.keys() == plain
    assert all(len(places) > 1 for places in rows.values()), rows


def test_every_token_of_every_run_is_compared():
    report = verify(fake_target(), SMALL, EngineConfig())
    generated = sum(len(run_alone(fake_target(), request).tokens) for request in report.requests)
    runs = [verdict.schedule.runs for verdict in report.verdicts]
    assert set(runs) == {1, 2}
    assert [verdict.tally.tokens for verdict in report.verdicts] == [generated * count for count in runs]


def test_progress_counts_to_the_end_one_by_one():
    seen = []
    report = verify(fake_target(), SMALL, EngineConfig(), lambda done, whole: seen.append((done, whole)))
    whole = SMALL.requests * (1 + sum(verdict.schedule.runs for verdict in report.verdicts))
    assert seen == [(done + 1, whole) for done in range(whole)]


def test_threads_are_what_each_schedule_says_and_are_put_back():
    asked = []
    target = replace(fake_target(), set_threads=asked.append)
    report = verify(target, SMALL, EngineConfig())
    threads = [verdict.schedule.threads for verdict in report.verdicts]
    assert asked == [target.threads, *threads, target.threads]


def test_threads_are_put_back_after_a_failure():
    def crash(config):
        raise RuntimeError("no memory")

    asked = []
    with pytest.raises(RuntimeError, match="no memory"):
        verify(replace(fake_target(crash), set_threads=asked.append), SMALL, EngineConfig())
    assert asked == [2, 2]


def test_a_schedule_is_followed_to_the_letter():
    """Its record shows the order and the steps of the arrivals, the strangers' ends, and both runs."""
    requests = draw_requests(10, 1, VOCAB, longest_prompt=30, new_tokens=8)
    drawn = draw_schedules(7, 1, requests, EngineConfig(), vocab=VOCAB, threads=1, model_digest=b"", dry_run=DRY_RUN)
    aborted = 0
    for schedule in drawn:
        finished = []
        run = run_schedule(fake_target(), schedule, lambda finished=finished: finished.append(1))
        records = [json.loads(line) for line in run.trace]
        submitted = [record["submit"]["id"] for record in records if "submit" in record]
        expected = [arrival.request.id for arrival in schedule.arrivals]
        assert [name for name in submitted if not name.startswith("stranger")] == expected * schedule.runs
        assert len(submitted) == schedule.runs * (len(requests) + len(schedule.strangers))
        assert len(finished) == len(requests) * schedule.runs
        assert sum("plan" in record for record in records) == run.steps
        aborts = [record["abort"]["seq_id"] for record in records if "abort" in record]
        stoppable = {request.id for request in requests if request.stop.strings}
        assert all(name.startswith("stranger/") or name in stoppable for name in aborts)
        aborted += sum(name.startswith("stranger/") for name in aborts)
        assert replay(run.trace).same
    assert aborted > 10


def test_requests_that_come_later_are_submitted_later():
    requests = draw_requests(10, 1, VOCAB, longest_prompt=30, new_tokens=8)
    drawn = draw_schedules(7, 1, requests, EngineConfig(), vocab=VOCAB, threads=1, model_digest=b"", dry_run=DRY_RUN)
    spread = [schedule for schedule in drawn if schedule.arrivals[-1].step > 5]
    assert spread
    for schedule in spread:
        records = [json.loads(line) for line in run_schedule(fake_target(), schedule, list).trace]
        kinds = [next(iter(record)) for record in records]
        first_plan = kinds.index("plan")
        assert "submit" in kinds[first_plan:]


def test_the_reference_is_one_chunk_without_a_cache():
    seen = []
    target = fake_target()
    make = target.make_runner

    class Watched:
        def __init__(self, config):
            self.runner = make(config)
            assert not config.prefix_caching

        def run(self, plan):
            seen.append([row.count for row in plan.rows])
            return self.runner.run(plan)

    request = draw_requests(1, 5, VOCAB, longest_prompt=30, new_tokens=8)[0]
    outcome = run_alone(replace(target, make_runner=Watched), request)
    assert seen == [[len(request.prompt)]] + [[1]] * (request.stop.max_tokens - 1)
    assert len(outcome.tokens) == request.stop.max_tokens


def test_comparison_has_no_tolerance_and_counts_places():
    alone = Outcome((1, 2, 3, 4), (-1.0, -2.0, -3.0, -4.0))
    tally, difference = compare(alone, alone)
    assert (tally.tokens, tally.mismatches, tally.requests, difference) == (4, 0, 0, None)
    nudged = replace(alone, logprobs=(-1.0, -2.0 + 2**-40, -3.0, -4.0))
    tally, difference = compare(alone, nudged)
    assert (tally.requests, tally.ids, tally.logprobs, tally.largest) == (1, 0, 1, 2**-40)
    assert difference == Difference(1, (2, -2.0), (2, -2.0 + 2**-40), "")
    parted = Outcome((1, 9, 3), (-1.0, -0.5, -8.0))
    tally, difference = compare(alone, parted)
    assert (tally.ids, tally.logprobs, tally.largest) == (2, 1, 0.0)
    assert difference == Difference(1, (2, -2.0), (9, -0.5), "")
    failed = Outcome((), (), "not finite")
    tally, difference = compare(alone, failed)
    assert (tally.ids, difference) == (4, Difference(0, (1, -1.0), None, "not finite"))
    whole = total([tally, compare(alone, nudged)[0]])
    assert (whole.tokens, whole.requests, whole.mismatches, whole.largest) == (8, 2, 5, 2**-40)


@pytest.mark.parametrize(
    "compiled", [pytest.param(True, marks=pytest.mark.skipif(not native.available(), reason=COMPILED)), False]
)
def test_a_real_checkpoint_in_float32_is_exact_or_by_torch_differs_by_roundings_at_most(
    tmp_path, monkeypatch, compiled
):
    """Through the files, the families and the kernels of this machine."""
    from tiny_checkpoints import write_checkpoint, write_letters

    threads = torch.get_num_threads()
    directory = write_checkpoint(tmp_path, "llama", "wide_heads_untied")
    write_letters(directory, 101)
    served = EngineConfig(model=str(directory), dtype="float32", threads=1)
    if not compiled:
        monkeypatch.setattr(native, "module", None)
    try:
        report = profile(served, Budget(requests=8, schedules=3, prompt_tokens=24, new_tokens=8))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    assert report.exact or not compiled, report.verdict_line()
    assert report.tally.largest < 1e-4
    assert report.tally.tokens > 60


@pytest.mark.skipif(not native.available(), reason=COMPILED)
def test_a_real_checkpoint_whose_every_layer_slides_gives_blocks_back_and_is_exact(tmp_path):
    from tiny_checkpoints import write_checkpoint, write_letters

    threads = torch.get_num_threads()
    sliding = {"layer_types": ["sliding_attention"] * 7, "sliding_window": 21}
    directory = write_checkpoint(tmp_path, "gemma2", "wide_heads_tied_small_window", **sliding)
    write_letters(directory, 101)
    served = EngineConfig(model=str(directory), dtype="float32", threads=1)
    try:
        report = profile(served, Budget(requests=8, schedules=4, prompt_tokens=120, new_tokens=12))
    finally:
        torch.set_num_threads(threads)
    assert report.proved, report.verdict_line()
    assert {verdict.schedule.config.window for verdict in report.verdicts} == {21}
    given_back = [verdict.given_back for verdict in report.verdicts]
    assert min(given_back) > 0
    assert report.coverage_line().endswith(f", {sum(given_back)} blocks given back behind a window")
    assert [each["given_back"] for each in report.as_json()["schedules"]] == given_back


def test_without_a_window_no_block_is_given_back_and_nothing_is_said_of_it():
    report = verify(fake_target(), replace(SMALL, schedules=2), EngineConfig())
    assert [verdict.given_back for verdict in report.verdicts] == [0, 0]
    assert report.coverage_line().endswith("positions from the cache")


def test_a_model_that_carries_state_is_run_with_checkpoints_and_alone_without():
    configs = []

    def make(config):
        configs.append(config)
        return Follower(config)

    report = verify(fake_target(make, stateful=True), replace(SMALL, schedules=6), EngineConfig())
    assert report.proved, report.verdict_line()
    restored = [verdict.restored for verdict in report.verdicts]
    assert sum(restored) > 0
    assert report.coverage_line().endswith(f", {sum(restored)} states restored")
    assert {config.checkpoints for config in configs if not config.prefix_caching and config.max_num_seqs == 1} == {0}
    assert min(verdict.schedule.config.checkpoints for verdict in report.verdicts) > 0


@pytest.mark.parametrize("window", [7, 21])
def test_tight_schedules_preempt_under_a_window_too(window):
    """No sequence holds more than its window and a step's tokens, so the pool is cut to that."""
    target = fake_target(lambda config: Follower(replace(config, window=window)), window)
    report = verify(target, Budget(requests=12, schedules=4, prompt_tokens=32), EngineConfig())
    assert report.proved, report.verdict_line()
    for verdict in report.verdicts:
        config, needs = verdict.schedule.config, [len(each.prompt) + each.stop.max_tokens for each in report.requests]
        assert config.num_blocks >= config.most_blocks(max(needs))


def test_attention_split_at_the_chunk_is_right_but_for_its_roundings():
    """The violation changes only bits and computes nothing wrong: what the harness finds with it is subtle."""
    generator = torch.Generator().manual_seed(3)
    q, cache = torch.randn(6, 6, 5, generator=generator), torch.randn(4, 4, 2, 5, generator=generator)
    spec = AttentionSpec(0.4)
    arguments = (q, cache, cache.flip(0), torch.tensor([0, 6]), torch.tensor([14]), torch.tensor([[2, 0, 3, 1]]), spec)
    whole, split = row_attention(*arguments), partial(row_attention, split_at_chunk=True)(*arguments)
    assert torch.allclose(whole, split, atol=1e-5)
    assert not torch.equal(whole, split)
