"""Where steps are computed: in this process, or in one of its own that can be lost. What follows is the same for both.

Names concrete classes of several rooms, as `app`, `building` and `loading` do. Where another process computes, this one
never imports torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from penstock.contract.config import EngineConfig
from penstock.contract.memory import RunnerFacts
from penstock.contract.model import ModelFacts, StepCost, StepRow
from penstock.contract.ports import OverlappingRunner, Profiler, Runner
from penstock.grammar import GrammarLibrary
from penstock.model_text import grammars_of
from penstock.remote import ProcessProfiler, ProcessRunner
from penstock.text import TextModel
from penstock.weights.locate import default_cache_dir
from penstock.weights.pull import pull

__all__ = ["Computing", "Starting", "start_computing"]

_RUNNER_PROGRAM = (sys.executable, "-m", "penstock.runner_process")


@dataclass(frozen=True, slots=True)
class Computing:
    """What computes, wherever it does: a runner and what belongs to it.

    Attributes:
        grammars: those that requests are checked with.
        cost: what a step of given rows takes.
        close: ends what is not this process's own.
    """

    runner: Runner | OverlappingRunner
    facts: RunnerFacts
    grammars: GrammarLibrary
    profiler: Profiler
    cost: Callable[[Sequence[StepRow]], StepCost]
    close: Callable[[], None]


class Starting(Protocol):
    """What will compute. Its owner closes it, or what `ready` returned."""

    @property
    def model(self) -> ModelFacts:
        """What the model's files say. May wait until they are read, and raises as `ready` does."""
        ...

    def ready(self, text: TextModel) -> Computing:
        """Wait until it can compute.

        Args:
            text: the model's, which may be opened meanwhile.

        Raises:
            SetupError: the model or an option cannot be used.
        """
        ...

    def close(self) -> None:
        """Give it up."""
        ...


def start_computing(config: EngineConfig, cache_dir: Path | None, announce: Callable[[str], None]) -> Starting:
    """Find a model, and begin to load it where the operator wants it computed.

    Args:
        config: what the operator chose.
        cache_dir: where fetched models are kept; None takes the user's cache directory.
        announce: called with each line of the start report.

    Raises:
        SetupError: the model or an option cannot be used.
    """
    cache = cache_dir or default_cache_dir(os.environ)
    return (_Apart if config.runner == "process" else _Here)(config, cache, announce)


class _Here:
    """A runner in this process."""

    def __init__(self, config: EngineConfig, cache_dir: Path, announce: Callable[[str], None]) -> None:
        from penstock.building import read_facts  # brings torch in
        from penstock.loading import find_model

        self._config = config
        self._announce = announce
        self._files = find_model(config, cache_dir)
        self.model = read_facts(config, self._files, cache_dir)

    def ready(self, text: TextModel) -> Computing:
        """See `Starting`."""
        from penstock.building import load_runner
        from penstock.exec.profiler import TorchProfiler
        from penstock.nn.cost import cost

        runner, facts, loaded, grammars = load_runner(self._config, self._files, text, self._announce)
        planned_cost = partial(cost, loaded.program, kv_dtype=loaded.kv_dtype)
        return Computing(runner, facts, grammars, TorchProfiler(), planned_cost, self.close)

    def close(self) -> None:
        """Nothing is left behind."""


class _Apart:
    """A runner in a process of its own, which imports and loads while this one does something else."""

    def __init__(self, config: EngineConfig, cache_dir: Path, announce: Callable[[str], None]) -> None:
        self._cache_dir = cache_dir
        self._announce = announce
        pull(config.model, cache_dir, show_progress=True)  # here, where Ctrl-C is heard
        self._model: ModelFacts | None = None
        self._runner = ProcessRunner(_RUNNER_PROGRAM)
        try:
            self._runner.load(config, str(cache_dir))
        except BaseException:
            self._runner.close()
            raise

    @property
    def model(self) -> ModelFacts:
        """See `Starting`."""
        if self._model is None:
            self._model = self._runner.await_found(self._announce)
        return self._model

    def ready(self, text: TextModel) -> Computing:
        """See `Starting`."""
        facts = self._runner.await_ready(self._announce)
        planned_cost = partial(_cost_of, facts.config, self._cache_dir)
        grammars = grammars_of(text, facts.vocab_size)
        return Computing(self._runner, facts, grammars, ProcessProfiler(self._runner), planned_cost, self.close)

    def close(self) -> None:
        """End the process."""
        self._runner.close()


def _cost_of(config: EngineConfig, cache_dir: Path, rows: Sequence[StepRow]) -> StepCost:
    """What a step takes of a model that is loaded elsewhere: planned here, from its headers."""
    from penstock.loading import find_model, plan_model, resolve_choices  # brings torch in
    from penstock.nn.cost import cost

    files = find_model(config, cache_dir)
    choices = resolve_choices(config, files)
    return cost(plan_model(config, files, choices).program, rows, kv_dtype=choices.kv_dtype)
