"""Drawing requests: ragged prompts of random tokens, many of which begin alike, sampled in every way there is.

Decides what is asked. Knows no scheduler and no model beyond its vocabulary. Invariant: the same seed and sizes give
the same requests, whatever else is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from penstock.contract.request import GenerateRequest, StopRules
from penstock.sampling import SamplingParams

__all__ = ["draw_prompt", "draw_requests", "draw_sampling", "ragged"]

Prompt = tuple[int, ...]

_CHOICES = (1, 1, 1, 2, 3)
_GREEDY_SHARE = 0.35
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
        sampling, stop = draw_sampling(draw).spec(), StopRules(max_tokens=draw.randint(1, new_tokens))
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


def draw_sampling(draw: Random) -> SamplingParams:
    """Greedy, or random with a seed and any mixture of filters. Log probabilities are always asked for."""
    if draw.random() < _GREEDY_SHARE:
        return SamplingParams(temperature=0, logprobs=0)
    return SamplingParams(
        temperature=draw.choice((1.0, round(draw.uniform(0.2, 1.8), 3))),
        top_k=draw.choice((0, 0, 1, 5, 40)),
        top_p=draw.choice((1.0, 1.0, 0.95, 0.8, 0.5)),
        min_p=draw.choice((0.0, 0.0, 0.02, 0.1)),
        seed=draw.randrange(-(2**62), 2**62),
        logprobs=0,
    )


def ragged(draw: Random, most: int) -> int:
    """A size from 1 to `most`, every order of magnitude as likely as another: mostly small, sometimes large."""
    return round(math.pow(most, draw.random()))
