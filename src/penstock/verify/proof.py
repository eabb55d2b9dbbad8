"""The proof of law 1, as far as a finite number of experiments can prove it.

Decides the order of things: draw, run each request alone, run all by each schedule, compare. Invariant: how a request
is judged depends on the seed, the extent and the subject, never on what was verified before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from penstock.app import LoadedModel, find_model, load_model, vocabulary_of
from penstock.contract.config import EngineConfig
from penstock.contract.request import SequenceRequest
from penstock.grammar import GrammarLibrary
from penstock.text import open_text
from penstock.verify.compare import Mismatch, compare, total
from penstock.verify.episode import Episode, Outcome, run_alone, run_schedule
from penstock.verify.extent import SMALL, Extent
from penstock.verify.lexicon import Lexicon
from penstock.verify.rehearsal import preempts
from penstock.verify.report import Report, Verdict
from penstock.verify.requests import draw_requests
from penstock.verify.schedules import Schedule, draw_schedules
from penstock.verify.subject import Subject

__all__ = ["OnProgress", "open_subject", "profile", "verify"]

OnProgress = Callable[[int, int], object]
"""Called with (requests run so far, requests to run in all)."""


def verify(subject: Subject, extent: Extent, served: EngineConfig, on_progress: OnProgress | None = None) -> Report:
    """Run every request alone and by every schedule, and compare.

    Args:
        subject: what is verified.
        extent: how much.
        served: the operator's options; the first schedule has their sizes.
        on_progress: told whenever a request is complete.

    Raises:
        ConfigError: the extent does not fit the model's context.
        EngineFault: a request cannot be run even alone; a schedule crashed (then it is a `ScheduleCrashed`).
    """
    lexicon = Lexicon.of(subject)
    requests = draw_requests(
        extent.requests,
        extent.seed,
        lexicon,
        longest_prompt=extent.longest_prompt(subject.max_positions),
        new_tokens=extent.new_tokens,
    )
    schedules = draw_schedules(
        extent.schedules,
        extent.seed,
        requests,
        served,
        lexicon=lexicon,
        threads=subject.threads,
        cache_root=subject.cache_root,
        preempts=partial(preempts, subject=subject),
    )
    advance = _counter(on_progress, len(requests) * (1 + sum(schedule.runs for schedule in schedules)))
    try:
        alone = _run_each_alone(subject, requests, advance)
        verdicts = [_judge(schedule, run_schedule(subject, schedule, advance), alone) for schedule in schedules]
    finally:
        subject.set_threads(subject.threads)
    return Report(extent, requests, tuple(verdicts))


def profile(served: EngineConfig, extent: Extent = SMALL, cache_dir: Path | None = None) -> Report:
    """Load a model and verify a little of it: what a test can afford.

    Args:
        served: which model, and how it is served.
        extent: how much.
        cache_dir: where fetched models are kept; None takes the user's cache directory.

    Raises:
        SetupError: the model or an option cannot be used.
        EngineFault: see `verify`.
    """
    loaded = load_model(served, find_model(served, cache_dir), _say_nothing)
    with open_subject(loaded, served) as subject:
        return verify(subject, extent, served)


@contextmanager
def open_subject(loaded: LoadedModel, served: EngineConfig) -> Iterator[Subject]:
    """A loaded model with its text and its grammars, which end with the block.

    Raises:
        SetupError: its tokenizer or chat template cannot be used.
    """
    text = open_text(loaded.files.text)
    grammars = GrammarLibrary(partial(vocabulary_of, text, loaded.shape.vocab_size))
    try:
        yield Subject.of(loaded, served.threads, text, grammars)
    finally:
        grammars.close()


def _run_each_alone(
    subject: Subject, requests: Sequence[SequenceRequest], advance: Callable[[], object]
) -> dict[str, Outcome]:
    """The references, by request id."""
    subject.set_threads(subject.threads)
    outcomes = {}
    for request in requests:
        outcomes[request.id] = run_alone(subject, request)
        advance()
    return outcomes


def _judge(schedule: Schedule, episode: Episode, alone: Mapping[str, Outcome]) -> Verdict:
    """Compare every outcome of a schedule with its reference."""
    tallies, mismatches = [], []
    for run, outcomes in enumerate(episode.outcomes, start=1):
        for request, reference in alone.items():
            tally, difference = compare(reference, outcomes[request])
            tallies.append(tally)
            if difference is not None:
                mismatches.append(Mismatch(request, run, difference))
    return Verdict(
        schedule=schedule,
        steps=episode.steps,
        preemptions=episode.preemptions,
        hit_tokens=episode.hit_tokens,
        tally=total(tallies),
        first=mismatches[0] if mismatches else None,
        trace=episode.trace if mismatches else (),
    )


def _counter(on_progress: OnProgress | None, whole: int) -> Callable[[], object]:
    """What counts finished requests."""
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if on_progress is not None:
            on_progress(done, whole)

    return advance


def _say_nothing(line: str) -> None:
    """Nobody reads a start report here."""
