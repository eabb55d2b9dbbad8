"""Proves that answers are exact, as far as a finite number of experiments can prove it.

Draws requests and schedules, runs each request alone, runs all of them in each schedule, and compares. Invariant: the
verdict on a request depends on the seed, the budget, the target and the operator's options, never on earlier
verifications.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from penstock.contract.config import EngineConfig
from penstock.contract.request import SequenceRequest
from penstock.draft_loading import find_draft_model, load_guesser
from penstock.loading import LoadedModel, find_model
from penstock.model_text import grammars_of
from penstock.rank_loading import load_on_ranks
from penstock.text import open_text
from penstock.verify.budget import SMALL, Budget
from penstock.verify.compare import Mismatch, compare, total
from penstock.verify.dry_run import dry_run
from penstock.verify.guesses import Guesses
from penstock.verify.report import Report, Verdict
from penstock.verify.requests import dealt_adapters, draw_requests
from penstock.verify.run import Outcome, ScheduleRun, run_alone, run_schedule
from penstock.verify.schedules import Schedule, draw_schedules
from penstock.verify.target import Target
from penstock.verify.vocab import Vocab

__all__ = ["OnProgress", "open_target", "profile", "verify"]

OnProgress = Callable[[int, int], object]
"""Called with (requests run so far, requests to run in all)."""


def verify(
    target: Target,
    budget: Budget,
    served: EngineConfig,
    on_progress: OnProgress | None = None,
    *,
    fail_fast: bool = False,
) -> Report:
    """Run every request alone and in every schedule, and compare.

    Args:
        target: the model to verify.
        budget: how many requests and schedules, and of what length.
        served: the operator's options; the first schedule has their sizes.
        on_progress: called whenever a request is complete.
        fail_fast: stop after the first schedule in which something differs.

    Raises:
        ConfigError: the budget does not fit the model's context, or a request does not fit the operator's KV cache.
        EngineFault: a request cannot be run even alone, or a schedule crashed (then it is a `ScheduleCrashed`).
    """
    vocab = Vocab.of(target)
    requests = draw_requests(
        budget.requests,
        budget.seed,
        vocab,
        longest_prompt=budget.longest_prompt(target.max_positions),
        new_tokens=budget.new_tokens,
    )
    requests = dealt_adapters(requests, target.adapters)
    schedules = draw_schedules(
        budget.schedules,
        budget.seed,
        requests,
        served,
        vocab=vocab,
        threads=target.threads,
        model_digest=target.model_digest,
        window=target.window,
        stateful=target.stateful,
        dry_run=partial(dry_run, target=target),
        draft_context=target.draft_context,
        served_blocks=target.blocks_for(served.kv_cache_memory, served.block_size) if served.kv_cache_memory else 0,
    )
    advance = _counter(on_progress, len(requests) * (1 + sum(schedule.runs for schedule in schedules)))
    try:
        alone = _run_each_alone(target, requests, advance)
        answers = {request_id: outcome.tokens for request_id, outcome in alone.items()}
        verdicts = []
        for schedule in schedules:
            verdicts.append(
                _judge(schedule, run_schedule(target, schedule, advance, _guesser(schedule, answers)), alone)
            )
            if fail_fast and verdicts[-1].first is not None:
                break
    finally:
        target.set_threads(target.threads)
    return Report(budget, requests, tuple(verdicts))


def profile(served: EngineConfig, budget: Budget = SMALL, cache_dir: Path | None = None) -> Report:
    """Load a model and verify it; the default budget takes no longer than a test can afford.

    Args:
        served: which model, and how it is served.
        budget: how many requests and schedules, and of what length.
        cache_dir: where fetched models are kept; None takes the user's cache directory.

    Raises:
        SetupError: the model or an option cannot be used.
        EngineFault: see `verify`.
    """
    loaded = load_on_ranks(served, find_model(served, cache_dir), _say_nothing)
    with open_target(loaded, served, cache_dir) as target:
        return verify(target, budget, served)


@contextmanager
def open_target(
    loaded: LoadedModel,
    served: EngineConfig,
    cache_dir: Path | None = None,
    announce: Callable[[str], None] = lambda line: None,  # noqa: ARG005
) -> Iterator[Target]:
    """Open a loaded model as a target, with its text, its draft model if it has one, and its grammars.

    Grammars and other ranks are closed when the block ends.

    Args:
        loaded: the model.
        served: the operator's options.
        cache_dir: where fetched models are kept; None takes the user's cache directory.
        announce: called with each line of the start report of a draft model.

    Raises:
        SetupError: the model's tokenizer, chat template or draft model cannot be used.
    """
    text = open_text(loaded.files.text)
    loaded, draft = load_guesser(served, find_draft_model(served, cache_dir), text, loaded, announce)
    grammars = grammars_of(text, loaded.shape.vocab_size)
    try:
        yield Target.of(loaded, served.threads, text, grammars, draft)
    finally:
        grammars.close()
        loaded.close()


def _run_each_alone(
    target: Target, requests: Sequence[SequenceRequest], advance: Callable[[], object]
) -> dict[str, Outcome]:
    """The references, by request id."""
    target.set_threads(target.threads)
    outcomes = {}
    for request in requests:
        outcomes[request.id] = run_alone(target, request)
        advance()
    return outcomes


def _guesser(schedule: Schedule, answers: Mapping[str, Sequence[int]]) -> Guesses | None:
    """The guesser of a schedule; None if it has no guesses."""
    right = schedule.right_guesses
    return None if right is None else Guesses(str(schedule.index), right, answers)


def _judge(schedule: Schedule, done: ScheduleRun, alone: Mapping[str, Outcome]) -> Verdict:
    """Compare every outcome of a schedule with its reference."""
    tallies, mismatches = [], []
    for run, outcomes in enumerate(done.outcomes, start=1):
        for request, reference in alone.items():
            tally, difference = compare(reference, outcomes[request])
            tallies.append(tally)
            if difference is not None:
                mismatches.append(Mismatch(request, run, difference))
    return Verdict(
        schedule=schedule,
        steps=done.steps,
        preemptions=done.preemptions,
        recomputed=done.recomputed,
        plain_steps=done.plain_steps,
        hit_tokens=done.hit_tokens,
        given_back=done.given_back,
        drafted=done.drafted,
        accepted=done.accepted,
        accepted_of_model=done.accepted_of_model,
        losses=done.losses,
        restored=done.restored,
        tally=total(tallies),
        first=mismatches[0] if mismatches else None,
        trace=done.trace if mismatches else (),
    )


def _counter(on_progress: OnProgress | None, whole: int) -> Callable[[], object]:
    """A function that counts finished requests and reports them."""
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if on_progress is not None:
            on_progress(done, whole)

    return advance


def _say_nothing(line: str) -> None:
    """Drop a line of the start report: here nobody reads it."""
