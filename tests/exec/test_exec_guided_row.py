"""Where the work on a form is done: masks that prove to be quick in the step's own thread, all others beside it."""

from __future__ import annotations

import threading
import time

import pytest
from test_exec_grammar_masking import (
    PATIENCE,
    Budgets,
    Given,
    Listed,
    admitted,
    draw,
    logits_of,
    masked_rows,
    row_views,
)

from penstock.contract.plan import Row
from penstock.exec import grammar_masking, guided_row, side_threads
from penstock.exec.grammar_masking import GrammarMasking
from penstock.kernels.torch_backend import TorchBackend

HERE = threading.current_thread().name
BESIDE = "penstock-forms"


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(grammar_masking, "_PATIENCE_SECONDS", PATIENCE)
    monkeypatch.setattr(grammar_masking, "_SHORT_PATIENCE_SECONDS", PATIENCE)
    monkeypatch.setattr(side_threads, "_LONG_SECONDS", PATIENCE)


class Watched(Listed):
    """Notes in which thread it is asked for masks; `slow` of them take long."""

    def __init__(self, allowed: set[int], slow: frozenset[int] = frozenset()) -> None:
        super().__init__(allowed)
        self.slow, self.threads = slow, []

    def mask(self) -> bytes:
        self.threads.append(threading.current_thread().name)
        if len(self.threads) in self.slow:
            until = time.thread_time() + 0.01
            while time.thread_time() < until:
                pass
        return super().mask()


def draws(masking: GrammarMasking, rows: list[Row], steps: int) -> list[list[int]]:
    sampling = [draw(temperature=0)] * len(rows)
    return [
        masking.sample(logits_of(len(rows)), sampling, [2] * len(rows), masking.begin(rows), row_views).tokens
        for _ in range(steps)
    ]


def test_masks_that_were_quick_are_computed_in_the_steps_thread(monkeypatch):
    monkeypatch.setattr(guided_row, "_QUICK_SECONDS", 1.0)
    monkeypatch.setattr(guided_row, "_SLOW_MASK_SECONDS", 1.0)
    matcher = Watched({4})
    masking, rows = masked_rows([matcher])
    assert draws(masking, rows, 6) == [[4]] * 6
    assert matcher.threads == [BESIDE] * 3 + [HERE] * 4


def test_after_a_mask_that_took_long_more_of_them_must_be_quick(monkeypatch):
    monkeypatch.setattr(guided_row, "_QUICK_SECONDS", 0.005)
    monkeypatch.setattr(guided_row, "_SLOW_MASK_SECONDS", 0.005)
    matcher = Watched({4}, slow=frozenset({5}))
    masking, rows = masked_rows([matcher])
    assert draws(masking, rows, 13) == [[4]] * 13
    assert matcher.threads == [BESIDE] * 3 + [HERE] * 2 + [BESIDE] * 6 + [HERE] * 3


def test_masks_that_take_long_are_never_computed_in_the_steps_thread(monkeypatch):
    monkeypatch.setattr(guided_row, "_QUICK_SECONDS", 0.0)
    matcher = Watched({4})
    masking, rows = masked_rows([matcher])
    draws(masking, rows, 8)
    assert HERE not in matcher.threads
    assert masking.foresee(0) == ()


def test_a_form_foresees_once_it_has_proved_to_be_quick(monkeypatch):
    monkeypatch.setattr(guided_row, "_QUICK_SECONDS", 1.0)
    monkeypatch.setattr(guided_row, "_SLOW_MASK_SECONDS", 1.0)
    masking, rows = masked_rows([Listed({4, 9}), None])
    seen = []
    for _ in range(4):
        draws(masking, rows, 1)
        seen.append(masking.foresee(0))
    assert seen[0] == ()
    assert seen[-1] == (4,) * 16
    assert masking.foresee(1) == ()
    masking.release(0)
    assert masking.foresee(0) == ()


def test_the_token_that_a_budget_makes_due_is_foreseen():
    masking = GrammarMasking(TorchBackend(), Given([]), Budgets())
    masking.admit(admitted(0, 1))
    assert masking.foresee(0) == ()
    draws(masking, [Row(0, 1, 1, (), True)], 1)
    assert masking.foresee(0) == (4,)


class Searching(Listed):
    """A matcher that never takes a token at once; `slow` of its searches take long."""

    def __init__(self, allowed: set[int], slow: set[int]) -> None:
        super().__init__(allowed)
        self.slow = slow

    def take(self, token: int) -> bool:
        until = time.thread_time() + (0.02 if len(self.taken) in self.slow else 0.0)
        while time.thread_time() < until:
            pass
        return super().take(token)

    def take_at_once(self, token: int) -> bool | None:
        return None


def test_after_a_long_search_no_step_waits_for_the_next_eight_pieces_of_work(monkeypatch):
    monkeypatch.setattr(guided_row, "_LONG_SECONDS", 0.01)
    monkeypatch.setattr(guided_row, "_QUICK_SECONDS", 0.0)  # each token is a search and a mask
    submitted: list[bool] = []
    submit = side_threads.SideThreads.submit

    def noting(threads, work, *, long=False):
        submitted.append(long)
        return submit(threads, work, long=long)

    monkeypatch.setattr(side_threads.SideThreads, "submit", noting)
    masking, rows = masked_rows([Searching({4}, slow={1})])
    drawn = 0
    while drawn < 7:
        masking.begin_step(rows)
        draws(masking, rows, 1)
        drawn += not masking.waits(0)
    assert submitted[:13] == [False] * 4 + [True] * 8 + [False]
