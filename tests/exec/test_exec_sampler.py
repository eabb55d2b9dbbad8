"""The batched sampler: greedy, random by distribution, rows that do not see each other, rows that fail."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from penstock.contract.sampling import SamplingSpec
from penstock.exec import sampler
from penstock.exec.sampler import RowSampling
from penstock.kernels import native
from penstock.kernels.cpu_backend import CpuBackend
from penstock.sampling import SamplingParams, uniform

CHOOSE = CpuBackend().choose if native.available() else None


@pytest.fixture(params=["compiled", "torch", "mixed"], autouse=True)
def sample(request, monkeypatch):
    """Run every test each way that a row can go; mixed: rows with a top_k go through torch, the others do not."""
    if request.param == "mixed":
        monkeypatch.setattr(sampler, "_COMPILED", sampler._COMPILED - {"top_k"})
    return partial(sampler.sample, choose=None if request.param == "torch" else CHOOSE)


def draw(choice=0, **fields):
    params = SamplingParams(**({"seed": 1} | fields))
    return RowSampling.of(params.spec(), choice)


def logits_of(rows, vocabulary, spread=3.0, seed=0):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def reference_distribution(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Temperature, then top-k, then the nucleus (crossing token kept), then min-p, each renormalised; no ties."""
    weights = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-weights)
    weights[order[top_k or len(order) :]] = 0.0
    before = np.cumsum(weights[order] / weights.sum()) - weights[order] / weights.sum()
    weights[order[before >= top_p]] = 0.0
    weights[weights < min_p * weights.max()] = 0.0
    return weights / weights.sum()


def test_greedy_takes_the_likeliest_and_of_equals_the_lowest_id(sample):
    logits = torch.tensor([[0.0, 5.0, 1.0, 5.0], [7.0, 7.0, 7.0, 7.0], [-1.0, -3.0, -1.0, 0.5]])
    assert sample(logits, [draw(temperature=0)] * 3, [4, 5, 6]).tokens == [1, 0, 3]
    wide = torch.zeros(1, 100_000)
    wide[0, [40_000, 77_777]] = 1.0
    assert sample(wide, [draw(temperature=0)], [0]).tokens == [40_000]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 2.0, "top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_random_tokens_follow_the_distribution_of_the_papers(sample, fields):
    draws, vocabulary = 20_000, 40
    logits = logits_of(1, vocabulary, spread=1.5)
    rows = logits.expand(draws, -1).contiguous()
    tokens = sample(rows, [draw(seed=99, **fields)] * draws, range(draws)).tokens
    expected = reference_distribution(logits[0].double().numpy(), **fields) * draws
    seen = np.bincount(tokens, minlength=vocabulary)
    assert seen[expected == 0].sum() == 0
    common, rare = expected >= 5, (expected > 0) & (expected < 5)
    cells = [(s, e) for s, e in zip(seen[common], expected[common], strict=True)]
    if rare.any():
        cells.append((seen[rare].sum(), expected[rare].sum()))
    chi_square = sum((s - e) ** 2 / e for s, e in cells)
    freedom = len(cells) - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom) + 8  # about once in 20,000 honest runs


def test_a_token_is_the_first_whose_sum_of_probabilities_exceeds_the_uniform(sample):
    logits = torch.tensor([[0.1, 0.2, 0.0, 0.4, 0.3]]).log()
    sums = np.cumsum([0.1, 0.2, 0.0, 0.4, 0.3])
    for position in range(300):
        expected = int(np.searchsorted(sums, uniform(5, 2, position), side="right"))
        assert sample(logits, [draw(seed=5, choice=2)], [position]).tokens == [expected]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_rows_outcome_does_not_depend_on_the_other_rows_bit_for_bit(sample, threads):
    kinds = [
        draw(temperature=0, logprobs=0),
        draw(logprobs=0),
        draw(temperature=0.7, top_p=0.9, logprobs=0, seed=-4),
        draw(top_k=50, min_p=0.01, choice=3),
        draw(temperature=1.8, top_p=0.9999, logprobs=0),
        draw(temperature=0.3, top_k=5, top_p=0.5, min_p=0.2),
    ]
    logits = logits_of(len(kinds), 50_001, spread=1.0)
    positions = [3, 70_000, 0, 12, 5, 9]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = sample(logits, kinds, positions)
        for order in ([5, 4, 3, 2, 1, 0], [2, 2, 0], *([row] for row in range(6))):
            apart = sample(logits[order], [kinds[row] for row in order], [positions[row] for row in order])
            assert apart.tokens == [together.tokens[row] for row in order]
            assert apart.logprobs == [together.logprobs[row] for row in order]
    finally:
        torch.set_num_threads(before)


def test_seed_choice_and_position_each_change_what_is_drawn_and_nothing_else_does(sample):
    logits = torch.zeros(1, 100_000)
    base = sample(logits, [draw()], [7]).tokens
    assert sample(logits, [draw()], [7]).tokens == base
    others = [sample(logits, [draw(seed=2)], [7]), sample(logits, [draw(choice=1)], [7]), sample(logits, [draw()], [8])]
    assert all(other.tokens != base for other in others)


def test_logprobs_are_those_of_the_raw_distribution_and_only_where_asked_for(sample):
    logits = logits_of(3, 100)
    sharp = {"temperature": 0.2, "top_k": 3}
    draws = [draw(**sharp, logprobs=0), draw(**sharp), draw(temperature=0, logprobs=0)]
    sampled = sample(logits, draws, [1, 2, 3])
    raw = logits.double().log_softmax(-1)
    assert sampled.logprobs[1] == 0.0
    for row in (0, 2):
        assert sampled.logprobs[row] == pytest.approx(raw[row, sampled.tokens[row]].item(), abs=1e-5)


def test_logits_are_left_as_they_were(sample):
    logits = logits_of(2, 100)
    before = logits.clone()
    sample(logits, [draw(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1)] * 2, [0, 1])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), "all -inf"])
@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {}, {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1}]
)
def test_a_row_that_is_not_finite_fails_alone(sample, poison, fields):
    logits = logits_of(3, 600)
    good = sample(logits, [draw(**fields, logprobs=0)] * 3, [4, 5, 6])
    if poison == "all -inf":
        logits[1] = float("-inf")
    else:
        logits[1, 17] = poison
    sampled = sample(logits, [draw(**fields, logprobs=0)] * 3, [4, 5, 6])
    assert sampled.failed == [False, True, False]
    assert [sampled.tokens[row] for row in (0, 2)] == [good.tokens[row] for row in (0, 2)]
    assert [sampled.logprobs[row] for row in (0, 2)] == [good.logprobs[row] for row in (0, 2)]


def test_tokens_ruled_out_by_the_model_are_never_drawn(sample):
    logits = torch.full((500, 50), float("-inf"))
    logits[:, [3, 8]] = 0.0
    sampled = sample(logits, [draw(temperature=2.0, top_p=0.99)] * 500, range(500))
    assert set(sampled.tokens) == {3, 8}
    assert not any(sampled.failed)


@pytest.mark.parametrize(("number", "token"), [(0.0, 2), (1 - 2.0**-52, 7)])
def test_the_ends_of_the_unit_interval_draw_tokens_that_can_be_drawn(sample, monkeypatch, number, token):
    monkeypatch.setattr("penstock.exec.sampler.uniform", lambda seed, choice, position: number)
    logits = torch.full((1, 10), float("-inf"))
    logits[0, 2:8] = torch.tensor([0.3, 1.1, -2.0, 0.7, 4.0, 0.1])
    assert sample(logits, [draw()], [3]).tokens == [token]


def test_a_random_draw_without_a_seed_is_our_bug():
    with pytest.raises(AssertionError, match="seed"):
        RowSampling.of(SamplingSpec(), 0)
