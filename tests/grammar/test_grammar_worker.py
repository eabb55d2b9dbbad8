"""The compiling process as its owner sees it: what is too costly, and what says nothing of the grammar."""

from __future__ import annotations

import os
import signal

import pytest
from worker_killing import killed_again_and_again

from penstock.contract.errors import Unavailable
from penstock.contract.grammar import Grammar, GrammarKind
from penstock.grammar.vocabulary import Vocabulary
from penstock.grammar.worker_client import WorkerClient

VOCABULARY = Vocabulary((*(bytes([byte]) for byte in range(32, 127)), b"<eos>"), (95,), (95,))
FINE = Grammar(GrammarKind.REGEX, "[a-z]+")
WRONG = Grammar(GrammarKind.REGEX, "[a-z")
COSTLY = Grammar(GrammarKind.REGEX, "a{65000}")  # a fifth of a second of processor time, or more


@pytest.fixture
def worker():
    client = WorkerClient(VOCABULARY)
    yield client
    client.close()


def test_one_process_judges_one_grammar_after_the_other(worker):
    assert worker.judge(FINE).error == ""
    before = worker.pids
    assert worker.judge(WRONG).code == "invalid_value"
    assert worker.pids == before


def test_a_grammar_beyond_the_limits_is_too_costly_and_ends_its_process(worker, monkeypatch):
    assert worker.judge(FINE).error == ""
    before = worker.pids
    with monkeypatch.context() as patch:
        patch.setattr("penstock.grammar.worker_client.CPU_SECONDS", 0.02)
        assert worker.judge(COSTLY).code == "grammar_too_complex"
    assert worker.judge(FINE).error == ""
    assert worker.pids != before


def test_a_process_that_somebody_kills_says_nothing_of_the_grammar(worker):
    assert worker.judge(FINE).error == ""
    os.kill(worker.pids[0], signal.SIGKILL)
    assert worker.judge(FINE).error == ""
    lost = pytest.raises(Unavailable, match="compiles grammars was lost twice")
    with killed_again_and_again(lambda: worker.pids), lost:
        worker.judge(COSTLY)
    assert worker.judge(FINE).error == ""
