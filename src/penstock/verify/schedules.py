"""Draws schedules: the circumstances of a request that must not change its answer.

A schedule has batch, chunk and block sizes, a cache state, memory pressure, threads, order and times of arrival, and
strangers that arrive and are aborted. Invariants: the same seed, options and requests give the same schedules; every
request fits every schedule's pool; schedule 0 has the sizes that the operator serves with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError
from penstock.contract.request import SequenceRequest, StopRules
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.verify.requests import Kind, draw_params, draw_prompt, is_plain, kind_of, ragged
from penstock.verify.vocab import Vocab

__all__ = ["Arrival", "Schedule", "Stranger", "draw_schedules"]

_BLOCK_SIZES = (1, 2, 3, 5, 8, 16, 16, 32)
_TIGHT_BLOCK_SIZES = (1, 2, 3, 5, 8)  # small blocks: sequences often outgrow their leases, and one must yield
_FEWEST_TIGHT_SEQS = 4
_LONGEST_LIFE = 12
_ATTEMPTS = 16
_RIGHT_GUESSES = (None, None, 0.5, 0.7)
"""Taken in turn, so that some tight and some other schedules guess and the rest do not; `--no-speculate`: none do."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that is submitted before step `step`; requests of the same step keep the order of the schedule."""

    step: int
    request: SequenceRequest


@dataclass(frozen=True, slots=True)
class Stranger:
    """A request that shares batch and cache with the others and is aborted `life` steps after its arrival."""

    arrival: Arrival
    life: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """One way to run all requests together.

    Attributes:
        config: the scheduler's configuration.
        runs: how often all requests are run, one run after another, on the same scheduler and KV memory; the second run
            finds what the first one cached.
        tight: whether the pool is too small for all running requests, so that some must be preempted.
        by_kind: whether requests of a kind arrive together, so that whole batches consist of that kind.
        arrivals: in order of submission.
        right_guesses: the chance that a guessed token is right; None if nothing is guessed.
        losses: steps in which the runner is lost, with everything that it had in memory.
    """

    index: int
    config: SchedulerConfig
    runs: int
    tight: bool
    by_kind: bool
    threads: int
    arrivals: tuple[Arrival, ...]
    strangers: tuple[Stranger, ...]
    right_guesses: float | None = None
    losses: tuple[int, ...] = ()

    @property
    def cache(self) -> str:
        """What the prefix cache can do: `off`, `cold` (starts empty) or `warm` (everything is run a second time)."""
        if not self.config.prefix_caching:
            return "off"
        return "warm" if self.runs > 1 else "cold"

    @property
    def arrivals_in_words(self) -> str:
        """When the requests arrive: all `at once`, or until which step."""
        last = self.arrivals[-1].step
        return f"until {last}" if last else "at once"

    @property
    def can_batch_plain(self) -> bool:
        """Whether a batch of only plain requests can occur: several arrive together, and there are several slots."""
        plain = sum(is_plain(arrival.request) for arrival in self.arrivals)
        return self.by_kind and plain > 1 and self.config.max_num_seqs > 1


class Seen(Protocol):
    """What a dry run of a schedule saw."""

    @property
    def recomputed(self) -> int:
        """How often a request was preempted after it had generated tokens, and recomputed."""

    @property
    def plain_steps(self) -> int:
        """Steps that drew for several plain requests and nothing else."""


@dataclass(frozen=True, slots=True)
class _Traits:
    """The part of a schedule that is dealt rather than drawn, so that a few schedules already cover every case."""

    tight: bool
    by_kind: bool
    caching: bool
    runs: int


def draw_schedules(
    count: int,
    seed: int,
    requests: Sequence[SequenceRequest],
    served: EngineConfig,
    *,
    vocab: Vocab,
    threads: int,
    model_digest: bytes,
    window: int | None = None,
    stateful: bool = False,
    dry_run: Callable[[Schedule], Seen],
    served_blocks: int = 0,
    draft_context: int = 0,
) -> tuple[Schedule, ...]:
    """Draw schedules: schedule 0 with the sizes of `served`, the others at random.

    Args:
        count: number of schedules.
        seed: seeds everything that is drawn.
        requests: the requests that each schedule runs.
        served: the operator's options.
        vocab: for the prompts and parameters of strangers.
        threads: the operator's number of threads; drawn schedules use others too.
        model_digest: identifies the model in block keys.
        window: see `SchedulerConfig.window`.
        stateful: whether the model carries recurrent state; schedules then have checkpoints and spare states.
        dry_run: runs a schedule without the model. A schedule is drawn up to 16 times, until it preempts and batches
            plain requests as often as its traits ask for; failing that, the best attempt is taken.
        served_blocks: KV blocks of schedule 0; 0 for as many as all requests together need.
        draft_context: positions that the draft model can compute; 0 for no draft model. It guesses in two schedules of
            three, alone or beside other guesses.

    Raises:
        ConfigError: a single request needs more blocks than `served_blocks`.
    """
    schedules = []
    for index in range(count):
        draw = Random(f"schedule/{seed}/{index}")  # noqa: S311 - a workload, not a secret
        traits = _deal(index, served)
        attempts: Iterator[Schedule] = (
            replace(drawn, config=replace(drawn.config, model_digest=model_digest))
            for drawn in (
                _draw_schedule(draw, index, traits, requests, served, vocab, threads, window, served_blocks)
                for _ in range(_ATTEMPTS)
            )
        )
        if stateful:
            attempts = (_with_checkpoints(draw, drawn, served) for drawn in attempts)
        if served.speculate:
            right = _RIGHT_GUESSES[index % len(_RIGHT_GUESSES)]
            attempts = _guessing(attempts, right, 0 if index % 3 == 1 else draft_context)
        if index % 3:
            attempts = _losing(draw, attempts)
        schedules.append(_best(attempts, dry_run))
    return tuple(schedules)


def _guessing(attempts: Iterable[Schedule], right: float | None, draft_context: int) -> Iterator[Schedule]:
    for drawn in attempts:
        yield replace(drawn, right_guesses=right, config=replace(drawn.config, draft_context=draft_context))


def _losing(draw: Random, attempts: Iterable[Schedule]) -> Iterator[Schedule]:
    """Lose the runner in two steps, early enough that some requests are unfinished.

    Schedules that are built to preempt lose none: after a loss, requests come back one by one and may all find room.
    """
    for drawn in attempts:
        if drawn.tight:
            yield drawn
            continue
        last = max(4, len(drawn.arrivals))
        yield replace(drawn, losses=tuple(sorted(draw.sample(range(2, last), k=min(2, last - 2)))))


def _best(attempts: Iterable[Schedule], dry_run: Callable[[Schedule], Seen]) -> Schedule:
    """The first attempt that does everything it was built for, else the attempt that does most of it."""
    found: list[tuple[float, Schedule]] = []
    for schedule in attempts:
        fulfilled = _fulfilled(schedule, dry_run)
        if fulfilled >= 1:
            return schedule
        found.append((fulfilled, schedule))
    return max(found, key=lambda pair: pair[0])[1]


def _fulfilled(schedule: Schedule, dry_run: Callable[[Schedule], Seen]) -> float:
    """How much of what a schedule was built for happens in it, as a share; 1 for everything.

    A tight schedule should recompute one request in four; a schedule with arrivals by kind should have plain batches.
    """
    if not schedule.tight and not schedule.can_batch_plain:
        return 1
    seen = dry_run(schedule)
    shares = [min(1, seen.recomputed / max(1, len(schedule.arrivals) // 4))] if schedule.tight else []
    if schedule.can_batch_plain:
        shares.append(min(1, seen.plain_steps))
    return min(shares)


def _draw_schedule(
    draw: Random,
    index: int,
    traits: _Traits,
    requests: Sequence[SequenceRequest],
    served: EngineConfig,
    vocab: Vocab,
    threads: int,
    window: int | None,
    served_blocks: int,
) -> Schedule:
    strangers = _draw_strangers(draw, requests, vocab)
    everyone = [*requests, *(stranger.arrival.request for stranger in strangers)]
    if index:
        config = _draw_config(draw, traits, everyone, window)
    else:
        config = _served_config(served, everyone, window, served_blocks)
    return Schedule(
        index=index,
        config=replace(config, prefix_caching=traits.caching),
        runs=traits.runs,
        tight=traits.tight,
        by_kind=traits.by_kind,
        threads=draw.choice((1, 2, 3, threads)) if index else threads,
        arrivals=_draw_arrivals_by_kind(draw, requests, traits) if traits.by_kind else _draw_arrivals(draw, requests),
        strangers=strangers,
    )


def _deal(index: int, served: EngineConfig) -> _Traits:
    """The traits of schedule `index`.

    Every second schedule is tight, and the cache is warm, cold and off in turn: six schedules cover all pairs.
    Requests arrive by kind in tight schedules and in every second one of the others.
    """
    if index == 0:
        return _Traits(False, True, served.prefix_caching, runs=2 if served.prefix_caching else 1)
    state, tight = index % 3, index % 2 == 1
    return _Traits(tight, tight or index % 4 == 0, caching=state != 2, runs=2 if state == 0 else 1)


def _served_config(
    served: EngineConfig, everyone: Iterable[SequenceRequest], window: int | None, blocks: int
) -> SchedulerConfig:
    sizes = SchedulerConfig(
        num_blocks=1,
        block_size=served.block_size,
        max_num_seqs=served.max_num_seqs,
        max_num_batched_tokens=served.max_num_batched_tokens,
        max_model_len=_longest(everyone),
        window=window,
        weigh_drafts=False,
    )
    needs = _needs(everyone, sizes)
    if blocks and blocks < max(needs):
        raise ConfigError(
            "kv_cache_memory",
            f"holds {blocks} blocks of {served.block_size} tokens, and the longest request needs {max(needs)}: give it"
            " more, or lower --prompt-tokens",
        )
    return replace(sizes, num_blocks=min(blocks or sum(needs), sum(needs)))  # more could never be used


def _draw_config(
    draw: Random, traits: _Traits, everyone: Sequence[SequenceRequest], window: int | None
) -> SchedulerConfig:
    block_size = draw.choice(_TIGHT_BLOCK_SIZES if traits.tight else _BLOCK_SIZES)
    seqs = max(_FEWEST_TIGHT_SEQS if traits.tight else 2, ragged(draw, len(everyone)))
    spare = draw.randint(0, 2) if traits.tight else 0
    chunk = 2 * max(len(request.prompt) for request in everyone)
    if traits.tight and window is not None:
        chunk = min(chunk, window)  # else the pool, which must hold a chunk, is too large to be tight with a window
    sizes = SchedulerConfig(
        num_blocks=1,
        block_size=block_size,
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + ragged(draw, chunk),
        max_model_len=_longest(everyone),
        window=window,
        weigh_drafts=False,
    )
    needs = _needs(everyone, sizes)
    return replace(sizes, num_blocks=max(needs) + spare if traits.tight else sum(needs))


def _with_checkpoints(draw: Random, schedule: Schedule, served: EngineConfig) -> Schedule:
    """Add checkpoints and spare states: in schedule 0 as the operator has them, in the others few or many."""
    config = schedule.config
    size, seqs = config.block_size, config.max_num_seqs
    if schedule.index == 0:
        interval, count = -(-served.state_checkpoint_interval // size) * size, 4 * len(schedule.arrivals)
        spares = 32 + seqs
    else:
        interval, count = draw.choice((0, 1, 2, 4)) * size, draw.choice((2, seqs, 4 * seqs, 16 * seqs))
        spares = draw.choice((1, seqs, 4 * seqs, 32 + seqs))
    spares = spares if served.speculate else 0
    config = replace(config, checkpoints=count, checkpoint_interval=interval, spare_states=spares)
    return replace(schedule, config=config)


def _needs(everyone: Iterable[SequenceRequest], sizes: SchedulerConfig) -> list[int]:
    """The most blocks that each request may need; `num_blocks` of `sizes` does not matter."""
    return [sizes.most_blocks(_most_tokens(request)) for request in everyone]


def _longest(everyone: Iterable[SequenceRequest]) -> int:
    return max(_most_tokens(request) for request in everyone)


def _most_tokens(request: SequenceRequest) -> int:
    return len(request.prompt) + request.stop.max_tokens


def _draw_arrivals(draw: Random, requests: Sequence[SequenceRequest]) -> tuple[Arrival, ...]:
    """Draw arrivals in any order: all at once, or spread over one or two steps per request."""
    span = draw.choice((0, 1, 2)) * len(requests)
    steps = sorted(draw.randint(0, span) for _ in requests)
    shuffled = draw.sample(requests, k=len(requests))
    return tuple(Arrival(step, request) for step, request in zip(steps, shuffled, strict=True))


def _draw_arrivals_by_kind(draw: Random, requests: Sequence[SequenceRequest], traits: _Traits) -> tuple[Arrival, ...]:
    """Draw arrivals kind by kind, each kind at once and in any order; in tight schedules the plain kind is first.

    A kind arrives while the kind before it still runs, but only after the earlier kind had some steps to itself.
    """
    kinds = draw.sample(tuple(Kind), k=len(Kind))
    if traits.tight:
        kinds.sort(key=lambda kind: kind is not Kind.PLAIN)
    apart = max(request.stop.max_tokens for request in requests)
    groups = [[request for request in requests if kind_of(request) is kind] for kind in kinds]
    arrivals, step = [], 0
    for group in filter(None, groups):
        arrivals += [Arrival(step, request) for request in draw.sample(group, k=len(group))]
        step += draw.randint(-(-apart // 2), apart)
    return tuple(arrivals)


def _draw_strangers(draw: Random, requests: Sequence[SequenceRequest], vocab: Vocab) -> tuple[Stranger, ...]:
    """Draw one stranger, and one more per four requests, with similar prompts; aborted before, in or after them."""
    prompts = [request.prompt for request in requests]
    longest = max(requests, key=_most_tokens)
    strangers = []
    for index in range(1 + len(requests) // 4):
        prompt = draw_prompt(draw, vocab.vocab_size, len(longest.prompt), prompts)
        request = SequenceRequest(
            f"stranger/{index}",
            prompt,
            sampling=vocab.resolve(draw_params(draw, vocab, 1)),
            stop=StopRules(max_tokens=_most_tokens(longest) - len(prompt)),
        )
        arrival = Arrival(draw.randint(0, 2 * len(requests)), request)
        strangers.append(Stranger(arrival, draw.randint(0, _LONGEST_LIFE)))
    return tuple(strangers)
