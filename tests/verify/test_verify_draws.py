"""What is drawn: the same for the same seed, valid, and with every circumstance in it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random
from types import SimpleNamespace

import pytest
from verify_fakes import VOCAB, fake_target

from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError
from penstock.contract.grammar import GrammarKind
from penstock.contract.request import StopRules
from penstock.core import Scheduler
from penstock.sampling import PARAMETERS, Home, SamplingParams
from penstock.verify import Budget, verify
from penstock.verify.dry_run import dry_run
from penstock.verify.requests import Kind, draw_params, draw_requests, is_plain, kind_of
from penstock.verify.schedules import draw_schedules

DRY_RUN = partial(dry_run, target=fake_target())


def draw(count=200, seed=0):
    return draw_requests(count, seed, VOCAB, longest_prompt=40, new_tokens=8)


def schedules(requests, count=7, seed=0, served=None, dry=DRY_RUN, blocks=0):
    return draw_schedules(
        count,
        seed,
        requests,
        served or EngineConfig(),
        vocab=VOCAB,
        threads=4,
        model_digest=b"root",
        dry_run=dry,
        served_blocks=blocks,
    )


def test_the_same_seed_draws_the_same_and_another_seed_something_else():
    assert draw(seed=3) == draw(seed=3) != draw(seed=4)
    requests = draw(12)
    assert schedules(requests, seed=3) == schedules(requests, seed=3) != schedules(requests, seed=4)


def test_fewer_requests_are_the_beginning_of_more():
    assert draw(10) == draw(30)[:10]


def test_requests_are_of_every_kind():
    requests = draw()
    assert len(requests) == len({request.id for request in requests}) == 200
    lengths = {len(request.prompt) for request in requests}
    assert (min(lengths), max(lengths)) == (1, 40)
    assert len(lengths) > 15
    assert {request.stop.max_tokens for request in draw(600)} == set(range(1, 9))
    assert {request.choice for request in requests} == {0, 1, 2}
    specs = [request.sampling for request in requests]
    assert all(spec.has("logprobs") != is_plain(request) for spec, request in zip(specs, requests, strict=True))
    greedy = [spec.get("temperature", 1.0) == 0 for spec in specs]
    assert 0.2 < sum(greedy) / len(greedy) < 0.5
    assert all(spec.has("seed") for spec, one in zip(specs, greedy, strict=True) if not one)
    for name in ("top_k", "top_p", "min_p"):
        assert 10 < sum(spec.has(name) for spec in specs) < 150
    looked_at = {parameter.name for parameter in PARAMETERS if parameter.home is Home.SPEC}
    assert looked_at == {name for spec in specs for name, _ in spec.entries}
    assert {bool(request.stop.repetition) for request in requests} == {True, False}
    assert {bool(request.stop.strings) for request in requests} == {True, False}
    for request in requests:  # one choice scores the prompt for all, as the engine's intake arranges
        assert request.fresh_prompt == request.sampling.has("prompt_logprobs")
        assert not (request.choice and request.fresh_prompt)
    shared = sum(any(r.prompt[:2] == o.prompt[:2] != () and r.prompt != o.prompt for o in requests) for r in requests)
    assert shared > 60


def test_a_fixed_share_is_plain_and_another_shows_its_penalties():
    for seed in range(5):
        requests = draw(32, seed)
        plain = [request for request in requests if is_plain(request)]
        assert len(plain) >= 10
        for request in plain:
            assert {name for name, _ in request.sampling.entries} <= {"temperature", "top_p", "seed"}
            assert request.sampling.has("seed")
            assert request.stop == StopRules(max_tokens=8, ignore_eos=True)
            assert (request.grammar, request.thinking, request.choice) == (None, None, 0)
        assert {request.id for request in draw(6, seed)} >= {request.id for request in plain[:2]}
        assert sum(kind_of(request) is Kind.PENALISED for request in requests) >= 2


def test_a_grammar_is_asked_for_two_choices_or_more_where_the_model_can_follow_one():
    class Anything:
        def check(self, grammar, room):
            assert room == 8
            return grammar

    requests = draw_requests(32, 0, replace(VOCAB, grammars=Anything()), longest_prompt=40, new_tokens=8)
    formed = [request.id.split("/") for request in requests if kind_of(request) is Kind.FORMED]
    assert len({number for number, _ in formed}) >= 3
    assert all([number, "1"] in formed for number, _ in formed)


def test_every_parameter_there_is_is_drawn_and_not_always():
    """A new file in `sampling/parameters` fails here until it is drawn too."""
    draw = Random(0)
    params = [draw_params(draw, VOCAB, 8) for _ in range(600)]
    for parameter in PARAMETERS:
        values = [getattr(each, parameter.name) for each in params]
        assert any(value != parameter.neutral for value in values), parameter.name
        if parameter.name != "max_tokens":
            assert any(value == parameter.neutral for value in values) or parameter.name == "logprobs", parameter.name
    assert {each.structured_outputs.kind for each in params if each.structured_outputs} == set(GrammarKind)


def test_what_a_model_refuses_is_left_out_and_nothing_else():
    everything = SamplingParams(temperature=0, allowed_token_ids=[0], bad_words=["!"], presence_penalty=1)
    spec = VOCAB.resolve(everything)
    assert not spec.has("bad_words")
    assert spec.has("allowed_token_ids")
    assert spec.has("presence_penalty")
    assert VOCAB.grammar(SamplingParams(structured_outputs={"json_object": True})) is None


def test_choices_of_an_ask_differ_in_their_index_alone():
    requests = draw()
    by_request: dict[str, list] = {}
    for request in requests:
        by_request.setdefault(request.id.split("/")[0], []).append(request)
    assert max(map(len, by_request.values())) == 3
    for choices in by_request.values():
        alike = {replace(r, id="", choice=0, fresh_prompt=False, sampling=_unscored(r.sampling)) for r in choices}
        assert len(alike) == 1


def _unscored(spec):
    return spec.without("prompt_logprobs")


@pytest.mark.parametrize("seed", [0, 1, 3, 4, 5])  # the requests of seed 2 are too small to compete for memory
def test_six_drawn_schedules_meet_every_cache_state_with_and_without_pressure(seed):
    drawn = schedules(draw(16, seed), seed=seed)
    kinds = {(schedule.cache, schedule.tight) for schedule in drawn[1:]}
    assert kinds == {(cache, tight) for cache in ("off", "cold", "warm") for tight in (True, False)}
    assert all(bool(DRY_RUN(schedule).recomputed) == schedule.tight for schedule in drawn)
    assert len({schedule.config.block_size for schedule in drawn}) > 2
    assert len({schedule.threads for schedule in drawn}) > 1
    assert any(schedule.arrivals[-1].step for schedule in drawn)


@pytest.mark.parametrize("seed", range(5))
def test_a_schedule_runs_every_request_once_and_can_hold_each(seed):
    requests = draw(16, seed)
    for schedule in schedules(requests, seed=seed):
        arrived = [arrival.request for arrival in schedule.arrivals]
        assert sorted(arrived, key=lambda request: request.id) == sorted(requests, key=lambda request: request.id)
        steps = [arrival.step for arrival in schedule.arrivals]
        assert steps == sorted(steps)
        assert schedule.config.model_digest == b"root"
        scheduler = Scheduler(schedule.config)
        for request in (*arrived, *(stranger.arrival.request for stranger in schedule.strangers)):
            scheduler.submit(request)
        assert schedule.strangers


def test_the_first_schedule_is_the_engine_as_it_is_served():
    served = EngineConfig(block_size=7, max_num_seqs=5, max_num_batched_tokens=33, prefix_caching=False)
    first = schedules(draw(8), count=1, served=served)[0]
    assert (first.config.block_size, first.config.max_num_seqs, first.config.max_num_batched_tokens) == (7, 5, 33)
    assert (first.cache, first.threads, first.tight) == ("off", 4, False)
    assert schedules(draw(8), count=1)[0].cache == "warm"


def test_pressure_that_cannot_be_had_is_given_up_and_not_waited_for():
    tries = []
    nothing = SimpleNamespace(recomputed=0, plain_steps=0)
    drawn = schedules(draw(4), count=2, dry=lambda schedule: tries.append(schedule) or nothing)
    assert len(drawn) == 2
    assert 1 < len(tries) < 100
    assert not DRY_RUN(schedules(draw(1), count=2)[1]).recomputed


@pytest.mark.parametrize("field", ["requests", "schedules", "prompt_tokens", "new_tokens"])
def test_an_extent_of_nothing_is_refused_by_name(field):
    with pytest.raises(ConfigError, match=field):
        Budget(**{field: 0})


def test_prompts_shrink_to_the_context_and_outputs_that_fill_it_are_refused():
    report = verify(fake_target(), Budget(requests=40, schedules=1, prompt_tokens=500, new_tokens=60), EngineConfig())
    assert max(len(request.prompt) for request in report.requests) == 4
    with pytest.raises(ConfigError, match="new_tokens"):
        verify(fake_target(), Budget(new_tokens=64), EngineConfig())


def test_the_first_schedule_has_the_kv_blocks_that_the_operator_pays_for():
    requests = draw(12)
    enough = schedules(requests)[0].config.num_blocks
    assert schedules(requests, blocks=10 * enough)[0].config.num_blocks == enough
    few = schedules(requests, blocks=enough - 1)
    assert few[0].config.num_blocks == enough - 1
    assert few[1:] == schedules(requests)[1:]
    with pytest.raises(ConfigError, match="kv_cache_memory: holds 1 blocks of 16 tokens"):
        schedules(requests, blocks=1)
