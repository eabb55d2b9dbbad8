"""The runner's port, over a process that can be lost: killed, crashed, or hung.

Decides when a step takes too long, and that a process that is gone is started anew, with the same sizes, when the
engine resets its runner: then the engine computes again what it still knows. Does not decide whose fault it was.
"""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence

from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError, EngineFault, RunnerLost, SetupError
from penstock.contract.memory import MemoryReport, RunnerFacts
from penstock.contract.plan import StepPlan, StepResult
from penstock.remote import messages
from penstock.remote.connection import Closed, Connection
from penstock.remote.step_times import StepTimes

__all__ = ["ProcessRunner"]

_TURN = 1.0
"""Seconds of a wait: where one took longer, this process stood still too, and it counts as one."""

_MOST_STARTS = 5
"""Processes in a row that end before they have computed a step."""

_PAUSE = 0.2
"""Seconds before the second of these; doubled before each further one."""

_DUMP_SECONDS = 1.0
"""For a process that hung to say where."""

log = logging.getLogger(__name__)


class ProcessRunner:
    """Runs plans in a process of its own; see `contract.ports.OverlappingRunner`. Used by one thread at a time.

    Args:
        config: what the operator chose.
        cache_dir: where fetched models are kept.
        program: the command line of the process, to which the descriptor of its connection is added.
        announce: called with each line of the start report.

    Raises:
        SetupError: the model or an option cannot be used, or the process ended while it loaded it.

    Attributes:
        facts: what the runner is.
        depth: plans that may be started and not finished.
    """

    depth = 1

    def __init__(
        self, config: EngineConfig, cache_dir: str, program: Sequence[str], announce: Callable[[str], None]
    ) -> None:
        self._config = config
        self._cache_dir = cache_dir
        self._program = tuple(program)
        self._times = StepTimes()
        self._started: StepPlan | None = None
        self._starts = 0  # since a step was computed
        self._lost = False
        self.facts = self._launch(announce, None)

    @property
    def pid(self) -> int:
        """The process that computes now."""
        return self._process.pid

    def start(self, plan: StepPlan) -> None:
        """See `OverlappingRunner`."""
        self._started = plan
        self._send(messages.Run(plan))

    def finish(self) -> StepResult:
        """See `OverlappingRunner`.

        Raises:
            RunnerLost: the process ended, or takes far longer than its steps do.
            EngineFault: the step failed there.
        """
        plan = self._started
        assert plan is not None, "finish() without a started plan"
        answer = self._receive(self._times.limit(plan))
        self._started = None
        if isinstance(answer, messages.Failed):
            raise EngineFault(f"the step failed in the runner's process:\n{answer.report}")
        if not isinstance(answer, messages.Ran) or answer.result.step != plan.step:
            raise self._lose(f"answered step {plan.step} with something else")
        self._starts = 0
        self._times.ran(plan, answer.result.seconds)
        return answer.result

    def reset(self) -> bool:
        """See `OverlappingRunner`; starts a new process if the one that there was is gone.

        Raises:
            EngineFault: processes end again and again before they compute anything, or none can be started.
        """
        plan, self._started = self._started, None
        if not self._lost:
            try:
                self._send(messages.Reset())
                while not isinstance(self._receive(self._times.limit(plan)), messages.Done):
                    continue  # what was computed for nobody
            except RunnerLost as error:
                log.error("%s", error)
            else:
                return False
        self._start_again()
        return True

    def order(self, order: messages.Order) -> messages.Answer | None:
        """Have something done between two steps; None where the process is lost."""
        try:
            self._send(order)
            return self._receive(None)
        except RunnerLost as error:
            log.error("%s", error)
            return None

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start_again(self) -> None:
        while self._starts < _MOST_STARTS:
            if self._starts:
                time.sleep(_PAUSE * 2 ** (self._starts - 1))
            self._starts += 1
            began = time.monotonic()
            try:
                self._launch(lambda line: log.debug("%s", line), self.facts.memory)
            except SetupError as error:
                log.error("the runner's process could not be started anew: %s", error)
                continue
            log.warning("a new process computes, pid %d, after %.1f s", self.pid, time.monotonic() - began)
            return
        raise EngineFault(f"the runner's process ended {self._starts} times in a row before it had computed a step")

    def _launch(self, announce: Callable[[str], None], like: MemoryReport | None) -> RunnerFacts:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 (a program of ours)
                [*self._program, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C is meant for us
            )
        self._connection: Connection[messages.Answer] = Connection(ours, messages.Answer)
        self._lost = False
        try:
            self._send(messages.Load(self._config if like is None else self.facts.config, self._cache_dir, like))
            while isinstance(answer := self._receive(None), messages.Said):
                announce(answer.line)
        except RunnerLost as error:
            raise SetupError(f"{error}, while it loaded the model; is there enough memory?") from error
        except BaseException:
            self.close()
            raise
        if isinstance(answer, messages.Refused):
            self.close()
            raise ConfigError(answer.option, answer.message) if answer.option else SetupError(answer.message)
        if not isinstance(answer, messages.Ready):
            raise SetupError(str(self._lose("did not say that it was ready")))
        return answer.facts

    def _send(self, order: messages.Order) -> None:
        if self._lost:
            raise RunnerLost("the runner's process is gone")
        try:
            self._connection.send(order)
        except Closed as error:
            raise self._lose("is gone") from error

    def _receive(self, limit: float | None) -> messages.Answer:
        """The next answer.

        Args:
            limit: seconds after which a process that says nothing has hung; None: it may take as long as it likes.
        """
        turns = 0
        while True:
            try:
                return self._connection.receive(_TURN)
            except TimeoutError:
                turns += 1
                if limit is not None and turns * _TURN >= limit:
                    raise self._lose(f"has said nothing for {turns * _TURN:.0f} s and was ended", hung=True) from None
            except Closed as error:
                raise self._lose("is gone") from error

    def _lose(self, what: str, *, hung: bool = False) -> RunnerLost:
        """The process serves no more: see to it that it ends, and say how it did."""
        self._lost = True
        self._connection.close()
        if hung:
            self._process.send_signal(signal.SIGABRT)  # faulthandler writes where each of its threads is
        try:
            status = self._process.wait(timeout=_DUMP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return RunnerLost(f"the runner's process {self._process.pid} {what}")
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        message = f"the runner's process {self._process.pid} {what}: {how}"
        return RunnerLost(message, killed=not hung and status == -signal.SIGKILL)
