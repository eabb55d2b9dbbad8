"""Where steps are computed: in this process, or in a separate one that can be lost. Callers see no difference.

Names concrete classes of several rooms, as `app`, `building` and `loading` do. If another process computes, this one
imports torch only when asked for the cost of a step.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError
from penstock.contract.memory import RunnerFacts
from penstock.contract.model import ModelFacts, StepCost, StepRow
from penstock.contract.ports import AdaptingRunner, OverlappingRunner, Profiler, Runner
from penstock.grammar import GrammarLibrary
from penstock.model_text import grammars_of
from penstock.remote import Nursery, ProcessProfiler, ProcessRunner, can_fork
from penstock.store import store_root, why_not_usable
from penstock.text import TextModel
from penstock.thread_turns import take_short_turns
from penstock.weights.locate import default_cache_dir
from penstock.weights.pull import pull

__all__ = ["Computing", "Starting", "open_nursery", "start_computing"]

log = logging.getLogger(__name__)

_RUNNER_PROGRAM = (sys.executable, "-m", "penstock.runner_process")


@dataclass(frozen=True, slots=True)
class Computing:
    """A runner, in this process or another, and what belongs to it.

    Attributes:
        adapting: loads adapters into the runner.
        grammars: the grammars with which requests are checked.
        cost: the cost of a step with given rows.
        close: ends the runner, and its process if it has its own.
        recovers: whether the runner may be lost, and is then replaced.
    """

    runner: Runner | OverlappingRunner
    adapting: AdaptingRunner
    facts: RunnerFacts
    grammars: GrammarLibrary
    profiler: Profiler
    cost: Callable[[Sequence[StepRow]], StepCost]
    close: Callable[[], None]
    recovers: bool


Announce = Callable[[str], None]
"""Takes a line of the start report."""


class Starting(Protocol):
    """A runner that is starting. Call `found` and then `ready` once each; close this, or what `ready` returned."""

    def found(self, announce: Announce) -> ModelFacts:
        """Wait until the model's files are read; its weights may not be loaded yet. Raises as `ready` does."""
        ...

    def ready(self, text: TextModel, announce: Announce) -> Computing:
        """Wait until the runner can compute.

        Args:
            text: the model's text half, which can be opened while weights are loaded.
            announce: called with each line of the start report.

        Raises:
            SetupError: the model or an option cannot be used.
        """
        ...

    def close(self) -> None:
        """Give the start up."""
        ...


def open_nursery() -> Nursery | None:
    """A zygote that forks the processes of several models, so that none imports anew; None if it cannot here."""
    return Nursery(_RUNNER_PROGRAM) if can_fork() else None


def start_computing(
    config: EngineConfig, cache_dir: Path | None, *, serves: bool = False, nursery: Nursery | None = None
) -> Starting:
    """Find a model, and choose where it is computed; a separate process begins to load it at once.

    Args:
        config: the operator's options.
        cache_dir: where downloaded models are kept; None for the user's cache directory.
        serves: whether this process is a server: `auto` then means a separate process, on POSIX systems, as it does for
            several ranks.
        nursery: the nursery that forks a separate process; None for a zygote of its own.

    Raises:
        SetupError: there is no such model, or its files or the folder for KV blocks cannot be used.
    """
    may_be_lost = serves or config.tensor_parallel > 1
    apart = config.runner == "process" or (config.runner == "auto" and may_be_lost and os.name == "posix")
    cache_dir = cache_dir or default_cache_dir(os.environ)
    config = replace(config, kv_store=_kv_folder(config.kv_store, cache_dir))
    return _Apart(config, cache_dir, nursery) if apart else _Here(config, cache_dir, serves)


def _kv_folder(option: str, cache_dir: Path) -> str:
    """The folder for the option `kv_store`; "off" also if it is `auto` and the default folder cannot be used.

    Raises:
        ConfigError: a folder was named, but cannot be used.
    """
    root = store_root(option, cache_dir)
    if root is None:
        return "off"
    reason = why_not_usable(root)
    if not reason:
        return str(root)
    if option != "auto":
        raise ConfigError("kv_store", f"{root} cannot be used: {reason}")
    log.warning("no KV blocks are kept in %s: %s", root, reason)
    return "off"


class _Here:
    """A runner in this process."""

    def __init__(self, config: EngineConfig, cache_dir: Path, serves: bool) -> None:
        from penstock import building, draft_loading, loading  # they import torch

        self._serves = serves
        self._building = building
        self._config = config
        self._cache_dir = cache_dir
        self._files = loading.find_model(config, cache_dir)
        self._draft = draft_loading.find_draft_model(config, cache_dir)
        self._end: Callable[[], None] = lambda: None

    def found(self, announce: Announce) -> ModelFacts:  # noqa: ARG002 - there is nothing to say yet
        """See `Starting`."""
        return self._building.read_facts(self._config, self._files, self._cache_dir)

    def ready(self, text: TextModel, announce: Announce) -> Computing:
        """See `Starting`."""
        from penstock.exec.profiler import TorchProfiler
        from penstock.nn.cost import cost

        runner, facts, loaded, grammars = self._building.load_runner(
            self._config, self._files, text, announce, draft=self._draft
        )
        self._end = runner.close
        if self._serves:
            take_short_turns()
            grammars.prepare()  # otherwise the first grammar would stall all streams
        planned_cost = partial(cost, loaded.program, kv_dtype=loaded.kv_dtype)
        return Computing(runner, runner, facts, grammars, TorchProfiler(), planned_cost, self.close, recovers=False)

    def close(self) -> None:
        """Close the runner, which saves what must outlive it."""
        self._end()


class _Apart:
    """A runner in a separate process, which imports and loads while this one does something else."""

    def __init__(self, config: EngineConfig, cache_dir: Path, nursery: Nursery | None) -> None:
        self._cache_dir = cache_dir
        for model in filter(None, (config.model, config.draft_model)):
            pull(model, cache_dir, show_progress=True)  # here, because the other process ignores Ctrl-C
        self._runner = ProcessRunner(_RUNNER_PROGRAM, nursery)
        try:
            self._runner.load(config, str(cache_dir))
        except BaseException:
            self._runner.close()
            raise

    def found(self, announce: Announce) -> ModelFacts:
        """See `Starting`."""
        return self._runner.await_found(announce)

    def ready(self, text: TextModel, announce: Announce) -> Computing:
        """See `Starting`."""
        facts = self._runner.await_ready(announce)
        planned_cost = partial(_cost_of, facts.config, self._cache_dir)
        grammars = grammars_of(text, facts.vocab_size, compiles=False)
        profiler = ProcessProfiler(self._runner)
        return Computing(self._runner, self._runner, facts, grammars, profiler, planned_cost, self.close, recovers=True)

    def close(self) -> None:
        """End the process."""
        self._runner.close()


def _cost_of(config: EngineConfig, cache_dir: Path, rows: Sequence[StepRow]) -> StepCost:
    """The cost of a step of a model that is loaded in another process: this one plans the model from its headers."""
    from penstock.loading import find_model, plan_model, resolve_choices  # imports torch
    from penstock.nn.cost import cost

    files = find_model(config, cache_dir)
    choices = resolve_choices(config, files)
    return cost(plan_model(config, files, choices).program, rows, kv_dtype=choices.kv_dtype)
