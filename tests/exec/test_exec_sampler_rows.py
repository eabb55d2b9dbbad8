"""The sampler with stages that look at rows: distributions, greedy rows, log probabilities and mixed batches."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from penstock.contract.plan import Admit
from penstock.exec import sampler
from penstock.exec.batch import SlotTables
from penstock.exec.sampler import RowSampling
from penstock.kernels import native
from penstock.kernels.cpu_backend import CpuBackend
from penstock.sampling import SamplingParams

CHOOSE = CpuBackend().choose if native.available() else None


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def sample(request):
    """Rows that the compiled call could serve go either way."""
    return partial(sampler.sample, choose=None if request.param == "torch" else CHOOSE)


def served(sample, logits, requests):
    """`sample` over slot tables; a request is (prompt, output, choice, fields)."""
    tables = SlotTables(len(requests), 128, 16)
    for slot, (prompt, output, choice, fields) in enumerate(requests):
        spec = SamplingParams(**({"seed": 1} | fields)).spec()
        tables.admit(Admit(slot, "", (*prompt, *output), tuple(range(8)), 0, spec, choice, prompt_tokens=len(prompt)))
    draws = [tables.sampling(slot) for slot in range(len(requests))]
    return sample(logits, draws, [len(p) + len(o) for p, o, _, _ in requests], tables.views)


def logits_of(rows, vocabulary, spread=3.0, seed=0):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def weights(logits, counts, fields):
    """Penalties by the definitions, then temperature, the deviations' filter, the typical set, and XTC's two cases."""
    x = logits - counts * fields.get("frequency_penalty", 0.0) - (counts > 0) * fields.get("presence_penalty", 0.0)
    x = x / fields.get("temperature", 1.0)
    if "top_n_sigma" in fields:
        x = np.where(x >= x.max() - fields["top_n_sigma"] * x.std(), x, -np.inf)
    p = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    if "typical_p" in fields:
        surprise = -np.log(np.where(p > 0, p, 1.0))
        order = np.argsort(np.where(p > 0, np.abs(surprise - (p * surprise).sum()), np.inf))
        p[order[1 + int((np.cumsum(p[order]) < fields["typical_p"]).sum()) :]] = 0.0
        p /= p.sum()
    top = p >= fields.get("xtc_threshold", 0.1)
    if "xtc_probability" not in fields or top.sum() < 2:
        return p
    struck = np.where(top & (p > p[top].min()), 0.0, p)
    return (1 - fields["xtc_probability"]) * p + fields["xtc_probability"] * struck / struck.sum()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "fields",
    [
        {"typical_p": 0.6},
        {"top_n_sigma": 1.2, "temperature": 1.7},
        {"xtc_probability": 0.4, "xtc_threshold": 0.05},
        {"presence_penalty": 0.8, "frequency_penalty": -0.3},
        {"presence_penalty": 1.5, "temperature": 0.8, "top_n_sigma": 2.0, "typical_p": 0.9, "xtc_probability": 0.7},
    ],
)
def test_random_tokens_follow_the_distribution_of_the_definitions(sample, fields):
    draws, vocabulary, output = 20_000, 30, [3, 3, 3, 7, 9]
    logits = logits_of(1, vocabulary, spread=1.2)
    tables = SlotTables(1, 32, 16)
    spec = SamplingParams(seed=99, **fields).spec()
    tables.admit(Admit(0, "", (5, 5, *output), (0,), 0, spec, 0, prompt_tokens=2))

    def shifted(rows):  # the same row at 20,000 places: coins and draws differ, what was said does not
        views = tables.views([0] * len(rows))
        return type(views)(views.tokens, views.prompt_ends, views.ends, views.specs, list(rows))

    kinds = [RowSampling.of(spec, choice) for choice in range(draws)]
    tokens = sample(logits.expand(draws, -1).contiguous(), kinds, [7] * draws, shifted).tokens
    counts = np.bincount(output, minlength=vocabulary)
    expected = weights(logits[0].double().numpy(), counts, fields) * draws
    seen = np.bincount(tokens, minlength=vocabulary)
    assert seen[expected < 1e-9].sum() == 0
    common, rare = expected >= 5, (expected > 0) & (expected < 5)
    cells = [(s, e) for s, e in zip(seen[common], expected[common], strict=True)]
    if rare.any():
        cells.append((seen[rare].sum(), expected[rare].sum()))
    chi_square = sum((s - e) ** 2 / e for s, e in cells)
    freedom = len(cells) - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom) + 8  # about once in 20,000 honest runs


def test_a_greedy_choice_obeys_what_is_allowed_and_penalised_and_no_filter(sample):
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0]]).repeat(5, 1)
    fields = [
        {},
        {"allowed_token_ids": [2, 3]},
        {"logit_bias": {"3": 50}},
        {"presence_penalty": 1.5},
        {"xtc_probability": 1.0, "xtc_threshold": 0.01, "top_n_sigma": 0.001},
    ]
    sampled = served(sample, logits, [((1,), (0, 0), 0, {"temperature": 0} | each) for each in fields])
    assert sampled.tokens == [0, 2, 3, 1, 0]


EVERY_KIND = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.4, "logprobs": 3},
    {"top_k": 50, "logprobs": 2},
    {"typical_p": 0.7, "logprobs": 0},
    {"top_n_sigma": 1.0, "xtc_probability": 0.5, "logprobs": 5, "logprobs_mode": "processed_logprobs"},
    {"dry_multiplier": 0.8, "frequency_penalty": 0.4, "logit_bias": {"4": 3.5}, "logprobs": 20},
    {"temperature": 0.6, "top_p": 0.9, "logprobs": 1, "logprobs_mode": "processed_logprobs"},
    {"allowed_token_ids": list(range(500)), "presence_penalty": -1.0},
]


@pytest.mark.parametrize(("vocabulary", "threads"), [(30_001, 1), (30_001, 2), (151_936, 2)])
def test_a_rows_outcome_does_not_depend_on_the_other_rows_bit_for_bit(sample, vocabulary, threads):
    logits = logits_of(len(EVERY_KIND), vocabulary, spread=1.0)
    requests = [(range(3 + row), [4, 5, 4, 5, 4][:row], row % 2, fields) for row, fields in enumerate(EVERY_KIND)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = served(sample, logits, requests)
        for order in ([7, 6, 5, 4, 3, 2, 1, 0], [2, 5, 0], *([row] for row in range(8))):
            apart = served(sample, logits[order], [requests[row] for row in order])
            for had, has in zip(together, apart, strict=True):
                assert has == [had[row] for row in order]
    finally:
        torch.set_num_threads(before)


def test_the_likeliest_tokens_come_to_those_who_asked_and_say_of_the_chosen_one_what_it_says(sample):
    logits = logits_of(len(EVERY_KIND), 500)
    sampled = served(sample, logits, [((1, 2), (4,), 0, fields) for fields in EVERY_KIND])
    raw = logits.double().log_softmax(-1)
    assert [len(top) for top in sampled.top_logprobs] == [0, 3, 2, 0, 5, 20, 1, 0]
    for row in (1, 2, 5):
        values, ids = raw[row].topk(len(sampled.top_logprobs[row]))
        assert [token for token, _ in sampled.top_logprobs[row]] == ids.tolist()
        assert [value for _, value in sampled.top_logprobs[row]] == pytest.approx(values.tolist(), abs=1e-5)
        assert sampled.logprobs[row] == dict(sampled.top_logprobs[row]).get(sampled.tokens[row], sampled.logprobs[row])
        assert sampled.logprobs[row] == pytest.approx(raw[row, sampled.tokens[row]].item(), abs=1e-5)


def test_a_rank_is_the_place_by_likelihood_and_agrees_with_the_likeliest_tokens(sample):
    logits = logits_of(len(EVERY_KIND), 500)
    logits[:, 100:200] = logits[:, 200:300]  # many equals: of them the lower id comes first
    for fields in ({"logprobs": 0}, {"logprobs": 20}, {"logprobs": 20, "temperature": 2.0}, {}):
        sampled = served(sample, logits, [((1, 2), (4,), choice, fields) for choice in range(len(logits))])
        order = logits.sort(dim=-1, descending=True, stable=True).indices
        for row, (token, rank, top) in enumerate(zip(sampled.tokens, sampled.ranks, sampled.top_logprobs, strict=True)):
            place = 1 + order[row].tolist().index(token)
            assert rank == (place if fields else 0)
            assert [token for token, _ in top] == order[row, : len(top)].tolist()


def test_the_likeliest_of_equals_at_the_end_of_the_list_are_those_of_the_lowest_ids():
    logits = torch.tensor([[0.0, 3.0, *[1.0] * 300, 2.0]])
    [top] = sampler.top_tokens(logits, logits.log_softmax(-1), [4])
    assert [token for token, _ in top] == [1, 302, 2, 3]
    [top] = sampler.top_tokens(logits[:, :2], logits[:, :2].log_softmax(-1), [20])
    assert [token for token, _ in top] == [1, 0]


def test_a_processed_rank_is_that_after_the_stages(sample):
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    fields = {"logit_bias": {"0": -50}, "temperature": 0, "logprobs": 0}
    assert served(sample, logits, [((1,), (), 0, fields)]).ranks == [2]
    assert served(sample, logits, [((1,), (), 0, fields | {"logprobs_mode": "processed_logprobs"})]).ranks == [1]


def test_processed_log_probabilities_are_of_what_was_drawn_from(sample):
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    fields = {"top_k": 2, "temperature": 0.5, "logprobs": 4, "logprobs_mode": "processed_logprobs"}
    sampled = served(sample, logits, [((1,), (), 0, fields)])
    assert [token for token, _ in sampled.top_logprobs[0]] == [0, 1]  # what is ruled out is no alternative
    expected = torch.tensor([6.0, 4.0]).log_softmax(-1).tolist()
    assert [value for _, value in sampled.top_logprobs[0]] == pytest.approx(expected, abs=1e-6)


def test_a_row_that_may_generate_only_what_the_model_rules_out_fails_alone(sample):
    logits = torch.zeros(2, 5)
    logits[:, 3] = float("-inf")
    sampled = served(
        sample, logits, [((1,), (), 0, {"allowed_token_ids": [3]}), ((1,), (), 0, {"allowed_token_ids": [3, 4]})]
    )
    assert sampled.failed == [True, False]
    assert sampled.tokens[1] == 4


def test_what_was_generated_before_a_preemption_is_still_output_and_the_prompt_still_is_not(sample):
    logits = torch.tensor([[1.0, 0.9, 0.8]])
    fields = {"temperature": 0, "presence_penalty": 2.0}
    assert served(sample, logits, [((0, 1), (), 0, fields)]).tokens == [0]
    assert served(sample, logits, [((0,), (0,), 0, fields)]).tokens == [1]
    assert served(sample, logits, [((2,), (0, 1), 0, fields)]).tokens == [2]
