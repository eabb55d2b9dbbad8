"""The runner's port, implemented by a process that can be lost: killed, crashed, or hung.

Decides when a step takes too long, and that a lost process is replaced, with the same memory sizes, when the engine
resets its runner; the engine then recomputes what it still knows. Does not decide what caused the loss.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from penstock.contract.adapter import AdapterFacts
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError, EngineFault, RunnerLost, SetupError
from penstock.contract.memory import RunnerFacts
from penstock.contract.model import ModelFacts
from penstock.contract.plan import StepPlan, StepResult
from penstock.remote import messages
from penstock.remote.hang_limit import HangLimit
from penstock.remote.process import RunnerProcess, start_program
from penstock.remote.zygote import Nursery, can_fork

__all__ = ["ProcessRunner"]

_MOST_STARTS = 5
"""The most processes in a row that may end while they load the model. The engine counts those that end in a step."""

_LOADING_SECONDS = 60.0
_LOADING_TIMES = 4.0
"""How long a replacement may be silent while it loads: seconds, or a multiple of the last loading time if longer."""

_SAVING_SECONDS = 8.0
"""Time for a process to save what must outlive it; its own limit is a few seconds lower."""

_PAUSE = 0.2
"""Seconds before the second start in a row; doubled before each further one."""

log = logging.getLogger(__name__)

Announce = Callable[[str], None]


class ProcessRunner:
    """Runs plans in a separate process; see `contract.ports.OverlappingRunner`. Used by one thread at a time.

    The process starts at once, and imports what it needs while its owner does something else. Call `load`,
    `await_found` and `await_ready` in this order before any plan. With the option `standby`, the process is a zygote if
    the system allows it: the process that computes is forked from it, and so is each replacement.

    Args:
        program: the command line of the process; the descriptor of its connection is appended.
        nursery: the nursery, shared with other runners, that forks it; None for a zygote of its own, if it gets one.

    Attributes:
        depth: the most plans that may be started but not finished.
    """

    depth = 1

    def __init__(self, program: Sequence[str], nursery: Nursery | None = None) -> None:
        self._program = tuple(program)
        self._hang_limit = HangLimit()
        self._started: StepPlan | None = None
        self._loading_seconds = 0.0  # loading time of the last process
        self._load: messages.Load  # the first order to a process
        self._adapters: dict[str, AdapterFacts] = {}  # what the next process loads too
        self._saves = False  # whether a process has something to save when it is closed
        self._shared = nursery is not None
        self._nursery = nursery
        self._process = start_program(self._program) if nursery is None else nursery.fork()

    @property
    def pid(self) -> int:
        """The id of the process that computes now."""
        return self._process.pid

    @property
    def zygote_pid(self) -> int | None:
        """The id of the zygote that it is forked from; None without a zygote."""
        return None if self._nursery is None else self._nursery.pid

    def load(self, config: EngineConfig, cache_dir: str) -> None:
        """Order the process to load a model.

        Args:
            config: the operator's options.
            cache_dir: where downloaded models are kept.

        Raises:
            SetupError: the process ended.
        """
        self._load = messages.Load(config, cache_dir)
        if config.standby and self._nursery is None and can_fork():
            self._nursery = Nursery(self._program, self._process)
            self._process = self._nursery.fork()
        self._ask_to_load()

    def await_found(self, announce: Announce, limit: float | None = None) -> ModelFacts:
        """Wait until the model's files are read, before its weights are loaded.

        Args:
            announce: called with each line of the start report.
            limit: seconds of silence after which the process counts as hung; None for no limit.

        Raises:
            SetupError: the model or an option cannot be used, or the process ended.
        """
        began = time.monotonic()
        answer = self._next_answer(announce, limit)
        self._loading_seconds = time.monotonic() - began
        if not isinstance(answer, messages.Found):
            raise SetupError(str(self._process.lose("did not say what model it found")))
        return answer.facts

    def await_ready(self, announce: Announce, limit: float | None = None) -> RunnerFacts:
        """Wait until the weights are loaded too; arguments and errors as in `await_found`."""
        began = time.monotonic()
        answer = self._next_answer(announce, limit)
        self._loading_seconds += time.monotonic() - began
        if not isinstance(answer, messages.Ready):
            raise SetupError(str(self._process.lose("did not say that it was ready")))
        facts = answer.facts
        self._load = replace(self._load, config=facts.config, like=facts.memory)
        self._saves = bool(facts.kv_folder)
        return facts

    def start(self, plan: StepPlan) -> None:
        """See `OverlappingRunner`."""
        self._started = plan
        self._process.send(messages.Run(plan))

    def finish(self) -> StepResult:
        """See `OverlappingRunner`.

        Raises:
            RunnerLost: the process ended, or the step took far longer than earlier ones.
            EngineFault: the step failed in the process.
        """
        plan = self._started
        assert plan is not None, "finish() without a started plan"
        answer = self._process.receive(self._hang_limit.of(plan))
        self._started = None
        if isinstance(answer, messages.Failed):
            raise EngineFault(f"the step failed in the runner's process:\n{answer.report}")
        if not isinstance(answer, messages.Ran) or answer.result.step != plan.step:
            raise self._process.lose(f"answered step {plan.step} with something else")
        self._hang_limit.ran(plan, answer.result.seconds)
        return answer.result

    def reset(self) -> bool:
        """See `OverlappingRunner`. If the process is gone, start another and return True.

        Raises:
            EngineFault: too many replacements in a row ended while they loaded the model.
        """
        plan, self._started = self._started, None
        if not self._process.lost:
            try:
                self._process.send(messages.Reset())
                while not isinstance(self._process.receive(self._hang_limit.of(plan)), messages.Done):
                    continue  # the result of a step that is no longer wanted
            except RunnerLost as error:
                log.error("%s", error)
            else:
                return False
        self._start_again()
        return True

    def load_adapter(self, name: str, path: str) -> AdapterFacts:
        """See `AdaptingRunner`; each process that follows loads it too, if its files have not changed."""
        facts = self._order_adapter(messages.LoadAdapter(name, path))
        self._adapters[name] = facts
        return facts

    def unload_adapter(self, name: str) -> None:
        """See `AdaptingRunner`."""
        self._adapters.pop(name, None)
        self.order(messages.UnloadAdapter(name))

    def _order_adapter(self, order: messages.LoadAdapter) -> AdapterFacts:
        match self.order(order):
            case messages.AdapterLoaded(facts):
                return facts
            case messages.Refused(_, message):
                raise SetupError(message)
            case messages.Failed(report):
                log.error("the adapter %s could not be loaded:\n%s", order.name, report)
        raise EngineFault("The adapter could not be loaded; the log says why.")

    def _load_adapters_again(self) -> None:
        """Load into a new process the adapters of the last one. If one has changed, only requests for it fail."""
        for facts in self._adapters.values():
            try:
                self._order_adapter(messages.LoadAdapter(facts.name, facts.path, facts.digest))
            except (SetupError, EngineFault) as error:
                log.error("requests with the adapter %s fail from now on: %s", facts.name, error)

    def order(self, order: messages.Order) -> messages.Answer | None:
        """Have an order carried out between two steps; None if the process is lost."""
        try:
            self._process.send(order)
            return self._process.receive()
        except RunnerLost as error:
            log.error("%s", error)
            return None

    def close(self) -> None:
        """End the process and its own zygote, after a few seconds in which it saves what must outlive it."""
        if self._saves and not self._process.lost:
            self._let_it_save()
        self._process.close()
        if self._nursery is not None and not self._shared:
            self._nursery.close()  # last: the zygote knows how the other process ended

    def _let_it_save(self) -> None:
        self._saves = False
        until = time.monotonic() + _SAVING_SECONDS
        try:
            self._process.send(messages.Close())
            while not isinstance(answer := self._process.receive(max(1.0, until - time.monotonic())), messages.Done):
                if isinstance(answer, messages.Failed):
                    log.error("what was to be kept was not saved:\n%s", answer.report)
                    return  # any other answer is from a step that is no longer wanted
        except RunnerLost as error:
            log.warning("what was to be kept was not saved: %s", error)

    def _start_again(self) -> None:
        limit = max(_LOADING_SECONDS, _LOADING_TIMES * self._loading_seconds)
        for start in range(_MOST_STARTS):
            if start:
                time.sleep(_PAUSE * 2 ** (start - 1))
            began = time.monotonic()
            self._process = self._next_process()
            try:
                self._ask_to_load()
                self.await_found(_log, limit)
                self.await_ready(_log, limit)
            except SetupError as error:
                log.error("the runner's process could not be started anew: %s", error)
                continue
            self._load_adapters_again()
            log.warning("a new process computes, pid %d, after %.1f s", self.pid, time.monotonic() - began)
            return
        raise EngineFault(f"the runner's process ended {_MOST_STARTS} times in a row while it loaded the model")

    def _ask_to_load(self) -> None:
        try:
            self._process.send(self._load)
        except RunnerLost as error:
            raise _lost_early(error) from error

    def _next_process(self) -> RunnerProcess:
        return start_program(self._program) if self._nursery is None else self._nursery.fork()

    def _next_answer(self, announce: Announce, limit: float | None) -> messages.Answer:
        """The next answer while the model loads, after announcing lines of the report; raises a refusal."""
        try:
            while isinstance(answer := self._process.receive(limit), messages.Said):
                announce(answer.line)
            self._process.identify()  # now, while the zygote, which knows its process id, still exists
        except RunnerLost as error:
            raise _lost_early(error) from error
        except BaseException:
            self._process.close()
            raise
        if isinstance(answer, messages.Refused):
            self._process.close()
            raise ConfigError(answer.option, answer.message) if answer.option else SetupError(answer.message)
        return answer


def _lost_early(error: RunnerLost) -> SetupError:
    return SetupError(f"{error}, while it loaded the model; is there enough memory?")


def _log(line: str) -> None:
    log.debug("%s", line)
