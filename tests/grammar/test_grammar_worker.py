"""The compiling process as its owner sees it: an interrupted question is not answered to the next one."""

from __future__ import annotations

import os
import select
import signal

import pytest

from penstock.contract.errors import Unavailable
from penstock.contract.grammar import Grammar, GrammarKind
from penstock.grammar.vocabulary import Vocabulary
from penstock.grammar.worker_client import WorkerClient

VOCABULARY = Vocabulary((*(bytes([byte]) for byte in range(32, 127)), b"<eos>"), (95,), (95,))
FINE = Grammar(GrammarKind.REGEX, "[a-z]+")
WRONG = Grammar(GrammarKind.REGEX, "[a-z")


@pytest.fixture
def worker():
    client = WorkerClient(VOCABULARY)
    yield client
    client.close()


def test_a_verdict_that_was_interrupted_is_not_given_to_the_next_grammar(worker, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(select, "select", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.judge(WRONG)
    assert worker.judge(FINE).error == ""
    assert worker.judge(WRONG).error != ""


@pytest.fixture
def killed(worker, monkeypatch) -> list[int]:
    """How many of the next questions are answered by the death of the process; it is killed by somebody else."""
    left, ask = [0], WorkerClient._asked

    def asked(client, process, line):
        if left[0]:
            left[0] -= 1
            process.kill()
            process.wait()
        return ask(client, process, line)

    monkeypatch.setattr(WorkerClient, "_asked", asked)
    return left


def test_a_process_that_somebody_kills_says_nothing_of_the_grammar(worker, killed):
    killed[0] = 1
    assert worker.judge(FINE).error == ""
    killed[0] = 2
    with pytest.raises(Unavailable, match="lost twice"):
        worker.judge(FINE)
    assert worker.judge(FINE).error == ""


def test_a_process_that_is_stopped_says_nothing_of_the_grammar(monkeypatch):
    worker = WorkerClient(VOCABULARY, wall_seconds=1.0)
    monkeypatch.setattr("penstock.grammar.worker_client.ENDING_SECONDS", 0.1)
    assert worker.judge(FINE).error == ""
    os.kill(worker.pid, signal.SIGSTOP)
    before = worker.pid
    worker._wall_seconds = 60.0  # of the process that is asked after it
    monkeypatch.setattr(select, "select", after_one_that_found_nothing(select.select))
    assert worker.judge(WRONG).code == "invalid_value"
    assert worker.pid != before
    worker.close()


def after_one_that_found_nothing(wait):
    waits = [lambda *_: ([], [], [])]
    return lambda *given: (waits.pop() if waits else wait)(*given)


def test_ctrl_c_in_a_terminal_does_not_reach_the_process(worker):
    assert worker.judge(FINE).error == ""
    assert os.getpgid(worker.pid) != os.getpgrp()
