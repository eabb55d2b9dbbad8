"""Drawing requests: ragged prompts of random tokens, many of which begin alike, sampled in every way there is.

Decides what is asked: every sampling parameter there is. Knows no scheduler and no model beyond its lexicon. Invariant:
the same seed and sizes give the same requests, whatever else is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from penstock.contract.request import SequenceRequest
from penstock.sampling import SamplingParams
from penstock.sampling.parameters.logprobs_mode import PROCESSED, RAW
from penstock.verify.lexicon import Lexicon

__all__ = ["draw_params", "draw_prompt", "draw_requests", "ragged"]

Prompt = tuple[int, ...]

_CHOICES = (1, 1, 1, 2, 3)
_GREEDY_SHARE = 0.35
_SHIFTED_SHARE = 0.5
_LISTED_SHARE = 0.1
_STOPPED_SHARE = 0.15
_SCORED_SHARE = 0.1
_FORMED_SHARE = 0.08
_SHARED_SHARE = 0.6
_THINKING_SHARE = 0.15
_OPENED_SHARE = 0.8
_MOST_CHOICES = 3

_FORMS: tuple[dict[str, Any], ...] = (
    {"choice": ["yes", "no", "a longer answer"]},
    {"regex": "[a-z]{1,12}( [0-9]+)?"},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"grammar": 'start: "a" "b"~1..9'},
    {"json_object": True},
)


def draw_requests(
    count: int, seed: int, lexicon: Lexicon, *, longest_prompt: int, new_tokens: int
) -> tuple[SequenceRequest, ...]:
    """Exactly `count` sequences, `<ask>/<choice>`; choices of an ask differ in nothing but their index.

    Of an ask with `best_of` all candidates are drawn. The prompt is scored for its first choice, as by the engine.
    """
    draw = Random(f"requests/{seed}")  # noqa: S311 - a workload, not a secret
    requests: list[SequenceRequest] = []
    ask = 0
    while len(requests) < count:
        prompt = draw_prompt(draw, lexicon.vocab_size, longest_prompt, [request.prompt for request in requests])
        params, opened = draw_params(draw, lexicon, new_tokens), draw.random() < _OPENED_SHARE
        requests += _sequences(str(ask), prompt, params, lexicon, opened=opened)
        ask += 1
    return tuple(requests[:count])


def _sequences(
    ask: str, prompt: Prompt, params: SamplingParams, lexicon: Lexicon, *, opened: bool
) -> list[SequenceRequest]:
    spec = lexicon.resolve(params)
    first = SequenceRequest(
        f"{ask}/0",
        prompt,
        sampling=spec,
        stop=lexicon.rules(params),
        fresh_prompt=spec.has("prompt_logprobs"),
        grammar=lexicon.grammar(params),
        thinking=lexicon.thinking(params, opened=opened),
    )
    other = replace(first, sampling=spec.without("prompt_logprobs"), fresh_prompt=False)
    choices = range(1, params.n if params.best_of is None else params.best_of)
    return [first, *(replace(other, id=f"{ask}/{choice}", choice=choice) for choice in choices)]


def draw_prompt(draw: Random, vocab_size: int, longest: int, earlier: Sequence[Prompt]) -> Prompt:
    """A prompt of 1 to `longest` tokens; more often than not it begins like one of the `earlier` ones."""
    shared: Prompt = ()
    if earlier and draw.random() < _SHARED_SHARE:
        source = draw.choice(earlier)
        shared = source[: draw.randint(1, len(source))]
    fresh = tuple(draw.randrange(vocab_size) for _ in range(ragged(draw, longest)))
    return (shared + fresh)[:longest]


def draw_params(draw: Random, lexicon: Lexicon, new_tokens: int) -> SamplingParams:
    """Any mixture of everything that can be asked for, each parameter by its own luck.

    Log probabilities are always asked for, of any kind. What contradicts a form of the answer is not drawn with it, and
    few requests end before their last token: short ones put no pressure on the others.
    """
    greedy, formed = draw.random() < _GREEDY_SHARE, draw.random() < _FORMED_SHARE
    n = draw.choice(_CHOICES)
    max_tokens = draw.randint(1, new_tokens)
    return SamplingParams(
        **({"temperature": 0} if greedy else _draw_filters(draw)),
        **(_draw_shifts(draw, lexicon) if draw.random() < _SHIFTED_SHARE else {}),
        **(_draw_lists(draw, lexicon) if not formed else {"structured_outputs": draw.choice(_FORMS)}),
        **(_draw_stops(draw, lexicon, max_tokens) if not formed and draw.random() < _STOPPED_SHARE else {}),
        n=n,
        best_of=draw.randint(n, _MOST_CHOICES) if draw.random() < _LISTED_SHARE else None,
        max_tokens=max_tokens,
        ignore_eos=not formed and draw.random() < 1 - _LISTED_SHARE,
        logprobs=draw.choice((0, 0, 1, 5)),
        logprobs_mode=draw.choice((RAW, RAW, RAW, PROCESSED)),
        prompt_logprobs=draw.choice((0, 3)) if draw.random() < _SCORED_SHARE else None,
        thinking_token_budget=draw.randint(0, max_tokens) if draw.random() < _THINKING_SHARE else None,
    )


def _draw_filters(draw: Random) -> dict[str, Any]:
    """Parameters of a random choice, with a seed."""
    return {
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


def _draw_shifts(draw: Random, lexicon: Lexicon) -> dict[str, Any]:
    """Parameters that move logits before temperature by what was said before."""
    return {
        "presence_penalty": draw.choice((0.0, 0.0, 0.7, -1.5)),
        "frequency_penalty": draw.choice((0.0, 0.0, 0.4, 2.0)),
        "repetition_penalty": draw.choice((1.0, 1.0, 1.15, 0.8)),
        "repeat_last_n": draw.choice((-1, -1, 8, 64)),
        "dry_multiplier": draw.choice((0.0, 0.0, 0.8)),
        "dry_base": draw.choice((1.75, 1.2)),
        "dry_allowed_length": draw.choice((1, 2)),
        "dry_penalty_last_n": draw.choice((-1, 32)),
        "dry_sequence_breakers": draw.choice((None, _some(draw, lexicon.words, 4))),
    }


def _draw_lists(draw: Random, lexicon: Lexicon) -> dict[str, Any]:
    """Lists of tokens and words that are wanted or not, each seldom."""
    tokens = [draw.randrange(lexicon.vocab_size) for _ in range(draw.randint(1, 40))]
    lists = {
        "logit_bias": {token: draw.uniform(-5, 5) for token in tokens},
        "allowed_token_ids": sorted({*tokens, *lexicon.ends}),
        "bad_words": _some(draw, lexicon.words, 20),
    }
    return {name: value for name, value in lists.items() if draw.random() < _LISTED_SHARE}


def _draw_stops(draw: Random, lexicon: Lexicon, max_tokens: int) -> dict[str, Any]:
    """What may end a sequence before its last token."""
    return {
        "stop": _some(draw, (*lexicon.words, "e", " "), 4),
        "include_stop_str_in_output": draw.random() < 0.5,
        "stop_token_ids": [draw.randrange(lexicon.vocab_size) for _ in range(draw.randint(1, 20))],
        "min_tokens": draw.randint(0, max_tokens),
        "repetition_detection": draw.choice((None, {"max_pattern_size": 4, "min_count": 2})),
    }


def _some(draw: Random, texts: Sequence[str], most: int) -> list[str]:
    return draw.sample(texts, k=min(len(texts), draw.randint(1, most)))


def ragged(draw: Random, most: int) -> int:
    """A size from 1 to `most`, every order of magnitude as likely as another: mostly small, sometimes large."""
    return round(math.pow(most, draw.random()))
