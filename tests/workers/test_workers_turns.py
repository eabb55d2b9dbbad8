"""Which callers get a turn, which wait, and which are turned away."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.contract.errors import Overloaded
from penstock.workers import Turns

PATIENCE = 60.0


def turns(**bounds) -> Turns:
    usual = {"places": 2, "most_waiting": 8, "key_places": 1, "key_waiting": 4, "wait_seconds": PATIENCE}
    return Turns("plays", **usual | bounds, retry_after=3)


class Crowd:
    """Threads that take turns, each until it is told to go."""

    def __init__(self, of: Turns) -> None:
        self._of = of
        self._threads = ThreadPoolExecutor(16)
        self._go: dict[str, threading.Event] = {}
        self._waits = 0
        self.playing: list[str] = []

    def come(self, name: str) -> None:
        """Ask for a turn; the key is the name's first letter."""
        self._go[name] = threading.Event()
        before = self._of.waiting + len(self.playing)
        self._threads.submit(self._play, name)
        self._until(lambda: self._of.waiting + len(self.playing) > before)

    def go(self, name: str, then: list[str]) -> None:
        """End a turn; `then` are the names whose turn comes next."""
        self._go[name].set()
        self._until(lambda: sorted(self.playing) == sorted(then))

    def end(self) -> None:
        """End all turns."""
        for event in self._go.values():
            event.set()
        self._threads.shutdown()

    def _play(self, name: str) -> None:
        with self._of.turn(name[0]):
            self.playing.append(name)
            assert self._go[name].wait(PATIENCE)
            self.playing.remove(name)

    @staticmethod
    def _until(holds) -> None:
        until = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < until
            time.sleep(0.001)


@pytest.fixture
def crowd():
    crowds = []

    def gather(**bounds) -> Crowd:
        crowds.append(Crowd(turns(**bounds)))
        return crowds[-1]

    yield gather
    for each in crowds:
        each.end()


def test_a_key_that_has_much_to_do_leaves_a_place_to_others(crowd):
    some = crowd()
    for name in ("a1", "a2", "a3"):
        some.come(name)
    assert some.playing == ["a1"]
    some.come("b1")
    assert some.playing == ["a1", "b1"]
    some.go("b1", then=["a1"])


def test_keys_take_turns_and_each_keys_own_come_in_order(crowd):
    some = crowd(places=1)
    for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
        some.come(name)
    for name, then in zip(("a1", "a2", "b1", "c1", "a3", "b2"), ("a2", "b1", "c1", "a3", "b2", ""), strict=True):
        some.go(name, then=[then] if then else [])


def test_a_full_queue_sends_away_and_says_when_to_come_again(crowd):
    some = crowd(places=1, most_waiting=3)
    for name in ("a1", "a2", "b1", "c1"):
        some.come(name)
    with pytest.raises(Overloaded, match="Too many plays wait") as refused, some._of.turn("d"):
        pass
    assert refused.value.retry_after == 3
    some.go("a1", then=["a2"])
    some.come("d1")


def test_a_key_may_not_fill_the_queue(crowd):
    some = crowd(places=1, key_waiting=2)
    for name in ("a1", "a2", "a3"):
        some.come(name)
    with pytest.raises(Overloaded, match="of this API key"), some._of.turn("a"):
        pass
    some.come("b1")


def test_without_keys_there_is_nobody_to_leave_room_for():
    one = turns(places=3)
    with one.turn(), one.turn(), one.turn():
        assert one.waiting == 0


def test_nobody_waits_longer_than_that(crowd):
    some = crowd(places=1, wait_seconds=0.05)
    some.come("a1")
    with pytest.raises(Overloaded), some._of.turn("b"):
        pass
    assert some._of.waiting == 0
    some.go("a1", then=[])
    with some._of.turn("b"):
        assert some.playing == []


def test_a_turn_ends_with_an_exception_and_a_wait_with_ctrl_c(crowd, monkeypatch):
    one = turns(places=1)

    def interrupted(*_):
        raise KeyboardInterrupt

    with one.turn("a"), monkeypatch.context() as patch:
        patch.setattr(threading.Event, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt), one.turn("b"):
            pass
        assert one.waiting == 0
    with pytest.raises(ZeroDivisionError), one.turn("a"):
        1 / 0  # noqa: B018
    with one.turn("b"):
        assert one.waiting == 0
