"""Turns of threads: who goes first is not kept waiting, and who gives way is not kept for ever."""

from __future__ import annotations

import threading

import pytest

from penstock import thread_turns
from penstock.thread_turns import give_way, going_first, letting_others

LONG = 30.0


class Polite:
    """A thread that gives way once."""

    def __init__(self) -> None:
        self.passed = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        give_way()
        self.passed.set()

    def join(self) -> None:
        self._thread.join(LONG)


@pytest.fixture(autouse=True)
def patient(monkeypatch, request):
    if "for_ever" not in request.node.name:
        monkeypatch.setattr(thread_turns, "_MOST_SECONDS", LONG)


def test_nobody_gives_way_to_nobody():
    polite = Polite()
    assert polite.passed.wait(LONG)
    polite.join()


def test_others_wait_until_who_goes_first_is_done():
    with going_first():
        polite = Polite()
        assert not polite.passed.wait(0.1)
    assert polite.passed.wait(LONG)
    polite.join()


def test_others_go_on_while_who_goes_first_lets_them():
    with going_first():
        polite = Polite()
        with letting_others():
            assert polite.passed.wait(LONG)
        polite.join()
        late = Polite()
        assert not late.passed.wait(0.1)
    late.join()


def test_letting_others_by_itself_leaves_nobody_first():
    with letting_others():
        pass
    polite = Polite()
    assert polite.passed.wait(LONG)
    polite.join()


def test_a_step_that_raises_goes_first_no_longer():
    with pytest.raises(RuntimeError, match="a step"), going_first():
        raise RuntimeError("a step")
    polite = Polite()
    assert polite.passed.wait(LONG)
    polite.join()


def test_nobody_gives_way_for_ever():
    with going_first():
        polite = Polite()
        assert polite.passed.wait(LONG)
    polite.join()
