"""The processes of the other ranks, as rank 0 sees them: it starts them, gives them orders, and loses them together.

Decides that the end of one rank is the end of all: its share of keys and values is gone, and the others wait for its
part of a sum. In a runner's process, rank 0 then ends as the lost rank did, so that the engine sees how, and starts
everything anew (ADR 25). Elsewhere, every later order raises.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError, EngineFault, SetupError
from penstock.exec.kv_store import KVStore
from penstock.ranks import messages
from penstock.ranks.gloo_group import GlooGroup
from penstock.ranks.stores import MirroredStates
from penstock.remote import Closed, Connection

__all__ = ["RankProcesses"]

_END_SECONDS = 1.0
"""How long to wait for a lost rank's exit status, which may come a little after its connection closes."""

log = logging.getLogger(__name__)


class RankProcesses:
    """The other ranks of a group. One thread gives orders; a thread of its own notices when a rank is lost.

    The ranks start to load their shares at once; call `await_loaded` and `join`, in this order, before `tell`.

    Args:
        program: the command line of a rank; the descriptor of its connection is appended.
        config: the operator's options; `tensor_parallel` is the number of ranks.
        model: path of the model's files.

    Attributes:
        group: rank 0's place among the ranks.
        ends_process: whether this process ends when a rank is lost.
        weight_bytes: memory of each other rank's weights, in order; () until they are loaded.
    """

    def __init__(self, program: Sequence[str], config: EngineConfig, model: Path) -> None:
        self.group = GlooGroup(0, config.tensor_parallel)
        self.ends_process = False
        self.weight_bytes: tuple[int, ...] = ()
        self._watcher: threading.Thread | None = None
        self._lock = threading.Lock()
        self._reason = ""
        self._number = 0
        self._numbers: dict[int, int] = {}  # numbers of stores, by the id of their tensors
        self._dropped: deque[tuple[int, int]] = deque()  # stores that are gone, still to be reported
        self._ranks = [_Rank(program) for _ in range(1, config.tensor_parallel)]
        config = replace(config, model=str(model))
        for rank, each in enumerate(self._ranks, start=1):
            self._send(each, messages.Load(config, rank))

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the other ranks, in order."""
        return tuple(each.process.pid for each in self._ranks)

    def await_loaded(self) -> None:
        """Wait until every rank has loaded its share.

        Raises:
            SetupError: a rank cannot load its share, or ended.
        """
        found = []
        for rank, each in enumerate(self._ranks, start=1):
            answer = self._answer(each)
            if isinstance(answer, messages.Refused):
                self.close()
                message = f"rank {rank}: {answer.message}"
                raise ConfigError(answer.option, message) if answer.option else SetupError(message)
            assert isinstance(answer, messages.Loaded), answer
            found.append(answer.weight_bytes)
        self.weight_bytes = tuple(found)

    def join(self) -> None:
        """Have all ranks meet.

        Raises:
            SetupError: a rank ended.
            EngineFault: the ranks did not meet.
        """
        folder = tempfile.mkdtemp(prefix="penstock-ranks-")  # no other user can enter it
        try:
            file = Path(folder) / "meeting"
            for each in self._ranks:
                self._send(each, messages.Join(str(file)))
            self.group.join(file)
            for each in self._ranks:
                self._answer(each)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._watcher = threading.Thread(target=self._watch, name="penstock-ranks", daemon=True)
        self._watcher.start()

    def tell(self, order: messages.Order) -> None:
        """Give every other rank an order.

        Raises:
            EngineFault: a rank is gone.
        """
        while self._dropped:
            key, number = self._dropped.popleft()
            if self._numbers.get(key) == number:
                del self._numbers[key]
            self.tell(messages.Drop(number))
        if self._reason:
            raise EngineFault(self._reason)
        for each in self._ranks:
            try:
                each.connection.send(order)
            except Closed as error:
                raise EngineFault(self.lose(f"a rank is gone: {error}")) from error

    def mirror_kv(self, kv: KVStore) -> None:
        """Have the other ranks make a store like this one, which is used together with it."""
        number = self._numbered(kv, kv.keys)
        self.tell(messages.MakeKv(number, kv.num_blocks, kv.block_size))

    def mirror_states(self, states: MirroredStates, slots: int, checkpoints: int, spares: int) -> None:
        """Have the other ranks make memory like this one, and change it as this one is changed."""
        number = self._numbered(states, states.states)
        self.tell(messages.MakeStates(number, slots, checkpoints, spares))
        states.copied = lambda source, targets: self.tell(messages.CopyState(number, source, targets))

    def number_of(self, tensors: object) -> int:
        """The number of the store that has these tensors."""
        return self._numbers[id(tensors)]

    def lose(self, reason: str) -> str:
        """Give the group up: end all ranks, and this process if it is a runner's. Returns the first reason."""
        with self._lock:
            if self._reason:
                return self._reason
            status = self._first_status()
            self._reason = f"{reason} ({_how(status)})"
            self._end_all()
        log.error("%s", self._reason)
        if self.ends_process:
            _end_alike(status)
        return self._reason

    def close(self) -> None:
        """End the other ranks: they hold nothing that would be lost."""
        with self._lock:
            self._reason = self._reason or "the ranks were ended"
            self._end_all()
        if self._watcher is not None:
            self._watcher.join()
        for each in self._ranks:
            each.connection.close()
        self.group.leave()

    def _numbered(self, store: object, tensors: object) -> int:
        self._number += 1
        self._numbers[id(tensors)] = self._number
        weakref.finalize(store, self._dropped.append, (id(tensors), self._number))
        return self._number

    def _send(self, rank: _Rank, order: messages.Order) -> None:
        try:
            rank.connection.send(order)
        except Closed as error:
            self._lost_early(error)

    def _answer(self, rank: _Rank) -> messages.Answer:
        try:
            return rank.connection.receive()
        except Closed as error:
            self._lost_early(error)

    def _lost_early(self, error: Closed) -> NoReturn:
        reason = self.lose("a rank ended while it loaded its share")
        raise SetupError(f"{reason}; is there enough memory?") from error

    def _watch(self) -> None:
        """Wait until a rank's connection hangs up."""
        poller = select.poll()
        for each in self._ranks:
            poller.register(each.connection.fileno(), 0)  # errors and hang-ups are always reported
        poller.poll()
        self.lose("a rank is gone")

    def _first_status(self) -> int | None:
        """How the rank that is gone ended; None if none has ended, or it is unknown."""
        for each in self._ranks:
            try:
                each.process.wait(_END_SECONDS / len(self._ranks))
            except subprocess.TimeoutExpired:
                continue
            return each.process.returncode
        return None

    def _end_all(self) -> None:
        for each in self._ranks:
            each.process.kill()
        for each in self._ranks:
            each.process.wait()


class _Rank:
    """One process and the connection to it."""

    def __init__(self, program: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(  # noqa: S603 (a program of ours)
                [*program, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal is meant for the engine
            )
        self.connection: Connection[messages.Answer] = Connection(ours, messages.Answer)


def _how(status: int | None) -> str:
    if status is None:
        return "nobody knows how"
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _end_alike(status: int | None) -> None:
    """End this process in the same way as another one has ended."""
    if status is not None and status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status if status is not None and status > 0 else 1)
