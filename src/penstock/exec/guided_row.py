"""One guided answer in the runner: its matcher, the mask of its next token, and the tokens that were tried.

Slow work happens in side threads, one piece at a time: making a matcher, advancing it by a search for an ending, or
computing a mask. Until it is done the row waits and a later step asks again; the results do not depend on when they
arrive. A token that needs no search is taken in the step's own thread. Masks are computed there too, once a few masks
were quick: handing work to another thread and back takes several times as long as most masks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from torch import Tensor

from penstock.contract.errors import EngineFault, PenstockError
from penstock.contract.ports import Matcher
from penstock.exec.side_threads import SideThreads
from penstock.kernels.backend import RuleOut

__all__ = ["GuidedRow"]

_LONG_SECONDS = 0.005
_SLOW_SECONDS = 0.001
"""CPU time above which work counts as long: in a side thread, and for a token in the step's own thread."""
_LONG_FOR = 8
"""Pieces of work after a long one for which no step waits: searches come back every few tokens."""
_SLOW_MASK_SECONDS = 0.003
_QUICK_SECONDS = 0.001
_PROVEN = 3
"""After this many quick masks in a row, the next ones are computed in the step's own thread; the number doubles each
time that one of these takes long."""

_Result = TypeVar("_Result")


class GuidedRow:
    """The form of the sequence in one slot. Owned by `GrammarMasking`.

    Args:
        threads: where the work is done.
        make: makes the matcher, advanced past what was generated before a preemption; returns None if it cannot be.
        rule_out: rules tokens out of a row of logits, as `Backend.rule_out` does.

    Attributes:
        mask: gives, when it is done, whether the next token has a mask; if not, the row is broken.
    """

    def __init__(self, threads: SideThreads, make: Callable[[], Matcher | None], rule_out: RuleOut) -> None:
        self._threads = threads
        self._rule_out = rule_out
        self._matcher: Matcher | None = None
        self._refused: set[int] = set()  # not allowed after the tokens so far
        self._closing: int | None = None  # first token of the known ending, once requested
        self._trying: tuple[int, Future[bool]] | None = None
        self._expected_long = 0  # pieces of work to come
        self._slow = False  # whether a token taken at once was slow; holds for the rest of the answer
        self._quick = 0  # quick masks in a row
        self._needed = _PROVEN
        self._ahead: list[tuple[Matcher, bytes]] = []  # after each followed draft: matcher and mask
        self._allowed: bytes = b""  # the mask of the next token
        self.mask: Future[bool] = self._submit(lambda: self._begin(make))

    @property
    def unknown(self) -> Future[bool]:
        """The future of the work under way; a finished one if there is none."""
        return self.mask if self._trying is None else self._trying[1]

    def lower(self, logits: Tensor, lowered: Tensor) -> None:
        """Write the logits `[V]` to `lowered`, with -inf for what the mask rules out; requires `mask`."""
        self._rule_out(logits, self._allowed, lowered)

    @property
    def goes_along(self) -> bool:
        """Whether `lower_along` may be called: the mask is known, and work was quick so far."""
        return self._proven and self._trying is None and not self._refused and self.mask.done() and self.mask.result()

    def lower_along(self, logits: Tensor, lowered: Tensor, drafts: Sequence[int]) -> int:
        """As `lower`, for the place of the next token and the places after each of `drafts`, as far as that is quick.

        Does not move the matcher: a call of `arrive` must follow, and does that.

        Args:
            logits: `[1 + D, V]`.
            lowered: `[1 + D, V]`, written.
            drafts: `D` drafts.

        Returns:
            How many drafts are allowed without a search; the places after these are written too.
        """
        began, matcher = time.thread_time(), self._followed()
        self._ahead = [(matcher, self._allowed)]
        self.lower(logits[0], lowered[0])
        for place, draft in enumerate(drafts, start=1):
            matcher = matcher.copy()
            mask = _mask_behind(matcher, draft)
            if not mask:
                break
            self._rule_out(logits[place], mask, lowered[place])
            self._ahead.append((matcher, mask))
            if time.thread_time() - began > _SLOW_MASK_SECONDS:
                self._is_slow()
                break
        return len(self._ahead) - 1

    def arrive(self, count: int) -> None:
        """Advance past the first `count` drafts, which were drawn."""
        self._matcher, self._allowed = self._ahead[count]
        self._ahead = []

    def take(self, token: int) -> Future[bool]:
        """Whether the matcher has advanced past `token`. A second call for the same token does not try again."""
        if token in self._refused:
            return _known(False)
        if self._trying is None:
            matcher = self._followed()
            taken = self._take_at_once(matcher, token)
            if taken is not None:
                return _known(taken)
            self._trying = token, self._submit(lambda: matcher.take(token))
        assert self._trying[0] == token, "what a row draws depends on the row alone"
        return self._trying[1]

    def settle(self, token: int, taken: bool) -> None:
        """Apply the result of `take`: go on to the next token, or remember that this one is not allowed."""
        if token in self._refused:  # a repeated call: another token is being tried
            return
        self._trying = None
        if taken:
            self._refused.clear()
            self._closing = None
            self.mask = _known(self._at_once(self._fill)) if self._proven else self._submit(self._fill)
        else:
            self._refused.add(token)

    def closing(self) -> int:
        """See `Matcher`; the result stays the same until `settle` says that a token was taken.

        By then a side thread may already have moved the matcher past that token.
        """
        if self._closing is None:
            self._closing = self._followed().closing()
        return self._closing

    def foresee(self, most: int) -> tuple[int, ...]:
        """See `Matcher`; nothing if that might take long or work is under way."""
        if not self._proven or self._trying is not None or not (self.mask.done() and self.mask.result()):
            return ()
        matcher = self._followed()
        return self._at_once(lambda: matcher.foresee(most))

    @property
    def _long(self) -> bool:
        """Whether the next work is likely to be long."""
        return self._expected_long > 0

    @property
    def _proven(self) -> bool:
        """Whether masks and guesses may be computed in the step's own thread."""
        return self._quick >= self._needed and not self._long

    def _at_once(self, work: Callable[[], _Result]) -> _Result:
        """Do `work` in this thread; if it takes long, the next pieces of work go to a side thread."""
        began = time.thread_time()
        result = work()
        if time.thread_time() - began > _SLOW_MASK_SECONDS:
            self._is_slow()
        return result

    def _is_slow(self) -> None:
        self._quick = 0
        self._needed *= 2

    def _submit(self, work: Callable[[], bool]) -> Future[bool]:
        """Submit work to a side thread, or to a thread of its own if it is likely to take long."""

        def timed() -> bool:
            began = time.thread_time()
            try:
                return work()
            finally:
                took_long = time.thread_time() - began > _LONG_SECONDS
                self._expected_long = _LONG_FOR if took_long else max(self._expected_long - 1, 0)

        return self._threads.submit(timed, long=self._long)

    def _take_at_once(self, matcher: Matcher, token: int) -> bool | None:
        """Call `Matcher.take_at_once` in this thread; None if that is likely to take long, without trying."""
        if self._long or self._slow:
            return None
        began = time.thread_time()
        taken = matcher.take_at_once(token)
        self._slow = time.thread_time() - began > _SLOW_SECONDS
        return taken

    def _followed(self) -> Matcher:
        assert self._matcher is not None, "a row without a mask draws nothing"
        return self._matcher

    def _begin(self, make: Callable[[], Matcher | None]) -> bool:
        try:
            self._matcher = make()
        except PenstockError:
            return False
        return self._matcher is not None and self._fill()

    def _fill(self) -> bool:
        """Compute the mask."""
        began = time.thread_time()
        try:
            mask = self._followed().mask()
        except EngineFault:
            return False
        self._quick = self._quick + 1 if time.thread_time() - began < _QUICK_SECONDS else 0
        self._allowed = mask
        return True


def _mask_behind(matcher: Matcher, token: int) -> bytes:
    """The mask after `token`; b"" if it is not allowed, would take a search, or breaks the grammar."""
    try:
        return matcher.mask() if matcher.take_at_once(token) else b""
    except EngineFault:
        return b""


def _known(result: bool) -> Future[bool]:
    future: Future[bool] = Future()
    future.set_result(result)
    return future
