"""Workers hold to their budgets, end with their owner, and never answer one order with another's answer."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from penstock.contract.errors import Unavailable
from penstock.workers import Budget, Exceeded, WorkerPool, WorkerProcess, child

TOY = (str(Path(__file__).with_name("toy_worker.py")),)
SECONDS = 20.0
PATIENCE = 60.0


@pytest.fixture
def pool():
    one = toys()
    yield one
    one.close()


def toys(wall_seconds: float = PATIENCE) -> WorkerPool:
    return WorkerPool("plays", TOY, "hello", wall_seconds=wall_seconds)


def eventually(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + PATIENCE
    while not holds() and time.monotonic() < until:
        time.sleep(0.02)
    return holds()


def is_gone(pid: int) -> bool:
    """Whether a process has ended, though nobody may have asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_one_worker_answers_one_order_after_the_other(pool):
    values = [None, "é\n\ud800", [1.5, -0.0, 10**30], {"a": {"b": []}}, "x" * 3_000_000]
    assert [pool.ask(["echo", value], SECONDS) for value in values] == [["hello", value] for value in values]
    assert pool.pids == (pool.ask(["pid", 0], SECONDS),)


def test_there_are_as_many_workers_as_orders_at_once(pool):
    with ThreadPoolExecutor(3) as threads:
        sleeping = [threads.submit(pool.ask, ["sleep", 0.5], SECONDS) for _ in range(3)]
        assert [each.result() for each in sleeping] == [None] * 3
    assert len(pool.pids) <= 3
    assert pool.ask(["pid", 0], SECONDS) in pool.pids


@pytest.mark.parametrize(
    ("order", "seconds", "budget"),
    [
        (["spin", 0], 0.1, Budget.TIME),
        (["power", 10**9], 0.1, Budget.TIME),  # one bytecode, in C
        (["eat", 10**9], SECONDS, Budget.MEMORY),
        (["abort", 0], SECONDS, Budget.UNKNOWN),
    ],
)
def test_an_order_beyond_its_budget_ends_its_worker_alone(pool, order, seconds, budget):
    before = pool.ask(["pid", 0], SECONDS)
    with pytest.raises(Exceeded) as exceeded:
        pool.ask(order, seconds)
    assert exceeded.value.budget is budget
    assert is_gone(before)
    assert pool.ask(["echo", 1], SECONDS) == ["hello", 1]


def test_time_is_counted_for_each_order_anew_and_waiting_is_none(pool):
    for _ in range(4):
        pool.ask(["burn", 0.2], 0.5)
    pool.ask(["sleep", 0.6], 0.5)


def test_a_worker_that_was_killed_between_two_orders_is_replaced(pool):
    before = pool.ask(["pid", 0], SECONDS)
    os.kill(before, signal.SIGKILL)
    assert pool.ask(["pid", 0], SECONDS) != before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_that_somebody_kills_again_and_again_say_nothing_of_the_order(pool, number):
    with pytest.raises(Unavailable, match="The process that plays was lost twice"):
        pool.ask(["signal", number], SECONDS)
    assert pool.ask(["echo", 1], SECONDS) == ["hello", 1]


def test_a_worker_that_is_stopped_says_nothing_of_the_order(monkeypatch):
    monkeypatch.setattr("penstock.workers.process.ENDING_SECONDS", 0.1)
    stopped = toys(wall_seconds=0.5)
    with pytest.raises(Unavailable, match="lost twice"):
        stopped.ask(["signal", signal.SIGSTOP], SECONDS)
    assert stopped.pids == ()


def test_a_worker_that_gets_little_processor_time_is_waited_for(monkeypatch):
    """As on a busy machine: it got some time between two looks, and is not lost."""
    looks = count()
    monkeypatch.setattr("penstock.workers.process._processor_seconds", lambda pid: next(looks))
    slow = toys(wall_seconds=0.05)
    slow.ask(["sleep", 0.5], SECONDS)
    assert next(looks) > 5, "it was looked at again and again"
    slow.close()


def test_a_worker_that_waits_for_ever_is_lost():
    waiting = toys(wall_seconds=0.5)
    with pytest.raises(Unavailable, match="lost twice"):
        waiting.ask(["sleep", 1000], SECONDS)
    assert waiting.pids == ()


def test_an_answer_that_nobody_waited_for_is_not_given_to_the_next_order(pool, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(WorkerProcess, "_receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.ask(["echo", "first"], SECONDS)
    assert pool.ask(["echo", "second"], SECONDS) == ["hello", "second"]


def test_a_started_worker_takes_the_first_order(pool):
    pool.start()
    started = pool.pids
    assert len(started) == 1
    assert pool.ask(["pid", 0], SECONDS) == started[0]


def test_a_worker_is_of_low_priority(pool):
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert pool.ask(["niceness", 0], SECONDS) == min(19, ours + 10)


def test_ctrl_c_in_a_terminal_does_not_reach_the_workers(pool):
    pool.start()
    assert os.getsid(pool.pids[0]) != os.getsid(0)


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel does not share by session")
def test_a_workers_session_is_of_low_priority_too(pool):
    """Where sessions have equal shares, niceness counts only within one."""
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda _: pool.ask(["sleep", 0.3], SECONDS), range(3)))
    assert len(pool.pids) == 3
    for pid in pool.pids:
        assert eventually(lambda pid=pid: Path(f"/proc/{pid}/autogroup").read_text().endswith(" nice 10\n"))


def test_a_change_that_came_too_soon_is_tried_again(monkeypatch):
    answers = [BlockingIOError(), BlockingIOError(), PermissionError()]

    def write(path: Path, text: str) -> None:
        raise answers.pop(0)

    monkeypatch.setattr(Path, "write_text", write)
    child._lower_session()
    assert not answers


def test_a_pool_that_is_closed_ends_its_workers_busy_ones_too(pool):
    with ThreadPoolExecutor(1) as threads:
        spinning = threads.submit(pool.ask, ["spin", 0], PATIENCE)
        assert eventually(lambda: len(pool.pids) == 1)
        pids = pool.pids
        pool.close()
        with pytest.raises(Unavailable):
            spinning.result()
    assert all(map(is_gone, pids))
    with pytest.raises(Unavailable):
        pool.ask(["echo", 1], SECONDS)


def test_a_pool_that_nobody_has_any_more_ends_its_workers():
    forgotten = toys()
    pid = forgotten.ask(["pid", 0], SECONDS)
    del forgotten
    gc.collect()
    assert is_gone(pid)


OWNER = f"""
import sys, threading
from penstock.workers import WorkerPool
pool = WorkerPool("plays", ({TOY[0]!r},), wall_seconds=60)
pids = [pool.ask(["pid", 0], 20)]
threading.Thread(target=pool.ask, args=(["spin", 0], 60)).start()
while len(pool.pids) < 2:
    pool.start()
print(*pool.pids, flush=True)
sys.stdin.read()
"""


def test_workers_end_with_their_owner_however_it_ends():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with owner:
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        owner.kill()
    assert len(pids) == 2
    assert eventually(lambda: all(map(is_gone, pids)))


FORK = f"""
import os, sys
from penstock.workers import WorkerPool
pool = WorkerPool("plays", ({TOY[0]!r},), wall_seconds=60)
mine = pool.ask(["pid", 0], 20)
child = os.fork()
if not child:
    sys.exit(pool.ask(["pid", 0], 20) == mine)
assert os.waitpid(child, 0)[1] == 0
assert pool.ask(["pid", 0], 20) == mine
"""


def test_a_fork_has_workers_of_its_own():
    subprocess.run([sys.executable, "-c", FORK], check=True)
