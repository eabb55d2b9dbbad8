"""Turns of threads: one that goes first is not kept waiting, and one that gives way does not wait for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from penstock import thread_turns
from penstock.thread_turns import give_way, going_first, letting_others, taking_turns, wait_for_first

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


def test_who_goes_first_does_not_wait_for_itself():
    """Work that side threads do in pieces may be done in the step's own thread."""
    began = time.monotonic()
    with going_first():
        wait_for_first()
        give_way()
        with letting_others():
            wait_for_first()
        wait_for_first()
    assert time.monotonic() - began < LONG / 2


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


class Alternating(threading.Thread):
    """A thread that takes turns with others, and notes each part of its work."""

    def __init__(self, name: str, noted: list[str], parts: int) -> None:
        super().__init__(name=name)
        self._noted, self._parts = noted, parts

    def run(self) -> None:
        with taking_turns():
            for _ in range(self._parts):
                self._noted.append(self.name)
                give_way()


def two_alternating(noted: list[str], parts: int) -> list[Alternating]:
    """Both have begun."""
    both = [Alternating(name, noted, parts) for name in "ab"]
    for each in both:
        each.start()
    return both


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for what other threads do."""
    last = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < last
        time.sleep(0.001)


def test_of_threads_that_take_turns_one_goes_on_at_a_time_and_the_next_when_it_gives_way():
    noted: list[str] = []
    with taking_turns():
        both = two_alternating(noted, 3)
        wait_for(lambda: len(thread_turns._baton._waiting) == 2)
        assert not noted
    for each in both:
        each.join(LONG)
    assert sorted(noted) == [*"aaabbb"]
    assert noted not in ([*"aaabbb"], [*"bbbaaa"]), "nobody keeps its turn to its end"


def test_who_takes_turns_waits_for_who_goes_first_and_lets_the_others_pass():
    noted: list[str] = []
    with going_first():
        both = two_alternating(noted, 2)
        wait_for(lambda: sorted(noted) == ["a", "b"])  # the first parts, and then both wait
        both[0].join(0.1)
        assert len(noted) == 2
    for each in both:
        each.join(LONG)
    assert len(noted) == 4


def test_who_waits_for_who_goes_first_may_keep_its_turn():
    with taking_turns():
        alone = Alternating("a", [], 1)
        alone.start()
        wait_for(lambda: len(thread_turns._baton._waiting) == 1)
        wait_for_first()
        assert len(thread_turns._baton._waiting) == 1
    alone.join(LONG)
    assert not alone.is_alive()


def test_a_turn_ends_with_what_raises():
    with pytest.raises(RuntimeError, match="a search"), taking_turns():
        raise RuntimeError("a search")
    alone = Alternating("a", [], 1)
    alone.start()
    alone.join(LONG)
    assert not alone.is_alive()
