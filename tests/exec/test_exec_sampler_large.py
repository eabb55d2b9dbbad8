"""Vocabularies of today's size: both ways of sampling keep and draw what float64 does, one row at a time."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from penstock.exec import sampler
from penstock.exec.prompt_scores import prompt_scores
from penstock.exec.sampler import RowSampling
from penstock.kernels import native
from penstock.kernels.cpu_backend import CpuBackend
from penstock.sampling import SamplingParams

DRAWS = 12
FIELDS = [
    {"top_k": 1000},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 0.99},
    {"min_p": 0.02},
    {"temperature": 0.8, "top_k": 30_000, "top_p": 0.95, "min_p": 0.001},
]


@pytest.fixture(params=["torch", *native.isas()])
def sample(request):
    """`sampler.sample` in torch, or in the compiled call of each instruction set."""
    choose = None if request.param == "torch" else CpuBackend(request.param).choose
    return partial(sampler.sample, choose=choose)


def distribution(logits, fields):
    """What may be drawn, by the definitions, in float64."""
    x = logits.double().numpy() / fields.get("temperature", 1.0)
    if "top_k" in fields:
        x = np.where(x >= np.partition(x, -fields["top_k"])[-fields["top_k"]], x, -np.inf)
    p = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    if "top_p" in fields:
        order = np.argsort(-p, kind="stable")
        p[order[1 + int((np.cumsum(p[order])[:-1] < fields["top_p"]).sum()) :]] = 0.0
    p[p < fields.get("min_p", 0.0) * p.max()] = 0.0
    return p / p.sum()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("vocabulary", [50_257, 151_936])
@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_the_least_likely_that_are_kept_are_drawn_in_the_middle_of_their_share(
    sample, fields, vocabulary, spread, monkeypatch
):
    """One token too many or too few shifts the others by the share of such a token, and so to their neighbours."""
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(4)) * spread
    p = distribution(logits[0], fields)
    kept = np.flatnonzero(p)
    tokens = np.sort(kept[np.argsort(p[kept])][:DRAWS])
    middles = np.cumsum(p)[tokens] - p[tokens] / 2
    monkeypatch.setattr(sampler, "uniform", lambda seed, choice, position: float(middles[choice]))
    spec = SamplingParams(seed=1, **fields).spec()
    drawn = sample(
        logits.expand(DRAWS, -1).contiguous(), [RowSampling.of(spec, choice) for choice in range(DRAWS)], [0] * DRAWS
    )
    assert drawn.tokens == tokens.tolist()


def log_probabilities(logits):
    """By the definition, in float64."""
    x = logits.numpy().astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fields", [{"logprobs": 0}, {"logprobs": 5}, {"logprobs": 5, "min_p": 1e-9}], ids=str)
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_log_probabilities_of_a_large_vocabulary_are_those_of_float64_rounded(sample, fields, mode):
    """Below 32 the spacing of float32 is 1.9e-6; a sum in float32 is off by up to 1.2e-5 here."""
    logits = torch.randn(32, 151_936, generator=torch.Generator().manual_seed(1)) * 3
    spec = SamplingParams(temperature=0, logprobs_mode=mode, **fields).spec()
    sampled = sample(logits, [RowSampling.of(spec, 0)] * 32, [0] * 32)
    exact = log_probabilities(logits)
    assert sampled.logprobs == pytest.approx(exact[np.arange(32), sampled.tokens], abs=1e-6)
    for row, top in enumerate(sampled.top_logprobs):
        assert len(top) == fields["logprobs"]
        assert [value for _, value in top] == pytest.approx([exact[row, token] for token, _ in top], abs=1e-6)


def test_log_probabilities_of_a_prompt_are_as_near():
    logits = torch.randn(32, 151_936, generator=torch.Generator().manual_seed(1)) * 3
    scores = prompt_scores(lambda hidden: hidden, logits, list(range(32)), 3, 1)
    exact = log_probabilities(logits)
    assert scores.logprobs == pytest.approx(exact[np.arange(32), np.arange(32)], abs=1e-6)
    assert [value for top in scores.top_logprobs for _, value in top] == pytest.approx(
        [exact[row, token] for row, top in enumerate(scores.top_logprobs) for token, _ in top], abs=1e-6
    )


@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {"seed": 7}, {"seed": 7, "top_k": 50, "temperature": 0.7}], ids=str
)
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_a_log_probability_has_the_same_bits_however_many_alternatives_are_wanted(sample, fields, mode):
    """One row in nine differed in the last bit when alternatives came from another sum than the token itself."""
    logits = torch.randn(64, 20_000, generator=torch.Generator().manual_seed(1)) * 3

    def wanting(count):
        spec = SamplingParams(logprobs=count, logprobs_mode=mode, **fields).spec()
        return sample(logits, [RowSampling.of(spec, choice) for choice in range(64)], [0] * 64)

    alone = wanting(0)
    for count in (1, 20):
        sampled = wanting(count)
        assert (sampled.tokens, sampled.logprobs, sampled.ranks) == (alone.tokens, alone.logprobs, alone.ranks)
        for token, logprob, top in zip(sampled.tokens, sampled.logprobs, sampled.top_logprobs, strict=True):
            assert dict(top).get(token, logprob) == logprob


def test_equal_logits_have_equal_log_probabilities_and_none_is_above_a_greater_one(sample):
    logits = torch.randn(8, 5000, generator=torch.Generator().manual_seed(2))
    logits[:, 10:13] = 4.0
    spec = SamplingParams(temperature=0, logprobs=20).spec()
    for top in sample(logits, [RowSampling.of(spec, 0)] * 8, [0] * 8).top_logprobs:
        values = [logprob for _, logprob in top]
        assert len(set(values[:3])) == 1
        assert values == sorted(values, reverse=True)
