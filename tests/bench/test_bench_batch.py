"""Offline rates: exact on an engine whose steps take a known time."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest

from penstock.bench.batch import Load, Run, batch_table, check_fits, grid, measure, random_prompts, summary, warm_up
from penstock.contract.errors import ConfigError, EngineFault


@dataclass
class Choice:
    token_ids: list[int]


@dataclass
class Progress:
    request_id: str
    outputs: list[Choice]
    error: str = ""


@dataclass
class ClockworkEngine:
    """Each step takes one second: one prompt is prefilled (its first token comes with it), all others decode."""

    now: float = 0.0
    prompts: list[list[int]] = field(default_factory=list)
    goals: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    error_at: float = -1.0
    short_by: int = 0

    def add_request(self, prompt_given, sampling_params):
        assert sampling_params.ignore_eos
        assert sampling_params.temperature == 0
        name = str(len(self.prompts))
        self.prompts.append(prompt_given)
        self.goals[name] = sampling_params.max_tokens - self.short_by
        return name

    def has_unfinished_requests(self):
        return any(self.tokens.get(name, 0) < goal for name, goal in self.goals.items())

    def step(self):
        self.now += 1.0
        moved = [name for name in self.tokens if self.tokens[name] < self.goals[name]]
        fresh = [name for name in self.goals if name not in self.tokens][:1]
        for name in moved + fresh:
            self.tokens[name] = self.tokens.get(name, 0) + 1
        error = "broken" if self.now == self.error_at else ""
        return [Progress(name, [Choice([7] * self.tokens[name])], error) for name in moved + fresh]


def run(engine: ClockworkEngine, load: Load) -> Run:
    return measure(engine, load, vocab_size=10, seed=0, now=lambda: engine.now)


def test_the_phases_end_with_the_last_first_token_and_the_last_token():
    # 3 prompts are prefilled in 3 steps while the earlier ones decode: 3 + 2 + 1 tokens by then. The last stream
    # needs 4 more steps.
    measured = run(ClockworkEngine(), Load(prompt_tokens=8, new_tokens=5, streams=3))
    assert measured == Run(Load(8, 5, 3), prefill_s=3.0, total_s=7.0, early_tokens=6)
    assert measured.prefill_tok_s == 3 * 8 / 3
    assert measured.decode_tok_s == (3 * 5 - 6) / 4
    assert measured.output_tok_s == 15 / 7
    assert measured.total_tok_s == 3 * (8 + 5) / 7


def test_prompts_are_distinct_seeded_and_within_the_vocabulary():
    load = Load(64, 2, 4)
    first, again, other = (list(random_prompts(load, 50, seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert len({tuple(prompt) for prompt in first + other}) == 8
    assert {len(prompt) for prompt in first} == {64}
    assert max(max(prompt) for prompt in first) < 50


def test_a_warm_up_has_the_same_shape_but_few_tokens():
    engine = ClockworkEngine()
    warm_up(engine, Load(8, 500, 2), vocab_size=10)
    assert list(engine.goals.values()) == [16, 16]
    assert [len(prompt) for prompt in engine.prompts] == [8, 8]


def test_a_stream_that_fails_or_ends_early_is_no_measurement():
    with pytest.raises(EngineFault, match="broken"):
        run(ClockworkEngine(error_at=2.0), Load(8, 5, 1))
    with pytest.raises(EngineFault, match="4 of 5"):
        run(ClockworkEngine(short_by=1), Load(8, 5, 1))
    with pytest.raises(EngineFault, match="without a token"):
        run(ClockworkEngine(short_by=5), Load(8, 5, 1))


def test_the_grid_is_every_combination():
    assert grid([1, 2], [3], [4, 5]) == [Load(1, 3, 4), Load(1, 3, 5), Load(2, 3, 4), Load(2, 3, 5)]


@pytest.mark.parametrize(
    ("load", "option"), [(Load(8, 8, 5), "max-num-seqs"), (Load(60, 8, 1), "context"), (Load(30, 30, 4), "kv-cache")]
)
def test_loads_that_would_queue_are_refused(load, option):
    check_fits([Load(30, 30, 3)], max_num_seqs=4, max_model_len=64, kv_tokens=200)
    with pytest.raises(ConfigError, match=option):
        check_fits([load], max_num_seqs=4, max_model_len=64, kv_tokens=200)


def test_a_row_has_medians_spread_and_every_run_and_the_table_shows_it():
    load = Load(10, 11, 2)
    runs = [Run(load, prefill_s=1.0, total_s=1.0 + seconds, early_tokens=2) for seconds in (4.0, 1.0, 2.0)]
    row = json.loads(json.dumps(summary(runs)))
    assert (row["decode_tok_s"], row["decode_tok_s_lowest"], row["decode_tok_s_highest"]) == (10, 5, 20)
    assert (row["prefill_tok_s"], row["total_tok_s"], row["output_tok_s"]) == (20, 42 / 3, 22 / 3)
    assert [Run.read(record) for record in row["runs"]] == runs
    heads, line = batch_table([row]).splitlines()
    assert line.split() == ["10", "11", "2", "20.0", "10.0", "14.0", "5.0..20.0"]
    assert heads.split()[:3] == ["prompt", "new", "streams"]
