"""The compiled sampler against the stages of penstock.sampling and exec.sampler's inverse distribution function."""

from __future__ import annotations

import math

import compiled_kernels as here
import pytest
import torch

from needs import COMPILED
from penstock.kernels import native

if not native.available():
    pytest.skip(COMPILED, allow_module_level=True)

from penstock.kernels.allowed_tokens import rule_out
from penstock.kernels.native_sampler import SamplingMetadata
from penstock.sampling import STAGES

pytestmark = pytest.mark.usefixtures("compiled")

NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
STAGE = {name: stage.apply for name, stage in STAGES if name in NEUTRAL}


def logits_of(rows, vocabulary, seed=0, spread=3.0):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def columns(rows, uniform=None, logprobs=False, **values):
    """What `choose_by` takes, the same parameters in every row."""
    values = NEUTRAL | values
    uniform = torch.zeros(rows, dtype=torch.float64) if uniform is None else uniform
    return {
        "temperature": torch.full((rows,), values["temperature"], dtype=torch.float32),
        "top_k": torch.full((rows,), values["top_k"], dtype=torch.int32),
        "top_p": torch.full((rows,), values["top_p"], dtype=torch.float64),
        "min_p": torch.full((rows,), values["min_p"], dtype=torch.float32),
        "uniform": uniform,
        "wants_logprob": torch.full((rows,), logprobs),
    }


def choose_by(logits, uniform, **columns):
    return here.choose(logits, SamplingMetadata(**columns), uniform)


def sums_by_reference(logits, **values):
    """The summed probabilities `[R, V]` after the stages, in float64."""
    for name, apply in STAGE.items():
        if values.get(name, NEUTRAL[name]) != NEUTRAL[name]:
            logits = apply(logits, torch.full((len(logits), 1), float(values[name]), dtype=torch.float64))
    return logits.double().softmax(-1).cumsum(-1)


FILTERS = [
    {},
    {"temperature": 0.7},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 100_000},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_p": 0.999999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.5, "top_k": 2000, "top_p": 0.5},
]


@pytest.mark.parametrize("values", FILTERS, ids=str)
@pytest.mark.parametrize(("vocabulary", "spread"), [(11, 2.0), (1000, 3.0), (4099, 0.3), (30_000, 4.0)])
def test_the_drawn_token_is_the_reference_s(vocabulary, spread, values):
    rows = 40
    logits = logits_of(rows, vocabulary, spread=spread)
    uniform = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    chosen = choose_by(logits, **columns(rows, uniform, **values))
    sums = sums_by_reference(logits, **values)
    assert not chosen.failed.any()
    for row, token in enumerate(chosen.tokens.tolist()):
        low = sums[row, token - 1].item() if token else 0.0
        high = sums[row, token].item()
        assert high > low, (row, token)  # kept by every filter
        assert low - 2e-6 <= uniform[row] <= high + 2e-6, (row, token)  # and the one at that height


@pytest.mark.parametrize("values", FILTERS, ids=str)
def test_what_is_kept_is_what_the_reference_keeps(values):
    """In a small vocabulary every kept token is met at the middle of its share, so that no other may be."""
    logits = logits_of(1, 57, seed=9)
    sums = sums_by_reference(logits, **values)[0]
    shares = torch.diff(sums, prepend=torch.zeros(1, dtype=torch.float64))
    kept = (shares > 4e-6).nonzero().squeeze(-1)
    middles = sums[kept] - shares[kept] / 2
    chosen = choose_by(logits.expand(len(kept), -1).contiguous(), **columns(len(kept), middles, **values))
    assert torch.equal(chosen.tokens, kept)


def test_tokens_tied_with_the_last_kept_stay():
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    for values in ({"top_k": 1}, {"top_k": 2}, {"top_p": 0.2}):
        tokens = [
            choose_by(logits, **columns(1, torch.tensor([u], dtype=torch.float64), **values)).tokens.item()
            for u in (0.0, 0.3, 0.4, 0.6, 0.7, 0.999)
        ]
        assert tokens == [1, 1, 2, 2, 3, 3], values


@pytest.mark.parametrize("values", [{"top_k": 3}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.5, "min_p": 1.0}], ids=str)
def test_more_ties_than_a_filter_can_tell_apart_all_stay(values):
    """Also where they are too many to be looked at apart from the others."""
    logits = torch.full((3, 7003), -1.0)
    logits[:, 1000:] = 0.0
    uniform = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert choose_by(logits, **columns(3, uniform, **values)).tokens.tolist() == [1000, 1000 + 6003 // 2, 7002]


def test_filters_narrow_one_another_whichever_reaches_furthest():
    """A later filter that would keep more than an earlier one left does not bring it back."""
    logits = logits_of(1, 30_000, seed=5)
    rows = 64
    uniform = torch.linspace(0, 0.999, rows, dtype=torch.float64)
    for values in ({"top_k": 7, "min_p": 1e-6}, {"top_k": 5000, "top_p": 0.3}, {"top_p": 0.3, "min_p": 1e-6}):
        sums = sums_by_reference(logits, **values)[0]
        kept = torch.diff(sums, prepend=torch.zeros(1, dtype=torch.float64)) > 0
        chosen = choose_by(logits.expand(rows, -1).contiguous(), **columns(rows, uniform, **values)).tokens
        assert kept[chosen].all(), values
        expected = torch.searchsorted(sums, uniform, right=True)
        assert torch.equal(chosen, expected), values


def test_greedy_takes_the_lowest_of_the_likeliest():
    logits = logits_of(6, 1003)
    logits[0, 700] = logits[0, 701] = logits[0, 1002] = 99.0
    logits[1, 1002] = 99.0
    logits[2, 0] = 99.0
    logits[3] = -5.0
    logits[4, :] = -math.inf
    logits[4, 17] = -3e38
    chosen = choose_by(logits, **columns(6, temperature=0.0))
    assert torch.equal(chosen.tokens, logits.argmax(-1))
    assert chosen.tokens[:5].tolist() == [700, 1002, 0, 0, 17]
    assert not chosen.failed.any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_distribution_fail_alone(temperature):
    logits = logits_of(6, 333)
    clean = choose_by(logits, **columns(6, temperature=temperature))
    logits[1, 332], logits[3, 16], logits[4] = math.nan, math.inf, -math.inf
    chosen = choose_by(logits, **columns(6, temperature=temperature))
    assert chosen.failed.tolist() == [False, True, False, True, True, False]
    assert torch.equal(chosen.tokens[[0, 2, 5]], clean.tokens[[0, 2, 5]])


def test_ruled_out_tokens_are_never_drawn():
    logits = logits_of(200, 100)
    logits[:, ::2] = -math.inf
    uniform = torch.linspace(0, 1 - 2**-52, 200, dtype=torch.float64)
    assert (choose_by(logits, **columns(200, uniform)).tokens % 2 == 1).all()


def test_the_smallest_temperature_is_greedy():
    logits = logits_of(5, 1000)
    uniform = torch.rand(5, dtype=torch.float64)
    chosen = choose_by(logits, **columns(5, uniform, temperature=1e-45))
    assert torch.equal(chosen.tokens, logits.argmax(-1))


@pytest.mark.parametrize("temperature", [0.0, 0.6])
@pytest.mark.parametrize("vocabulary", [5, 1000, 30_001])
def test_logprobs_are_those_of_the_raw_distribution(vocabulary, temperature):
    logits = logits_of(8, vocabulary)
    chosen = choose_by(logits, **columns(8, logprobs=True, temperature=temperature))
    exact = logits.double().log_softmax(-1).gather(-1, chosen.tokens[:, None]).squeeze(-1)
    torch.testing.assert_close(chosen.logprobs.double(), exact, atol=2e-6, rtol=1e-6)
    others = (logits.double() - chosen.normalizers[:, None]).float()
    assert torch.equal(others.gather(-1, chosen.tokens[:, None]).squeeze(-1), chosen.logprobs)
    torch.testing.assert_close(others.double(), logits.double().log_softmax(-1), atol=2e-6, rtol=1e-6)
    unwanted = choose_by(logits, **columns(8))
    assert not unwanted.logprobs.any()
    assert not unwanted.normalizers.any()


def test_a_row_sees_neither_neighbours_nor_threads_nor_strides():
    wide = logits_of(33, 5000)
    logits = wide[:, :4321]
    uniform = torch.rand(33, dtype=torch.float64)
    given = columns(33, uniform, logprobs=True, temperature=0.9, top_k=200, top_p=0.9)
    given["temperature"][::3] = 0.0
    whole = choose_by(logits, **given)
    for row in (0, 7, 32):
        alone = choose_by(logits[row : row + 1], **{name: column[row : row + 1] for name, column in given.items()})
        assert alone.tokens[0] == whole.tokens[row]
        assert alone.logprobs[0] == whole.logprobs[row]
        assert alone.normalizers[0] == whole.normalizers[row]
    here.set_threads(3)
    again = choose_by(logits.contiguous(), **given)
    assert torch.equal(again.tokens, whole.tokens)
    assert torch.equal(again.logprobs, whole.logprobs)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1.0), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5), ("min_p", 2.0), ("uniform", 1.0)],
)
def test_values_out_of_range_are_refused(name, value):
    given = columns(2)
    given[name] = torch.full_like(given[name], value)
    with pytest.raises(ValueError, match=name):
        choose_by(logits_of(2, 10), **given)
    with pytest.raises(ValueError, match=name):
        choose_by(logits_of(2, 10), **(given | {name: given[name].half()}))


def test_terms_that_do_not_fit_the_logits_are_refused():
    given = columns(2, temperature=0.0)
    del given["uniform"]
    with pytest.raises(ValueError, match="metadata has 2 rows, and logits have 3"):
        here.choose(logits_of(3, 10), SamplingMetadata(**given))
    given["temperature"][1] = 0.5
    with pytest.raises(ValueError, match="uniform must be given"):
        here.choose(logits_of(2, 10), SamplingMetadata(**given))


@pytest.mark.parametrize("vocabulary", [1, 7, 8, 9, 16, 17, 100, 1003, 49152])
def test_tokens_are_ruled_out_as_torch_does(vocabulary):
    draw = torch.Generator().manual_seed(vocabulary)
    allowed = torch.randint(256, (-(-vocabulary // 8) + vocabulary % 3,), generator=draw, dtype=torch.uint8)
    logits = logits_of(1, vocabulary)[0]
    logits[torch.randint(vocabulary, (4,), generator=draw)] = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    wanted, lowered = torch.empty(vocabulary), torch.empty(vocabulary)
    rule_out(logits, bytes(allowed), wanted)
    here.rule_out(logits, bytes(allowed), lowered)
    exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(lowered, wanted, **exactly)
    here.rule_out(logits, bytes(allowed), logits)
    torch.testing.assert_close(logits, wanted, **exactly)


@pytest.mark.parametrize(
    ("logits", "allowed", "lowered"),
    [
        (torch.zeros(9), bytes(1), torch.zeros(9)),
        (torch.zeros(9), bytes(2), torch.zeros(8)),
        (torch.zeros(9), bytes(2), torch.zeros(9, dtype=torch.float64)),
        (torch.zeros(9, 2)[:, 0], bytes(2), torch.zeros(9)),
        (torch.zeros(1, 9), bytes(2), torch.zeros(9)),
    ],
)
def test_masks_that_do_not_fit_are_refused(logits, allowed, lowered):
    with pytest.raises(ValueError, match=r"(allowed must have|lowered has 8|must be)"):
        here.rule_out(logits, allowed, lowered)
    assert not lowered.any()
