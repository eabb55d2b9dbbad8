"""Measures what guesses save: runs the same tasks with and without guesses, in turns, and compares every token.

Two engines answer at the same time, one of them with guesses. They take turns step by step: the engine with fewer
tokens goes next, and each step's time counts for its engine. So a machine that slows down for a second slows down both.
Prompts are cached and forms compiled before the clock starts, because guesses save only decode steps, and an engine's
first form takes half a second to compile. Requires of an engine only that it answers lists of prompts and can be
stepped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.bench.arithmetic import Spread
from penstock.bench.speculation_tasks import Task
from penstock.contract.errors import EngineFault
from penstock.sampling import SamplingParams

__all__ = ["Answers", "TaskRun", "run_both", "speculation_table", "summary"]


class Answers(Protocol):
    """An engine that answers lists of prompts and can be stepped by hand, as `LLM` is."""

    @property
    def scheduler(self) -> Any:
        """Its `stats.steps` is the number of steps so far."""
        ...

    def chat(self, messages: Sequence[Any], sampling_params: SamplingParams, *, use_tqdm: bool) -> Sequence[Any]:
        """Answer conversations."""
        ...

    def generate(self, prompts: Sequence[Any], sampling_params: SamplingParams, *, use_tqdm: bool) -> Sequence[Any]:
        """Continue prompts."""
        ...

    def add_request(self, prompt: Sequence[int], sampling_params: SamplingParams) -> str:
        """Queue a request."""
        ...

    def step(self) -> Sequence[Any]:
        """Compute a step; return the requests that advanced."""
        ...

    def has_unfinished_requests(self) -> bool:
        """Whether there is work."""
        ...


@dataclass(frozen=True, slots=True)
class TaskRun:
    """One run of a task by several streams at once.

    Attributes:
        seconds: time of the steps, for all answers.
        steps: steps that the engine computed.
        tokens: the token ids of each answer.
    """

    seconds: float
    steps: int
    tokens: tuple[tuple[int, ...], ...]

    @property
    def tokens_s(self) -> float:
        """Generated tokens per second, over all streams."""
        return sum(map(len, self.tokens)) / self.seconds


def run_both(
    plain: Answers,
    guessing: Answers,
    task: Task,
    streams: int,
    vocab_size: int,
    now: Callable[[], float] = time.perf_counter,
) -> tuple[TaskRun, TaskRun]:
    """Run a task once with each of two engines, which take turns.

    Args:
        plain: an engine without other work, which computes one token per step.
        guessing: another engine without other work, which guesses.
        task: the task.
        streams: number of streams at once, each with its own prompt.
        vocab_size: size of the model's vocabulary.
        now: a monotonic clock, in seconds.

    Raises:
        EngineFault: an answer failed.
    """
    asked = [task.ask(stream, vocab_size) for stream in range(streams)]
    form: dict[str, Any] = {} if task.schema is None else {"structured_outputs": {"json": task.schema}}
    params = SamplingParams(max_tokens=task.max_tokens, **task.sampling, **form)
    one = _Stepped(plain, _ready(plain, asked, task, form), params)
    other = _Stepped(guessing, _ready(guessing, asked, task, form), params)
    while busy := [each for each in (one, other) if each.engine.has_unfinished_requests()]:
        min(busy, key=lambda each: each.count).step(task.name, now)
    return one.run(), other.run()


def _ready(engine: Answers, asked: Sequence[str | list[int]], task: Task, form: dict[str, Any]) -> list[list[int]]:
    """Cache the prompts and compile the form for this answer length; returns the prompts' tokens."""
    answers = _answer(engine, asked, SamplingParams(max_tokens=1))
    if form:  # an answer that ends at once leaves nothing to guess from
        _answer(engine, asked[:1], SamplingParams(max_tokens=task.max_tokens, stop=["["], **form))
    return [list(answer.prompt_token_ids) for answer in answers]


class _Stepped:
    """An engine that answers some prompts, and the time that its steps took."""

    def __init__(self, engine: Answers, prompts: Sequence[list[int]], params: SamplingParams) -> None:
        self.engine = engine
        self._seconds = 0.0
        self._before = int(engine.scheduler.stats.steps)
        self._tokens: dict[str, tuple[int, ...]] = {engine.add_request(prompt, params): () for prompt in prompts}

    @property
    def count(self) -> int:
        """Tokens so far."""
        return sum(map(len, self._tokens.values()))

    def step(self, task: str, now: Callable[[], float]) -> None:
        """Step the engine, by a clock; `task` is named if an answer failed."""
        began = now()
        moved = self.engine.step()
        self._seconds += now() - began
        for output in moved:
            if output.error:
                raise EngineFault(f"{task}: {output.error}")
            self._tokens[output.request_id] = tuple(output.outputs[0].token_ids)

    def run(self) -> TaskRun:
        """The finished run."""
        return TaskRun(self._seconds, int(self.engine.scheduler.stats.steps) - self._before, (*self._tokens.values(),))


def _answer(engine: Answers, asked: Sequence[str | list[int]], params: SamplingParams) -> Sequence[Any]:
    if isinstance(asked[0], str):
        return engine.chat([[{"role": "user", "content": each}] for each in asked], params, use_tqdm=False)
    return engine.generate(asked, params, use_tqdm=False)


def summary(task: str, streams: int, plain: Sequence[TaskRun], guessed: Sequence[TaskRun]) -> dict[str, Any]:
    """Medians of runs taken in turns, without guesses and with them, and the ratio of each pair.

    Raises:
        EngineFault: an answer with guesses differs from the one without.
    """
    if any(run.tokens != plain[0].tokens for run in (*plain, *guessed)):
        raise EngineFault(f"{task}, {streams} streams: guesses changed an answer; please report this")
    ratio = Spread.of([one.tokens_s / other.tokens_s for one, other in zip(guessed, plain, strict=True)])
    return {
        "task": task,
        "streams": streams,
        "tokens": sum(map(len, plain[0].tokens)),
        "plain_tok_s": Spread.of([run.tokens_s for run in plain]).median,
        "guessed_tok_s": Spread.of([run.tokens_s for run in guessed]).median,
        "ratio": ratio.median,
        "ratio_lowest": ratio.lowest,
        "ratio_highest": ratio.highest,
        "plain_steps": plain[0].steps,
        "guessed_steps": [run.steps for run in guessed],
        "plain_seconds": [run.seconds for run in plain],
        "guessed_seconds": [run.seconds for run in guessed],
    }


def speculation_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table."""
    heads = f"{'task':20}  {'streams':>7}  {'tokens':>6}  {'without, tok/s':>14}  {'with, tok/s':>11}  {'times':>5}"
    lines = [f"{heads}  {'lowest..highest':>15}  {'tokens a step':>13}"]
    for row in rows:
        spread = f"{row['ratio_lowest']:.2f}..{row['ratio_highest']:.2f}"
        steps = sorted(row["guessed_steps"])[len(row["guessed_steps"]) // 2]
        lines.append(
            f"{row['task']:20}  {row['streams']:7}  {row['tokens']:6}  {row['plain_tok_s']:14.1f}"
            f"  {row['guessed_tok_s']:11.1f}  {row['ratio']:5.2f}  {spread:>15}  {row['tokens'] / steps:13.2f}"
        )
    return "\n".join(lines)
