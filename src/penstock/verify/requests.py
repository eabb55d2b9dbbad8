"""Draws requests: ragged prompts of random tokens, many with a common prefix, with every sampling parameter.

There are four kinds of requests in fixed shares, because chance alone leaves paths untried: plain requests, which the
compiled sampler draws alone; requests with a grammar, whose masks are computed together; requests whose log
probabilities show every token that a penalty counts; and requests with any mixture of parameters. Invariant: the same
seed, sizes and model give the same requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from random import Random
from typing import Any

from penstock.contract.request import SequenceRequest
from penstock.sampling import SamplingParams
from penstock.sampling.parameters.logprobs_mode import PROCESSED, RAW
from penstock.verify.vocab import Vocab

__all__ = ["Kind", "dealt_adapters", "draw_params", "draw_prompt", "draw_requests", "is_plain", "kind_of", "ragged"]

Prompt = tuple[int, ...]


class Kind(StrEnum):
    """What a request uses."""

    PLAIN = "plain"
    """Temperature, top_p and a seed, and nothing else."""
    FORMED = "formed"
    """A grammar."""
    PENALISED = "penalised"
    """Penalties on the output, and log probabilities under them; nothing else but temperature and a seed."""
    MIXED = "mixed"
    """Any mixture of everything."""


_DEALT = (Kind.PLAIN, Kind.MIXED, Kind.PLAIN, Kind.FORMED, Kind.PLAIN, Kind.PENALISED, Kind.PLAIN, Kind.MIXED)
"""The kinds of successive requests, repeated."""

_PLAIN_NAMES = frozenset({"temperature", "top_p", "seed"})
_PENALISED_NAMES = frozenset(
    {"temperature", "seed", "presence_penalty", "frequency_penalty", "logprobs", "logprobs_mode"}
)

_CHOICES = (1, 1, 1, 2, 3)
_GREEDY_SHARE = 0.5
_SHIFTED_SHARE = 0.5
_LISTED_SHARE = 0.1
_STOPPED_SHARE = 0.15
_SCORED_SHARE = 0.1
_FORMED_SHARE = 0.08
_SHARED_SHARE = 0.6
_SPLICED_SHARE = 0.3
_THINKING_SHARE = 0.15
_OPENED_SHARE = 0.8
_MOST_CHOICES = 3

_FORMS: tuple[dict[str, Any], ...] = (  # ordered: the first ones leave the most tokens to choose from
    {"regex": "[a-z]{1,12}( [0-9]+)?"},
    {"json_object": True},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"grammar": 'start: "a" "b"~1..9'},
    {"choice": ["yes", "no", "a longer answer"]},
)


def draw_requests(
    count: int, seed: int, vocab: Vocab, *, longest_prompt: int, new_tokens: int
) -> tuple[SequenceRequest, ...]:
    """Draw exactly `count` sequences with ids `<request>/<choice>`.

    Choices of a request differ only in their index, except that the prompt is scored for the first choice alone, as in
    the engine. A request with `best_of` yields all its candidates.
    """
    draw = Random(f"requests/{seed}")  # noqa: S311 - a workload, not a secret
    requests: list[SequenceRequest] = []
    number = 0
    while len(requests) < count:
        prompt = draw_prompt(draw, vocab.vocab_size, longest_prompt, [request.prompt for request in requests])
        params = _draw_dealt(draw, number, vocab, new_tokens)
        requests += _sequences(str(number), prompt, params, vocab, opened=draw.random() < _OPENED_SHARE)
        number += 1
    return tuple(requests[:count])


def dealt_adapters(
    requests: Sequence[SequenceRequest], adapters: Sequence[tuple[str, str]]
) -> tuple[SequenceRequest, ...]:
    """The requests with adapters, given as (name, digest), dealt in turn: first no adapter, then each adapter."""
    every = [("", ""), *adapters]
    chosen = [every[int(request.id.partition("/")[0]) % len(every)] for request in requests]
    return tuple(
        replace(request, adapter=name, adapter_digest=digest)
        for request, (name, digest) in zip(requests, chosen, strict=True)
    )


def is_plain(request: SequenceRequest) -> bool:
    """Whether a request draws by temperature, top_p and seed alone."""
    guided = request.grammar is not None or request.thinking is not None
    return request.sampling.has("seed") and _names(request) <= _PLAIN_NAMES and not guided


def kind_of(request: SequenceRequest) -> Kind:
    """The kind of a request; a request whose grammar this model cannot follow counts as mixed."""
    if is_plain(request):
        return Kind.PLAIN
    if request.grammar is not None:
        return Kind.FORMED
    return Kind.PENALISED if _names(request) == _PENALISED_NAMES and request.thinking is None else Kind.MIXED


def _names(request: SequenceRequest) -> set[str]:
    return {name for name, _ in request.sampling.entries}


def _sequences(
    number: str, prompt: Prompt, params: SamplingParams, vocab: Vocab, *, opened: bool
) -> list[SequenceRequest]:
    spec = vocab.resolve(params)
    first = SequenceRequest(
        f"{number}/0",
        prompt,
        sampling=spec,
        stop=vocab.rules(params),
        fresh_prompt=spec.has("prompt_logprobs"),
        grammar=vocab.grammar(params),
        thinking=vocab.thinking(params, opened=opened),
    )
    other = replace(first, sampling=spec.without("prompt_logprobs"), fresh_prompt=False)
    choices = range(1, params.n if params.best_of is None else params.best_of)
    return [first, *(replace(other, id=f"{number}/{choice}", choice=choice) for choice in choices)]


def draw_prompt(draw: Random, vocab_size: int, longest: int, earlier: Sequence[Prompt]) -> Prompt:
    """Draw a prompt of 1 to `longest` tokens; more often than not it shares a prefix with one of `earlier`.

    Some then continue like another earlier prompt, at the same positions: a block with known tokens after a new prefix.
    """
    shared: Prompt = ()
    if earlier and draw.random() < _SHARED_SHARE:
        source = draw.choice(earlier)
        shared = source[: draw.randint(1, len(source))]
        if draw.random() < _SPLICED_SHARE:
            longer = [prompt for prompt in earlier if len(prompt) > len(shared)]
            shared += draw.choice(longer)[len(shared) :] if longer else ()
    fresh = tuple(draw.randrange(vocab_size) for _ in range(ragged(draw, longest)))
    return (shared + fresh)[:longest]


def _draw_dealt(draw: Random, number: int, vocab: Vocab, new_tokens: int) -> SamplingParams:
    """Draw parameters of the kind dealt to request `number`; the forms of answers are dealt in turn too."""
    rounds, at = divmod(number, len(_DEALT))
    match _DEALT[at]:
        case Kind.PLAIN:
            return _draw_plain(draw, new_tokens)
        case Kind.FORMED:  # two choices or more, so that masks are computed for several rows
            form = SamplingParams(structured_outputs=_FORMS[rounds % len(_FORMS)]).structured_outputs
            params = draw_params(draw, vocab, new_tokens, formed=True)
            return replace(params, structured_outputs=form, n=2, best_of=None, max_tokens=new_tokens)
        case Kind.PENALISED:
            return _draw_penalised(draw, new_tokens)
        case Kind.MIXED:
            return draw_params(draw, vocab, new_tokens)


def _draw_plain(draw: Random, new_tokens: int) -> SamplingParams:
    """Draw a plain request; nothing ends it before its last token, so it is certain to cause preemptions."""
    return SamplingParams(
        temperature=round(draw.uniform(0.7, 1.5), 3),
        top_p=draw.choice((1.0, 0.95, 0.8)),
        seed=draw.randrange(-(2**62), 2**62),
        max_tokens=new_tokens,
        ignore_eos=True,
    )


def _draw_penalised(draw: Random, new_tokens: int) -> SamplingParams:
    """Draw penalties without any filter: each token's log probability then depends on the penalties of all tokens."""
    return SamplingParams(
        temperature=round(draw.uniform(0.7, 0.95), 3),
        presence_penalty=draw.choice((0.7, -1.5)),
        frequency_penalty=draw.choice((0.4, 1.1)),
        seed=draw.randrange(-(2**62), 2**62),
        max_tokens=new_tokens,
        ignore_eos=True,
        logprobs=1,
        logprobs_mode=PROCESSED,
    )


def draw_params(draw: Random, vocab: Vocab, new_tokens: int, *, formed: bool | None = None) -> SamplingParams:
    """Draw any mixture of all parameters, each independently.

    `formed` says whether there is a grammar; None leaves it to chance. Log probabilities are always requested, in any
    mode. Parameters that contradict a grammar are not drawn with one. Few requests end before their last token, because
    short requests put no pressure on the others.
    """
    greedy, by_luck = draw.random() < _GREEDY_SHARE, draw.random() < _FORMED_SHARE
    formed = by_luck if formed is None else formed
    n = draw.choice(_CHOICES)
    max_tokens = draw.randint(1, new_tokens)
    return SamplingParams(
        **({"temperature": 0} if greedy else _draw_filters(draw)),
        **(_draw_shifts(draw, vocab) if draw.random() < _SHIFTED_SHARE else {}),
        **(_draw_lists(draw, vocab) if not formed else {"structured_outputs": draw.choice(_FORMS)}),
        **(_draw_stops(draw, vocab, max_tokens) if not formed and draw.random() < _STOPPED_SHARE else {}),
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
    """Parameters of random sampling, with a seed."""
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


def _draw_shifts(draw: Random, vocab: Vocab) -> dict[str, Any]:
    """Parameters that shift logits, before temperature, depending on the tokens so far."""
    return {
        "presence_penalty": draw.choice((0.0, 0.0, 0.7, -1.5)),
        "frequency_penalty": draw.choice((0.0, 0.0, 0.4, 2.0)),
        "repetition_penalty": draw.choice((1.0, 1.0, 1.15, 0.8)),
        "repeat_last_n": draw.choice((-1, -1, 8, 64)),
        "dry_multiplier": draw.choice((0.0, 0.0, 0.8)),
        "dry_base": draw.choice((1.75, 1.2)),
        "dry_allowed_length": draw.choice((1, 2)),
        "dry_penalty_last_n": draw.choice((-1, 32)),
        "dry_sequence_breakers": draw.choice((None, _some(draw, vocab.words, 4))),
    }


def _draw_lists(draw: Random, vocab: Vocab) -> dict[str, Any]:
    """Lists of tokens and words that are allowed, forbidden or biased; each is rare."""
    tokens = [draw.randrange(vocab.vocab_size) for _ in range(draw.randint(1, 40))]
    lists = {
        "logit_bias": {token: draw.uniform(-5, 5) for token in tokens},
        "allowed_token_ids": sorted({*tokens, *vocab.ends}),
        "bad_words": _some(draw, vocab.words, 20),
    }
    return {name: value for name, value in lists.items() if draw.random() < _LISTED_SHARE}


def _draw_stops(draw: Random, vocab: Vocab, max_tokens: int) -> dict[str, Any]:
    """Parameters that may end a sequence before its last token."""
    return {
        "stop": _some(draw, (*vocab.words, "e", " "), 4),
        "include_stop_str_in_output": draw.random() < 0.5,
        "stop_token_ids": [draw.randrange(vocab.vocab_size) for _ in range(draw.randint(1, 20))],
        "min_tokens": draw.randint(0, max_tokens),
        "repetition_detection": draw.choice((None, {"max_pattern_size": 4, "min_count": 2})),
    }


def _some(draw: Random, texts: Sequence[str], most: int) -> list[str]:
    return draw.sample(texts, k=min(len(texts), draw.randint(1, most)))


def ragged(draw: Random, most: int) -> int:
    """A size from 1 to `most`, log-uniform: mostly small, sometimes large."""
    return round(math.pow(most, draw.random()))
