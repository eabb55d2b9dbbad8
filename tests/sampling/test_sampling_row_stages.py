"""The stages that need more than one number, against references written from their definitions, row by row."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from penstock.contract.sampling import SamplingSpec
from penstock.sampling import STAGES, RowStage, RowViews, uniform

APPLY = {name: stage.apply for name, stage in STAGES if isinstance(stage, RowStage)}
VOCABULARY = 60


class Row:
    """One row of a test: what its prompt and its output were, and its parameters."""

    def __init__(self, prompt, output, choice=0, **given):
        self.prompt, self.output, self.choice, self.given = list(prompt), list(output), choice, {"seed": 3} | given
        self.spec = SamplingSpec(tuple(sorted(self.given.items())))

    @property
    def tokens(self):
        return self.prompt + self.output


def views(*rows):
    longest = max(len(row.tokens) for row in rows)
    return RowViews(
        tokens=torch.tensor([row.tokens + [51] * (longest - len(row.tokens)) for row in rows]),  # stale, to be ignored
        prompt_ends=torch.tensor([[len(row.prompt)] for row in rows]),
        ends=torch.tensor([[len(row.tokens)] for row in rows]),
        specs=[row.spec for row in rows],
        choices=[row.choice for row in rows],
    )


def last(tokens, count):
    return tokens if count < 0 else tokens[len(tokens) - min(count, len(tokens)) :]


def repetition(logits, row):
    seen, penalty = set(last(row.tokens, row.given.get("repeat_last_n", -1))), row.given["repetition_penalty"]
    return [(x / penalty if x > 0 else x * penalty) if t in seen else x for t, x in enumerate(logits)]


def recent_output(row):
    span = row.given.get("repeat_last_n", -1)
    return row.output if span < 0 else last(row.output, min(span, len(row.output)))


def frequency(logits, row):
    return [x - row.given["frequency_penalty"] * recent_output(row).count(t) for t, x in enumerate(logits)]


def presence(logits, row):
    return [x - row.given["presence_penalty"] * (t in recent_output(row)) for t, x in enumerate(logits)]


def bias(logits, row):
    return [x + dict(row.given["logit_bias"]).get(t, 0.0) for t, x in enumerate(logits)]


def allowed(logits, row):
    return [x if t in row.given["allowed_token_ids"] else -np.inf for t, x in enumerate(logits)]


def bad(logits, row):
    banned = {w[-1] for w in row.given["bad_words"] if ([*row.output, w[-1]])[-len(w) :] == list(w)}
    return [-np.inf if t in banned else x for t, x in enumerate(logits)]


def xtc(logits, row):
    p = np.exp(np.array(logits) - max(logits))
    p /= p.sum()
    top = p >= row.given.get("xtc_threshold", 0.1)
    coin = uniform(3, row.choice, len(row.tokens), 1)
    if coin >= row.given["xtc_probability"] or top.sum() < 2:
        return logits
    return [-np.inf if top[t] and p[t] > p[top].min() else x for t, x in enumerate(logits)]


def dry(logits, row):
    tokens, breakers = last(row.tokens, row.given.get("dry_penalty_last_n", -1)), row.given["dry_sequence_breakers"]
    allowed_length, longest = row.given.get("dry_allowed_length", 2), {}
    for place in range(1, len(tokens)):
        n = 0
        while n < place and tokens[place - 1 - n] == tokens[-1 - n] and tokens[-1 - n] not in breakers:
            n += 1
        if tokens[place] not in breakers:
            longest[tokens[place]] = max(n, longest.get(tokens[place], 0))
    grow = {t: row.given["dry_multiplier"] * row.given.get("dry_base", 1.75) ** (n - allowed_length)
            for t, n in longest.items() if n >= allowed_length}  # fmt: skip
    return [x - grow.get(t, 0.0) for t, x in enumerate(logits)]


REFERENCES = {
    "repetition_penalty": repetition,
    "frequency_penalty": frequency,
    "presence_penalty": presence,
    "logit_bias": bias,
    "allowed_token_ids": allowed,
    "bad_words": bad,
    "xtc_probability": xtc,
    "dry_multiplier": dry,
}


def ids(draw, most):
    return tuple(sorted(draw.sample(range(VOCABULARY), draw.randint(1, most))))


def drawn_row(name, draw):
    few = draw.choice((2, 3, 10))  # few different tokens: much repetition
    prompt = [draw.randrange(few) for _ in range(draw.randint(1, 30))]
    output = [draw.randrange(few) for _ in range(draw.choice((0, 1, 5, 40)))]
    window = draw.choice((-1, 0, 1, 7, 1000))
    given = {
        "repetition_penalty": lambda: {"repetition_penalty": draw.choice((0.5, 1.3, 2.0)), "repeat_last_n": window},
        "frequency_penalty": lambda: {"frequency_penalty": draw.uniform(-2, 2), "repeat_last_n": window},
        "presence_penalty": lambda: {"presence_penalty": draw.uniform(-2, 2), "repeat_last_n": window},
        "logit_bias": lambda: {"logit_bias": tuple((t, draw.uniform(-100, 100)) for t in ids(draw, 20))},
        "allowed_token_ids": lambda: {"allowed_token_ids": ids(draw, 20)},
        "bad_words": lambda: {"bad_words": tuple(tuple(draw.choices(range(few), k=draw.randint(1, 3))) for _ in "ab")},
        "xtc_probability": lambda: {"xtc_probability": 0.5, "xtc_threshold": draw.choice((0.01, 0.1))},
        "dry_multiplier": lambda: {
            "dry_multiplier": draw.choice((0.5, 2.0)),
            "dry_base": draw.choice((1.0, 1.75)),
            "dry_allowed_length": draw.choice((1, 2, 4)),
            "dry_penalty_last_n": window,
            "dry_sequence_breakers": draw.choice(((), (0,), (1, 58))),
        },
    }
    return Row(prompt, output, choice=draw.randrange(3), **given[name]())


def drawn(name, count, seed=0):
    draw = Random(f"{name}/{seed}")
    rows = [drawn_row(name, draw) for _ in range(count)]
    logits = torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    logits[0, 40:] = float("-inf")
    return logits, rows


@pytest.mark.parametrize("excess", [-3e-7, 3e-7])
def test_a_threshold_of_xtc_is_met_to_the_digit_in_a_large_vocabulary(excess):
    """The last token's probability is just below or above 0.1; in float32 151,936 probabilities do not add up to 1."""
    threshold, row = 0.1, Row([1], [], xtc_probability=1.0, xtc_threshold=0.1)
    logits = torch.randn(4, 151_936, generator=torch.Generator().manual_seed(0)) * 3
    logits[:, 0] = logits[:, 1:-1].logsumexp(-1) - 2.0  # the most likely, always above the threshold
    others = logits[:, :-1].double().logsumexp(-1)
    share = threshold + excess
    logits[:, -1] = (others + np.log(share / (1 - share))).float()
    likely = logits.double().softmax(-1)[:, -1] >= threshold
    assert likely.tolist() == [excess > 0] * 4
    after = APPLY["xtc_probability"](logits, views(*[row] * 4))
    assert (after[:, 0] == float("-inf")).tolist() == likely.tolist()


@pytest.mark.parametrize("name", APPLY)
def test_a_stage_does_what_its_definition_says(name):
    assert APPLY.keys() == REFERENCES.keys()
    logits, rows = drawn(name, 120)
    after = APPLY[name](logits, views(*rows))
    changed = 0
    for row, before, now in zip(rows, logits, after, strict=True):
        expected = np.array(REFERENCES[name](before.double().tolist(), row))
        assert np.allclose(now.double().numpy(), expected, rtol=1e-5, atol=1e-4), row.given
        changed += not torch.equal(before, now)
    assert changed > 20  # enough rows change for the comparison to mean something


@pytest.mark.parametrize("name", APPLY)
def test_a_rows_bits_do_not_depend_on_the_other_rows(name):
    logits, rows = drawn(name, 40, seed=1)
    before = logits.clone()
    together = APPLY[name](logits, views(*rows))
    assert torch.equal(logits, before)
    for index, row in enumerate(rows):
        assert torch.equal(APPLY[name](logits[index : index + 1], views(row))[0], together[index])
    chosen = [30, 2, 17]
    assert torch.equal(APPLY[name](logits[chosen], views(*rows).select(chosen)), together[chosen])


NEUTRAL = {
    "repetition_penalty": {"repetition_penalty": 1.0},
    "frequency_penalty": {"frequency_penalty": 0.0},
    "presence_penalty": {"presence_penalty": 0.0},
    "logit_bias": {"logit_bias": ((5, 0.0),)},
    "allowed_token_ids": {"allowed_token_ids": tuple(range(VOCABULARY))},
    "bad_words": {"bad_words": ((33, 59),)},
    "xtc_probability": {"xtc_probability": 0.0},
    "dry_multiplier": {"dry_multiplier": 0.0},
}


@pytest.mark.parametrize("name", APPLY)
def test_a_value_that_changes_nothing_changes_nothing(name):
    logits, rows = drawn(name, 20, seed=4)
    neutral = [Row(row.prompt, row.output, **NEUTRAL[name]) for row in rows]
    assert torch.equal(APPLY[name](logits, views(*neutral)), logits)


def test_words_that_would_leave_nothing_are_not_applied():
    logits = torch.full((1, 3), float("-inf"))
    logits[0, 1] = 2.0
    assert torch.equal(APPLY["bad_words"](logits, views(Row([0], [], bad_words=((1,),)))), logits)


def test_a_repetition_beyond_all_measure_is_penalised_finitely():
    row = Row([1] * 3000, [], dry_multiplier=100.0, dry_base=8.0)
    after = APPLY["dry_multiplier"](torch.zeros(1, 3), views(row))
    assert after[0, 1] < -1e29
    assert after.isfinite().all()


def test_the_coin_of_xtc_falls_as_often_as_asked_and_not_with_the_draw():
    rows = [Row([0] * n, [], xtc_probability=0.3) for n in range(1, 3000)]
    struck = (views(*rows).uniform(1) < 0.3).squeeze(-1)
    drawn = torch.tensor([uniform(3, 0, n) for n in range(1, 3000)])
    assert abs(struck.double().mean() - 0.3) < 0.035  # four standard deviations
    assert abs(drawn[struck].mean() - 0.5) < 0.04
