"""Drawing requests: ragged prompts of random tokens, many of which begin alike, sampled in every way there is.

Decides what is asked. Knows no scheduler and no model beyond its vocabulary. Invariant: the same seed and sizes give
the same requests, whatever else is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any

from penstock.contract.request import GenerateRequest, StopRules
from penstock.contract.sampling import SamplingSpec
from penstock.sampling import SamplingParams
from penstock.sampling.parameters.logprobs_mode import PROCESSED, RAW

__all__ = ["draw_prompt", "draw_requests", "draw_sampling", "ragged"]

Prompt = tuple[int, ...]

_CHOICES = (1, 1, 1, 2, 3)
_GREEDY_SHARE = 0.35
_SHIFTED_SHARE = 0.5
_LISTED_SHARE = 0.1
_SHARED_SHARE = 0.6


def draw_requests(
    count: int, seed: int, *, vocab_size: int, longest_prompt: int, new_tokens: int
) -> tuple[GenerateRequest, ...]:
    """Exactly `count` sequences, `<ask>/<choice>`; choices of an ask differ in nothing but their index."""
    draw = Random(f"requests/{seed}")  # noqa: S311 - a workload, not a secret
    requests: list[GenerateRequest] = []
    ask = 0
    while len(requests) < count:
        prompt = draw_prompt(draw, vocab_size, longest_prompt, [request.prompt for request in requests])
        sampling, stop = draw_sampling(draw, vocab_size), _draw_rules(draw, new_tokens)
        choices = range(draw.choice(_CHOICES))
        requests += [GenerateRequest(f"{ask}/{choice}", prompt, choice, sampling, stop) for choice in choices]
        ask += 1
    return tuple(requests[:count])


def draw_prompt(draw: Random, vocab_size: int, longest: int, earlier: Sequence[Prompt]) -> Prompt:
    """A prompt of 1 to `longest` tokens; more often than not it begins like one of the `earlier` ones."""
    shared: Prompt = ()
    if earlier and draw.random() < _SHARED_SHARE:
        source = draw.choice(earlier)
        shared = source[: draw.randint(1, len(source))]
    fresh = tuple(draw.randrange(vocab_size) for _ in range(ragged(draw, longest)))
    return (shared + fresh)[:longest]


def draw_sampling(draw: Random, vocab_size: int) -> SamplingSpec:
    """Greedy, or random with a seed and any mixture of filters; each half of the time with what looks at the past.

    Log probabilities are always asked for, of any kind. Parameters that hold texts are drawn as the token ids that the
    engine would have made of them.
    """
    greedy = draw.random() < _GREEDY_SHARE
    filters = {
        "temperature": draw.choice((1.0, round(draw.uniform(0.2, 1.8), 3))),
        "top_k": draw.choice((0, 0, 1, 5, 40)),
        "top_p": draw.choice((1.0, 1.0, 0.95, 0.8, 0.5)),
        "min_p": draw.choice((0.0, 0.0, 0.02, 0.1)),
        "typical_p": draw.choice((1.0, 1.0, 1.0, 0.9, 0.4)),
        "top_n_sigma": draw.choice((0.0, 0.0, 0.0, 1.0, 3.0)),
        "xtc_probability": draw.choice((0.0, 0.0, 0.0, 0.5, 1.0)),
        "xtc_threshold": draw.choice((0.1, 0.02)),
        "seed": draw.randrange(-(2**62), 2**62),
    }
    params = SamplingParams(
        **({"temperature": 0} if greedy else filters),
        **(_draw_shifts(draw, vocab_size) if draw.random() < _SHIFTED_SHARE else {}),
        logprobs=draw.choice((0, 0, 1, 5)),
        logprobs_mode=draw.choice((RAW, RAW, RAW, PROCESSED)),
    )
    return _with_drawn_words(draw, params.spec(), vocab_size)


def _draw_shifts(draw: Random, vocab_size: int) -> dict[str, Any]:
    """Parameters that move logits before temperature."""
    tokens = [draw.randrange(vocab_size) for _ in range(draw.randint(1, 40))]
    return {
        "presence_penalty": draw.choice((0.0, 0.0, 0.7, -1.5)),
        "frequency_penalty": draw.choice((0.0, 0.0, 0.4, 2.0)),
        "repetition_penalty": draw.choice((1.0, 1.0, 1.15, 0.8)),
        "repeat_last_n": draw.choice((-1, -1, 8, 64)),
        "dry_multiplier": draw.choice((0.0, 0.0, 0.8)),
        "dry_base": draw.choice((1.75, 1.2)),
        "dry_allowed_length": draw.choice((1, 2)),
        "dry_penalty_last_n": draw.choice((-1, 32)),
        "logit_bias": {token: draw.uniform(-5, 5) for token in tokens} if draw.random() < _LISTED_SHARE else None,
        "allowed_token_ids": sorted(set(tokens)) if draw.random() < _LISTED_SHARE else None,
    }


def _with_drawn_words(draw: Random, spec: SamplingSpec, vocab_size: int) -> SamplingSpec:
    """Bad words of one or two tokens, and sequence breakers where they are used."""
    if draw.random() < _LISTED_SHARE:
        words = {tuple(draw.randrange(vocab_size) for _ in range(draw.randint(1, 2))) for _ in range(20)}
        spec = spec.put("bad_words", tuple(sorted(words)))
    if spec.has("dry_multiplier"):
        breakers = {draw.randrange(vocab_size) for _ in range(10)}
        spec = spec.put("dry_sequence_breakers", tuple(sorted(breakers)))
    return spec


def _draw_rules(draw: Random, new_tokens: int) -> StopRules:
    repetition = (1, 4, 2) if draw.random() < _LISTED_SHARE else ()
    return StopRules(max_tokens=draw.randint(1, new_tokens), repetition=repetition)


def ragged(draw: Random, most: int) -> int:
    """A size from 1 to `most`, every order of magnitude as likely as another: mostly small, sometimes large."""
    return round(math.pow(most, draw.random()))
