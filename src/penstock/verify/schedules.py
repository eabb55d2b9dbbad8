"""Drawing schedules: the circumstances of a request that law 1 says must not matter.

Decides batch, chunk and block sizes, cache state, memory pressure, threads, who comes when, and which strangers come
and are aborted. Runs nothing. Invariants: the same seed, extent and requests give the same schedules; every request
fits every schedule's pool; schedule 0 has the sizes that the operator serves with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

from penstock.contract.config import EngineConfig, SchedulerConfig
from penstock.contract.request import SequenceRequest, StopRules
from penstock.verify.lexicon import Lexicon
from penstock.verify.requests import draw_params, draw_prompt, ragged

__all__ = ["Arrival", "Schedule", "Stranger", "draw_schedules"]

_BLOCK_SIZES = (1, 2, 3, 5, 8, 16, 16, 32)
_TIGHT_BLOCK_SIZES = (1, 2, 3, 5, 8)  # small blocks: a sequence outgrows its lease often, and somebody must yield
_LONGEST_LIFE = 12
_ATTEMPTS = 16


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request is submitted before step `step`; ties keep the order of the schedule."""

    step: int
    request: SequenceRequest


@dataclass(frozen=True, slots=True)
class Stranger:
    """A request that shares batch and cache with the others and is aborted `life` steps after it came."""

    arrival: Arrival
    life: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """One way to run all requests together.

    Attributes:
        config: what the scheduler is told.
        runs: how often all requests are run, one time after another, on the same scheduler and KV memory; the second
            run finds what the first one cached.
        tight: the pool is too small for all who run, so that some are preempted.
        arrivals: in order of submission.
    """

    index: int
    config: SchedulerConfig
    runs: int
    tight: bool
    threads: int
    arrivals: tuple[Arrival, ...]
    strangers: tuple[Stranger, ...]

    @property
    def cache(self) -> str:
        """What the prefix cache can do: `off`, `cold` (starts empty) or `warm` (all is run a second time)."""
        if not self.config.prefix_caching:
            return "off"
        return "warm" if self.runs > 1 else "cold"

    @property
    def arrivals_in_words(self) -> str:
        """When the requests come: all `at once`, or until which step."""
        last = self.arrivals[-1].step
        return f"until {last}" if last else "at once"


@dataclass(frozen=True, slots=True)
class _Traits:
    """The part of a schedule that is dealt rather than drawn, so that few schedules already meet every case."""

    tight: bool
    caching: bool
    runs: int


def draw_schedules(
    count: int,
    seed: int,
    requests: Sequence[SequenceRequest],
    served: EngineConfig,
    *,
    lexicon: Lexicon,
    threads: int,
    cache_root: bytes,
    preempts: Callable[[Schedule], bool],
) -> tuple[Schedule, ...]:
    """Schedule 0 with the sizes of `served`, and drawn ones after it.

    Args:
        count: how many.
        seed: of all of them.
        requests: what they run.
        served: the operator's options.
        lexicon: for the prompts of strangers.
        threads: the operator's number; drawn schedules use others too.
        cache_root: names the model in block keys.
        preempts: whether a schedule will preempt. A tight one is drawn again until it does, so that preemption is
            there by design and not by luck; given up where it cannot be had, as with a single request.
    """
    schedules = []
    for index in range(count):
        draw = Random(f"schedule/{seed}/{index}")  # noqa: S311 - a workload, not a secret
        traits = _deal(index, served)
        for _ in range(_ATTEMPTS):
            drawn = _draw_schedule(draw, index, traits, requests, served, lexicon, threads)
            schedule = replace(drawn, config=replace(drawn.config, cache_root=cache_root))
            if not schedule.tight or preempts(schedule):
                break
        schedules.append(schedule)
    return tuple(schedules)


def _draw_schedule(
    draw: Random,
    index: int,
    traits: _Traits,
    requests: Sequence[SequenceRequest],
    served: EngineConfig,
    lexicon: Lexicon,
    threads: int,
) -> Schedule:
    strangers = _draw_strangers(draw, requests, lexicon)
    everyone = [*requests, *(stranger.arrival.request for stranger in strangers)]
    config = _draw_config(draw, traits, everyone) if index else _served_config(served, everyone)
    return Schedule(
        index=index,
        config=replace(config, prefix_caching=traits.caching),
        runs=traits.runs,
        tight=traits.tight,
        threads=draw.choice((1, 2, 3, threads)) if index else threads,
        arrivals=_draw_arrivals(draw, requests),
        strangers=strangers,
    )


def _deal(index: int, served: EngineConfig) -> _Traits:
    """Every second one is tight, and the cache is warm, cold and off in turn: all pairs within six schedules."""
    if index == 0:
        return _Traits(tight=False, caching=served.prefix_caching, runs=2 if served.prefix_caching else 1)
    state = index % 3
    return _Traits(tight=index % 2 == 1, caching=state != 2, runs=2 if state == 0 else 1)


def _served_config(served: EngineConfig, everyone: Iterable[SequenceRequest]) -> SchedulerConfig:
    needs = _needs(everyone, served.block_size)
    return SchedulerConfig(
        num_blocks=sum(needs),
        block_size=served.block_size,
        max_num_seqs=served.max_num_seqs,
        max_num_batched_tokens=served.max_num_batched_tokens,
        max_model_len=_longest(everyone),
    )


def _draw_config(draw: Random, traits: _Traits, everyone: Sequence[SequenceRequest]) -> SchedulerConfig:
    block_size = draw.choice(_TIGHT_BLOCK_SIZES if traits.tight else _BLOCK_SIZES)
    needs = _needs(everyone, block_size)
    seqs = max(2, ragged(draw, len(everyone)))
    return SchedulerConfig(
        num_blocks=max(needs) + draw.randint(0, 2) if traits.tight else sum(needs),
        block_size=block_size,
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + ragged(draw, 2 * max(len(request.prompt) for request in everyone)),
        max_model_len=_longest(everyone),
    )


def _needs(everyone: Iterable[SequenceRequest], block_size: int) -> list[int]:
    """Blocks that each may come to need."""
    return [-(-_most_tokens(request) // block_size) for request in everyone]


def _longest(everyone: Iterable[SequenceRequest]) -> int:
    return max(_most_tokens(request) for request in everyone)


def _most_tokens(request: SequenceRequest) -> int:
    return len(request.prompt) + request.stop.max_tokens


def _draw_arrivals(draw: Random, requests: Sequence[SequenceRequest]) -> tuple[Arrival, ...]:
    """Any order; all at once, or spread over more and less time than they take."""
    span = draw.choice((0, 1, 2)) * len(requests)
    steps = sorted(draw.randint(0, span) for _ in requests)
    shuffled = draw.sample(requests, k=len(requests))
    return tuple(Arrival(step, request) for step, request in zip(steps, shuffled, strict=True))


def _draw_strangers(draw: Random, requests: Sequence[SequenceRequest], lexicon: Lexicon) -> tuple[Stranger, ...]:
    """One for every four requests, with prompts that begin like theirs: aborted before, in and after its prompt."""
    prompts = [request.prompt for request in requests]
    longest = max(requests, key=_most_tokens)
    strangers = []
    for index in range(1 + len(requests) // 4):
        prompt = draw_prompt(draw, lexicon.vocab_size, len(longest.prompt), prompts)
        request = SequenceRequest(
            f"stranger/{index}",
            prompt,
            sampling=lexicon.resolve(draw_params(draw, lexicon, 1)),
            stop=StopRules(max_tokens=_most_tokens(longest) - len(prompt)),
        )
        arrival = Arrival(draw.randint(0, 2 * len(requests)), request)
        strangers.append(Stranger(arrival, draw.randint(0, _LONGEST_LIFE)))
    return tuple(strangers)
