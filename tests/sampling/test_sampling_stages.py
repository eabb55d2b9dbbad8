"""The stages' maths against references written from the papers, in float64 and one row at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.sampling import STAGES, Stage

APPLY = {name: stage.apply for name, stage in STAGES if isinstance(stage, Stage)}
CHOICES = {
    "temperature": [0.1, 0.7, 1.3, 2.0],
    "top_k": [1.0, 2.0, 40.0, 5000.0],
    "top_p": [1e-9, 0.3, 0.9, 0.999],
    "min_p": [1e-4, 0.05, 0.5, 1.0],
    "typical_p": [1e-9, 0.3, 0.9, 0.999],
    "top_n_sigma": [0.01, 0.5, 1.0, 3.0],
}


def distribution(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def kept_by_top_k(logits, k):
    return logits >= np.sort(logits)[::-1][min(int(k), len(logits)) - 1]


def kept_by_top_p(logits, p):
    probabilities = distribution(logits)
    nucleus, total = [], 0.0
    for token in np.argsort(-probabilities, kind="stable"):
        nucleus.append(token)
        total += probabilities[token]
        if total >= p:
            break
    return np.isin(np.arange(len(logits)), nucleus)


def kept_by_min_p(logits, p):
    probabilities = distribution(logits)
    return probabilities >= p * probabilities.max()


def kept_by_typical_p(logits, p):
    probabilities = distribution(logits)
    surprise = -np.log(probabilities)
    entropy = (probabilities * surprise).sum()
    kept, total = [], 0.0
    for token in np.argsort(np.abs(surprise - entropy), kind="stable"):
        kept.append(token)
        total += probabilities[token]
        if total >= p:
            break
    return np.isin(np.arange(len(logits)), kept)


def kept_by_top_n_sigma(logits, n):
    return logits >= logits.max() - n * logits.std()


KEPT = {
    "top_k": kept_by_top_k,
    "top_p": kept_by_top_p,
    "min_p": kept_by_min_p,
    "typical_p": kept_by_typical_p,
    "top_n_sigma": kept_by_top_n_sigma,
}


def rows_of_logits(vocabulary, spread, seed=0):
    return torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def column(values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


@pytest.mark.parametrize("spread", [0.1, 3.0])  # nearly flat (a nucleus of most of the vocabulary), and peaked
@pytest.mark.parametrize("vocabulary", [5, 300, 2000, 50_257, 151_936])  # in a large one, float32 does not add up to 1
@pytest.mark.parametrize("name", KEPT)
def test_a_filter_keeps_what_the_paper_keeps(name, vocabulary, spread):
    logits = rows_of_logits(vocabulary, spread)
    filtered = APPLY[name](logits, column(CHOICES[name]))
    for row, value in enumerate(CHOICES[name]):
        kept = KEPT[name](logits[row].double().numpy(), value)
        assert torch.equal(filtered[row].isfinite(), torch.from_numpy(kept))
        assert torch.equal(filtered[row][kept], logits[row][kept])


def test_temperature_divides():
    logits = rows_of_logits(100, 3.0)
    heated = APPLY["temperature"](logits, column(CHOICES["temperature"]))
    for row, value in enumerate(CHOICES["temperature"]):
        expected = distribution(logits[row].double().numpy() / value)
        assert np.allclose(heated[row].softmax(-1).numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("value", [5e-324, 1e-300, 1e-40, 1e-6])
def test_the_smallest_temperatures_are_greedy_and_never_nan(value):
    logits = torch.tensor([[1.0, 3.0, 2.0, float("-inf")]])
    probabilities = APPLY["temperature"](logits, column([value])).softmax(-1)
    assert probabilities.tolist() == [[0.0, 1.0, 0.0, 0.0]]


# A top_p of 1.0 never reaches its stage: it is neutral. (Rounding would let the sum reach 1 before the last token.)
@pytest.mark.parametrize(("name", "neutral"), [("temperature", 1.0), ("min_p", 0.0), ("top_k", 999), ("top_k", 500)])
def test_a_value_that_changes_nothing_changes_nothing(name, neutral):
    logits = rows_of_logits(500, 5.0)
    after = APPLY[name](logits, column([float(neutral)] * 4))
    assert torch.equal(after.softmax(-1), logits.softmax(-1))


@pytest.mark.parametrize("name", APPLY)
def test_a_stage_leaves_its_arguments_as_they_are(name):
    logits = rows_of_logits(50, 2.0)
    before, values = logits.clone(), column(CHOICES[name])
    APPLY[name](logits, values)
    assert torch.equal(logits, before)
    assert torch.equal(values, column(CHOICES[name]))


@pytest.mark.parametrize("spread", [0.05, 4.0])
@pytest.mark.parametrize("vocabulary", [40_000, 151_936])
@pytest.mark.parametrize("name", APPLY)
def test_a_rows_bits_do_not_depend_on_the_other_rows(name, vocabulary, spread):
    logits = rows_of_logits(vocabulary, spread, seed=3)
    logits[1, ::2] = float("-inf")
    together = APPLY[name](logits, column(CHOICES[name]))
    for row, value in enumerate(CHOICES[name]):
        alone = APPLY[name](logits[row : row + 1], column([value]))
        assert torch.equal(alone[0], together[row])


def test_tokens_tied_with_the_last_one_kept_stay():
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    assert APPLY["top_k"](logits, column([2.0])).isfinite().tolist() == [[True, True, True, True, False]]
    assert APPLY["top_p"](logits, column([0.6])).isfinite().tolist() == [[True, True, True, True, False]]


def test_the_token_that_crosses_the_bound_belongs_to_the_nucleus():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    assert APPLY["top_p"](logits, column([0.51])).isfinite().tolist() == [[True, True, False]]
    assert APPLY["top_p"](logits, column([0.49])).isfinite().tolist() == [[True, False, False]]
    assert APPLY["top_p"](logits, column([0.81])).isfinite().tolist() == [[True, True, True]]
