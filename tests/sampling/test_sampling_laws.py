"""Invariants of every parameter, on the serving path: neutral values, and the distribution of 20,000 draws."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.contract.plan import Admit
from penstock.contract.sampling import SamplingSpec
from penstock.exec.batch import SlotTables
from penstock.exec.sampler import RowSampling, sample
from penstock.kernels import native
from penstock.kernels.cpu_backend import CpuBackend
from penstock.sampling import PARAMETERS, STAGES, SamplingParams

BY_NAME = {parameter.name: parameter for parameter in PARAMETERS}
PROMPT, OUTPUT = (5, 5, 8), (3, 4, 6, 3, 4, 6, 3, 4)
DRAWS, VOCABULARY = 20_000, 30

BUSY = {
    "temperature": 0.8,
    "top_k": 20,
    "top_p": 0.97,
    "min_p": 0.001,
    "typical_p": 0.98,
    "top_n_sigma": 4.0,
    "xtc_probability": 0.5,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.1,
    "dry_multiplier": 0.5,
    "logit_bias": {"9": 1.5},
    "bad_words": "x",
    "allowed_token_ids": list(range(28)),
    "max_tokens": 9,
    "seed": 4,
    "logprobs": 3,
}


CHOOSE = CpuBackend().choose if native.available() else None
"""The compiled call; without it, torch draws stage by stage."""


def logits_of(rows, vocabulary=VOCABULARY, seed=0):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 1.3


def in_ids(spec):
    """The spec as the runner gets it: with words as token ids."""
    return spec.put("bad_words", ((7,), (4, 11))) if spec.has("bad_words") else spec


def drawn(spec, draws, logits, choose=CHOOSE):
    """`draws` rows of one sequence, each as a different choice."""
    tables = SlotTables(1, 64, 16)
    tables.admit(Admit(0, "", (*PROMPT, *OUTPUT), (0,), 0, spec, 0, prompt_tokens=len(PROMPT)))

    def look(rows):
        views = tables.views([0] * len(rows))
        return replace(views, choices=list(rows))

    kinds = [RowSampling.of(spec, choice) for choice in range(draws)]
    at = len(PROMPT) + len(OUTPUT)
    return sample(logits.expand(draws, -1).contiguous(), kinds, [at] * draws, look, choose)


@pytest.mark.parametrize("rest", [{"seed": 4, "logprobs": 3}, {"temperature": 0, "logprobs": 3}, BUSY], ids="rgb")
@pytest.mark.parametrize("name", BY_NAME)
def test_a_neutral_value_means_exactly_what_leaving_it_out_means(name, rest):
    rest = {key: value for key, value in rest.items() if key != name}
    if name == "max_tokens":  # the only one whose default has an effect: null means the rest of the context
        assert SamplingParams(**rest, max_tokens=None).stop_rules().max_tokens == 0
        return
    without, neutral = SamplingParams(**rest), SamplingParams(**rest, **{name: BY_NAME[name].neutral})
    assert neutral == without
    assert (neutral.spec(), neutral.stop_rules(), neutral.grammar()) == (
        without.spec(),
        without.stop_rules(),
        without.grammar(),
    )
    assert not neutral.spec().has(name)


STAGE_NEUTRAL = {
    "temperature": 1.0,
    "top_k": VOCABULARY,
    "min_p": 0.0,
    "top_n_sigma": 100.0,
    "xtc_probability": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "dry_multiplier": 0.0,
    "logit_bias": ((5, 0.0),),
    "bad_words": ((3, 3, 3),),
    "allowed_token_ids": tuple(range(VOCABULARY)),
    # 1 - 2**-53 is less than 1, so that the stages run; yet a sum of the probabilities reaches it only at its end
    "top_p": math.nextafter(1.0, 0.0),
    "typical_p": math.nextafter(1.0, 0.0),
}


@pytest.mark.parametrize("name", dict(STAGES))
def test_a_stage_at_its_neutral_value_draws_the_same_tokens(name):
    """Bypasses `SamplingParams`, which would leave it out: the stage's maths itself is neutral."""
    assert dict(STAGES).keys() == STAGE_NEUTRAL.keys()
    plain = SamplingSpec((("logprobs", 3), ("seed", 4)))
    logits = logits_of(1)
    had = drawn(plain, 300, logits)
    assert drawn(plain.put(name, STAGE_NEUTRAL[name]), 300, logits) == had
    assert drawn(plain.put(name, STAGE_NEUTRAL[name]), 300, logits, choose=None).tokens == had.tokens


# ---- distributions


def reference(logits, fields):
    """The distribution by the definitions, applied one after another in the documented order."""
    x = logits.double().numpy().copy()
    seen, said = set(PROMPT) | set(OUTPUT), np.bincount(OUTPUT, minlength=VOCABULARY)
    if "allowed_token_ids" in fields:
        x[[t for t in range(VOCABULARY) if t not in fields["allowed_token_ids"]]] = -np.inf
    if "bad_words" in fields:
        x[[7, 11]] = -np.inf  # 7 alone, and 11 after 4, which was generated last
    for token, bias in fields.get("logit_bias", {}).items():
        x[int(token)] += bias
    penalty = fields.get("repetition_penalty", 1.0)
    x = np.array([(v / penalty if v > 0 else v * penalty) if t in seen else v for t, v in enumerate(x)])
    x -= said * fields.get("frequency_penalty", 0.0) + (said > 0) * fields.get("presence_penalty", 0.0)
    if "dry_multiplier" in fields:  # 6 would prolong the repeated "3 4 6 3 4", five tokens long
        x[6] -= fields["dry_multiplier"] * fields.get("dry_base", 1.75) ** (5 - fields.get("dry_allowed_length", 2))
    x /= fields.get("temperature", 1.0)
    if "top_n_sigma" in fields:
        x[x < x.max() - fields["top_n_sigma"] * x[np.isfinite(x)].std()] = -np.inf
    if fields.get("top_k"):
        x[x < np.sort(x)[::-1][fields["top_k"] - 1]] = -np.inf
    p = np.exp(x - x.max())
    p /= p.sum()
    for name in ("typical_p", "top_p"):
        if name in fields:
            surprise = -np.log(np.where(p > 0, p, 1.0))
            distance = np.abs(surprise - (p * surprise).sum()) if name == "typical_p" else -p
            order = np.argsort(np.where(p > 0, distance, np.inf))
            p[order[1 + int((np.cumsum(p[order])[:-1] < fields[name]).sum()) :]] = 0.0
            p /= p.sum()
    p[p < fields.get("min_p", 0.0) * p.max()] = 0.0
    p /= p.sum()
    top = p >= fields.get("xtc_threshold", 0.1)
    if "xtc_probability" not in fields or top.sum() < 2:
        return p
    struck = np.where(top & (p > p[top].min()), 0.0, p)
    return (1 - fields["xtc_probability"]) * p + fields["xtc_probability"] * struck / struck.sum()


FIELDS = [
    {"temperature": 1.7},
    {"top_k": 6},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"typical_p": 0.6},
    {"top_n_sigma": 1.0},
    {"xtc_probability": 0.35, "xtc_threshold": 0.05},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 3.0},
    {"dry_multiplier": 1.2, "dry_base": 1.5, "dry_allowed_length": 3},
    {"logit_bias": {"2": 2.0, "20": -3.0}},
    {"allowed_token_ids": [1, 4, 6, 20, 29]},
    {"bad_words": "x"},
]
TOGETHER = [
    {},
    {"temperature": 0.4, "top_k": 12, "top_p": 0.9, "min_p": 0.01},
    {key: value for key, value in BUSY.items() if key not in ("max_tokens", "seed", "logprobs")},
]


def compiles(fields):
    return fields.keys() <= {"temperature", "top_k", "top_p", "min_p"}


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("fields", "compiled"),
    [
        pytest.param(each, way, marks=pytest.mark.deep if compiles(each) and not way else ())
        for each in (*FIELDS, *TOGETHER)
        for way in (True, False)
        if compiles(each) or not way
    ],
    ids=str,
)
def test_20_000_draws_look_as_the_definitions_say(fields, compiled):
    logits = logits_of(1)
    expected = reference(logits[0], fields) * DRAWS
    spec = in_ids(SamplingParams(**fields, seed=99).spec())
    tokens = drawn(spec, DRAWS, logits, CHOOSE if compiled else None).tokens
    seen = np.bincount(tokens, minlength=VOCABULARY)
    assert seen[expected < 1e-9].sum() == 0
    common, rare = expected >= 5, (expected > 0) & (expected < 5)
    cells = [(s, e) for s, e in zip(seen[common], expected[common], strict=True)]
    if rare.any():
        cells.append((seen[rare].sum(), expected[rare].sum()))
    chi_square = sum((s - e) ** 2 / e for s, e in cells)
    freedom = len(cells) - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom) + 8  # exceeded about once in 20,000 honest runs


def test_the_law_of_20_000_draws_covers_every_stage_and_would_notice_its_absence():
    logits = logits_of(1)
    plain = reference(logits[0], {})
    assert [name for name, _ in STAGES if not any(next(iter(each)) == name for each in FIELDS)] == []
    for fields in FIELDS:
        told = reference(logits[0], fields)
        apart = ((told - plain) ** 2 / plain).sum() * DRAWS
        assert apart > 100, fields  # about 29 in honest runs


def test_the_repetition_that_dry_sees_here_is_five_tokens_long():
    """The reference above relies on it."""
    tokens = (*PROMPT, *OUTPUT)
    lengths = [n for n in range(1, 9) if any(tokens[i : i + n] == tokens[-n:] for i in range(len(tokens) - n))]
    assert max(lengths) == 5
