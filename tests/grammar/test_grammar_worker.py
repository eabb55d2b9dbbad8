"""The compiling process as its owner sees it: an interrupted question is not answered to the next one."""

from __future__ import annotations

import os
import select

import pytest

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


def test_ctrl_c_in_a_terminal_does_not_reach_the_process(worker):
    assert worker.judge(FINE).error == ""
    assert os.getpgid(worker.pid) != os.getpgrp()
